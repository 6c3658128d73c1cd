"""How ``optimizer_fn`` chooses among the tensors it is given: by name everywhere, by what pieces have not refused."""

import itertools

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import KINDS, PIECES, assert_states, backward, engine_of, sgd
from tests.dist.telling import StepTensorsAlone

UNLIKE = "or by identity, class or attributes"


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


def two_groups(wanted):
    """Of those that are wanted, and the others, with other options."""

    def make(tensors):
        ours, others = [one for one in tensors if wanted(one)], [one for one in tensors if not wanted(one)]
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
    "identity": lambda model: two_groups(
        lambda one, known={id(p) for p in model.parameters() if isinstance(p, Marked)}: id(one) in known
    ),
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


def chosen(rank, key, names, options):
    """The words of a refusal, or the sizes of the groups."""
    found = {}
    for name in names:
        model = marked()
        try:
            with engine_of(key, 2, model, optimizer_fn=WAYS[name](model), **options) as engine:
                found[name] = sorted(len(group["params"]) for group in engine.optimizer.param_groups)
        except ValueError as error:
            found[name] = "; ".join([str(error), *getattr(error, "__notes__", ())])
    return found


BY_DIMS = ("dims", "rates")
KNOWN_OF = {"zero2-round_robin": BY_DIMS, "fsdp-dim0": BY_DIMS, "fsdp-no_shard": (*BY_DIMS, "iterators")}


@pytest.mark.parametrize("key", ["bucketed", "zero1", "fsdp", "zero2-round_robin", "fsdp-dim0", "fsdp-no_shard"])
def test_by_what_pieces_do_not_have_is_refused(pools, key):
    names = [name for name in WAYS if name != "write" or not key.startswith("zero")]  # which writes into the pieces
    for found in pools(2).run(chosen, key, names, {}):
        for name, answer in found.items():
            # Whole parameters and rows have dims; where all are whole they have sizes too.
            if key == "bucketed" or name in KNOWN_OF.get(key, ()):
                assert sum(answer) in (3, 6), name
            else:
                assert "optimizer_fn: " in answer
                assert any(text in answer for text in (UNLIKE, "could not be tried", "it is given this rank's pieces")), (name, answer)
                assert "tensors.where" in answer


def test_whole_pieces_have_dims_and_no_size(pools):
    options = {"partition": "balanced"}
    for key in PIECES:
        for found in pools(2).run(chosen, key, ["dims", "iterators"], options):
            assert found["dims"] == [3, 3]
            assert "optimizer_fn: it groups tensors by their shape or size" in found["iterators"]


def grouped_and_scheduled(rank, key):
    made = []

    def make(tensors):
        made.append(by_name(tensors))
        return made[-1]

    with engine_of(key, 2, cases.build("Uneven"), optimizer_fn=make) as engine:
        assert engine.optimizer is made[-1]
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2, gamma=0.5)
        for step in range(5):
            backward(engine, "Uneven", step)
            engine.step()
            engine.zero_grad()
            scheduler.step()
        engine.learning_rate = 0.25
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.25, 0.25]
        return engine.full_state_dict()


@pytest.mark.parametrize("key", [*KINDS, "fsdp-dim0", "fsdp-no_shard"])
def test_groups_by_name_and_schedulers(pools, key):
    model = cases.build("Uneven")
    optimizer = by_name(StepTensorsAlone(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(5):
        x, y = cases.rows("Uneven", step, 0, 2)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert_states(pools(2).run(grouped_and_scheduled, key), model.state_dict())


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


def hooked(tensors):
    for tensor in tensors:
        tensor.register_hook(torch.zeros_like)
        tensor.register_post_accumulate_grad_hook(lambda param: param.data.zero_())
        tensor.kept, tensor.grad, tensor.requires_grad = torch.zeros_like(tensor), torch.ones_like(tensor), True
    return by_name(tensors)


def with_effects(rank, key):
    """One call where all tensors are in one group; and trials leave nothing at the parameters."""
    calls, before = [], cases.build("MLP").state_dict()

    def counted(tensors):
        calls.append(tensors)
        return Halves(tensors)

    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=counted) as engine:
        engine.step()  # gathers what was written into pieces
        assert_states([engine.full_state_dict()], {name: value / 2 for name, value in before.items()})
    num_hooks = []
    for make in (sgd, hooked):
        with engine_of(key, 2, cases.build("MLP"), optimizer_fn=make) as engine:
            params = list(engine.params.values())
            num_hooks.append([len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in params])
            assert make is sgd or all(hasattr(one, "kept") for one in engine.step_tensors())
            assert key == "bucketed" or not any(hasattr(param, "kept") for param in params)
            assert key == "bucketed" or all(param.grad is None for param in params)
    assert key == "bucketed" or num_hooks[0] == num_hooks[1]
    return len(calls)


@pytest.mark.parametrize("key", KINDS)
def test_what_is_done_to_the_tensors_is_done_to_them_alone(pools, key):
    assert pools(2).run(with_effects, key) == [1, 1]


def lacks_memory(tensors):
    if not next(iter(tensors)).is_meta:
        raise torch.OutOfMemoryError("no room for the state")
    return sgd(tensors)


def fails_with_pieces(tensors):
    for one in tensors:
        if one.numel() != 16:
            raise LookupError("16 elements were expected")
    return sgd(tensors)


def raises_it(rank, key):
    for make, words in (
        (lacks_memory, "no room for the state"),
        (fails_with_pieces, r"LookupError: 16 elements were expected; optimizer_fn: it is given this rank's pieces"),
        (lambda tensors: torch.optim.AdamW(tensors, lr=-1.0), "Invalid learning rate"),
    ):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with pytest.raises((ValueError, RuntimeError), match=words), engine_of(key, 2, model, optimizer_fn=make):
            pass


@pytest.mark.parametrize("key", ["zero1", "fsdp"])
def test_another_error_of_the_function_is_told(pools, key):
    pools(2).run(raises_it, key)
