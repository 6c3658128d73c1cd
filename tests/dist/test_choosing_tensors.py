"""How ``optimizer_fn`` chooses among the tensors it is given: by name, and by all that parameters have, everywhere."""

import itertools

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import KINDS, assert_states, engine_of, sgd
from tests.dist.telling import StepTensorsAlone, Stories

STORIES = Stories()


class Marked(nn.Parameter):
    pass


def marked():
    model = cases.build("MLP")
    for name, param in list(model.named_parameters()):
        if name.endswith("bias"):
            param.no_decay = True
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, made := Marked(param.detach()))
            made.no_decay = True
    return model


def is_bias(name):
    return name.endswith("bias")


def two_groups(wanted, key=lambda one: one):
    """Of those that are wanted, and the others, with other options."""

    def make(tensors):
        ours = [one for one in tensors if wanted(key(one))]
        others = [one for one in tensors if not wanted(key(one))]
        return torch.optim.SGD([{"params": ours, "weight_decay": 0.5}, {"params": others}], lr=0.1)

    return make


def by_name(tensors):
    groups = [{"params": tensors.where(is_bias), "weight_decay": 0.0, "lr": 0.05}]
    groups.append({"params": tensors.where(lambda name: not is_bias(name)), "weight_decay": 0.5})
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def only_one_side(keeps):
    return lambda tensors: sgd([one for one in tensors if hasattr(one, "no_decay") is keeps])


def through_iterators(tensors):
    def some(wanted):
        return filter(lambda one: (one.numel() > 200) is wanted, itertools.chain(tensors))

    return torch.optim.AdamW([{"params": some(True)}, {"params": some(False), "weight_decay": 0.0}], lr=0.1)


def of_a_schedule(tensors):
    rate = float(torch.logspace(-3, -1, 5)[2])  # reads a new tensor
    groups = [{"params": [one for one in tensors if hasattr(one, "no_decay") is has]} for has in (True, False)]
    groups[0]["weight_decay"] = 0.1
    return torch.optim.SGD(groups, lr=rate)


def rates(tensors):
    return torch.optim.SGD([{"params": [one], "lr": 0.5 if one.dim() > 1 else 0.1} for one in tensors], lr=0.1)


def after_a_write(tensors):
    with torch.no_grad():
        torch._foreach_clamp_max_([tensor.mul_(1.0) for tensor in tensors], 1e9)
    return of_a_schedule(tensors)


# By the model that is given: in each, biases are told from weights.
WAYS = {
    "identity": lambda model: two_groups({id(p) for p in model.parameters() if isinstance(p, Marked)}.__contains__, id),
    "attribute": lambda model: two_groups(lambda one: getattr(one, "no_decay", False)),
    "class": lambda model: two_groups(lambda one: isinstance(one, Marked)),
    "dims": lambda model: two_groups(lambda one: one.dim() <= 1),
    "only some": lambda model: only_one_side(True),
    "only others": lambda model: only_one_side(False),
    "iterators": lambda model: through_iterators,
    "schedule": lambda model: of_a_schedule,
    "rates": lambda model: rates,
    "write": lambda model: after_a_write,
}


def by_group(optimizer, named):
    names = {id(tensor): name for name, tensor in named}
    return [[names[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]


def chosen(rank, key):
    for way, make in WAYS.items():
        if way == "write" and key.startswith("fsdp"):  # the values are not there
            continue
        plain, model = marked(), marked()
        expected = by_group(make(plain)(StepTensorsAlone(plain)), plain.named_parameters())
        with engine_of(key, 2, model, optimizer_fn=make(model)) as engine:
            assert by_group(engine.optimizer, engine.step_tensors().items()) == expected, way


@pytest.mark.parametrize("key", ["bucketed", "zero1", "fsdp", "zero2-round_robin", "fsdp-dim0", "fsdp-no_shard"])
def test_groups_are_those_of_the_module_s_parameters(pools, key):
    pools(2).run(chosen, key)


def from_meta(rank):
    """Parameters that the engine allocates in the place of the user's."""
    model = nn.Sequential(nn.Linear(6, 6, device="meta"), nn.Linear(6, 6, device="meta"))
    known = {id(param) for param in model[0].parameters()}
    with engine_of("fsdp", 2, model, optimizer_fn=two_groups(lambda one: id(one) in known)) as engine:
        groups = by_group(engine.optimizer, engine.step_tensors().items())
        assert groups == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


def test_parameters_on_the_meta_device_are_chosen_by_identity_too(pools):
    pools(2).run(from_meta)


@STORIES.story(model="Uneven", optimizer=by_name, on=(*KINDS, "fsdp-dim0", "fsdp-no_shard"))
def groups_by_name_and_schedulers(user):
    scheduler = torch.optim.lr_scheduler.StepLR(user.optimizer, step_size=2, gamma=0.5)
    for step in range(5):
        user.train(step)
        scheduler.step()
    if user.rank is not None:
        user.engine.learning_rate = 0.25
        assert [group["lr"] for group in user.optimizer.param_groups] == [0.25, 0.25]


test_stories = STORIES.told()


# What is done to the tensors on the way.


class Halves(torch.optim.SGD):
    """Changes what it is given when it is built, as an optimizer that normalizes weights does."""

    shardlab_looks_at = "element"

    def __init__(self, tensors):
        super().__init__(tensors, lr=0.1)
        with torch.no_grad():
            for group in self.param_groups:
                for tensor in group["params"]:
                    tensor.mul_(0.5)


def with_effects(rank, key, words):
    calls, before = [], cases.build("MLP").state_dict()

    def counted(tensors):
        calls.append(tensors)
        return Halves(tensors)

    if words:
        model = cases.build("MLP")
        with pytest.raises((ValueError, RuntimeError), match=words), engine_of(key, 2, model, optimizer_fn=counted):
            pass
        assert_states([model.state_dict()], before)  # and it is whole
        return
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=counted) as engine:
        assert_states([engine.full_state_dict()], {name: value / 2 for name, value in before.items()})
    assert len(calls) == 1


def test_what_is_written_while_the_optimizer_is_built_is_there_or_refused(pools):
    for key, words in (("bucketed", ""), ("zero1", ""), ("zero3", "is sharded"), ("fsdp", "is sharded")):
        pools(2).run(with_effects, key, words)


class Early(torch.optim.SGD):
    """Makes state in its constructor."""

    shardlab_looks_at = "element"

    def __init__(self, tensors, rate):
        super().__init__(tensors, lr=rate)
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state[tensor]["sum"] = torch.zeros_like(tensor)


def early(rank, key):
    with engine_of(
        key, 2, cases.build("MLP"), optimizer_fn=lambda tensors: torch.optim.Adagrad(tensors, 0.1)
    ) as engine:
        sums = engine.optimizer.state[engine.step_tensors()[0]]["sum"]
        assert sums.shape == engine.step_tensors()[0].shape
        assert len(engine.optimizer.state) == len(engine.step_tensors())
    if key != "bucketed":
        words, make = r"Early makes state in its constructor.*make it in step\(\)", lambda tensors: Early(tensors, 0.1)
        with pytest.raises(ValueError, match=words), engine_of(key, 2, cases.build("MLP"), optimizer_fn=make):
            pass


@pytest.mark.parametrize("key", KINDS)
def test_state_that_a_constructor_makes_is_of_pieces(pools, key):
    pools(2).run(early, key)
