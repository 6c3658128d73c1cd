"""What users write into parameters or put in their place: taken over, or refused with what to write instead."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import KINDS, PIECES, SHARDED, WHOLE, adamw, assert_states, engine_of, momentum
from tests.dist.telling import Stories

STORIES = Stories()
GUIDE = Path(__file__).parents[2] / "notebooks" / "guide" / "loop.md"
story = STORIES.story
WRITTEN = "was written to.*keep_changes=True"
REPLACED = "its data was replaced by"


# Values, inside full_params(keep_changes=True), or where parameters are whole.


def by_data(model):
    model[0].bias.data = torch.ones(model[0].bias.shape, dtype=torch.float64)


def clamped(model):
    for param in model.parameters():
        param.data = param.data.clamp(-0.05, 0.05)


def there_and_back(model):
    model.float()
    model.double()


def as_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())


def swapped(model):
    """Of one shape; the values of each are still those of before when the first is put."""
    model[0].bias.data, model[2].bias.data = model[2].bias.data, model[0].bias.data


def strided(model):
    for param in model.parameters():
        param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data


REPLACEMENTS = (by_data, clamped, there_and_back, as_vector, swapped, strided)


@story(optimizer=momentum, on=(*KINDS, "fsdp-no_shard"))
def data_is_replaced_inside_full_params(user):
    user.train(0)
    for replace in REPLACEMENTS:
        with user.full_params(keep_changes=True) as model:
            replace(model)
        user.train(1, 2)


@story(optimizer=momentum, on=("bucketed",))
def data_is_replaced_where_parameters_are_whole(user):
    user.train(0)
    for replace in REPLACEMENTS:
        replace(user.module)
        if user.rank is not None:
            user.save(user.directory)
            user.load(user.directory)
        user.train(1)
        replace(user.module)
        user.train(2)


@story(on=("zero1", "zero2"), refused=f"'0.bias': {REPLACED}", instead=lambda user: user.train(0, 1, 2))
def data_is_replaced_where_parameters_are_views(user):
    user.train(0)
    user.save(user.directory)
    own = user.module[0].bias.data
    uses = (user.full_state_dict, lambda: user.save(user.directory), lambda: user.load(user.directory), user.step)
    for use in (*uses, lambda: user.go_back(1), lambda: user.go_back(1)):
        by_data(user.module)
        user.refuses(use)
    user.module[0].bias.data = own
    user.train(1)
    user.load(user.directory)
    user.train(1, 2)


@story(
    on=("ddp", "bucketed", "zero1", "zero1-one", "zero2"), instead=None,
    refused="was written to while backward ran.*engine.step",
)  # fmt: skip
def an_optimizer_steps_in_hooks_of_gradients(user):
    """As recipes do that free each gradient at once: each rank would step by its own."""

    def step(param):
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(step) for param in user.module.parameters()]
    user.refuses(user.go_back, 0)
    for hook in hooks:
        hook.remove()
    user.train(0)


@story()
def averaged_weights_are_put_in_and_back(user):
    """As classes do that keep a moving average: the backup is the memory that was there, and no copy."""
    with user.full_params() as model:
        average = {name: param.detach().clone() for name, param in model.named_parameters()}
    for step, guard in enumerate((torch.no_grad, torch.inference_mode)):
        user.train(step)
        with guard():
            backup = {}
            with user.full_params(keep_changes=True) as model:
                for name, param in model.named_parameters():
                    average[name] = (average[name] + param.data) / 2
                    backup[name], param.data = param.data, average[name]
            user.loss(step)
            with user.full_params(keep_changes=True) as model:
                for name, param in model.named_parameters():
                    param.data = backup[name]
    user.train(2)


def stepped_while_held(user):
    for keeps in (False, True):
        user.go_back(0)
        with user.full_params(keep_changes=keeps) as model:
            if keeps:
                with torch.no_grad():
                    model[2].bias.add_(1.0)
            user.step()
            inside = {"bias": model[2].bias.detach().clone()}
            with torch.no_grad():
                user.loss(0)
        user.zero_grad()
    return inside


story(optimizer=momentum, on=WHOLE)(stepped_while_held)


def trained_while_held(user):
    for use in (lambda: user.go_back(0), user.step):
        user.go_back(0)
        with user.full_params(), user.refused():
            use()
        user.zero_grad()
    user.train(0)


story(on=SHARDED, refused=r"full_params\(\)", instead=lambda user: user.train(0))(trained_while_held)
story(name="rounded_trained_while_held", on=PIECES, dtype=torch.float32, options={"precision": "bf16"}, instead=None,
      refused=r"full_params\(\)")(trained_while_held)  # fmt: skip


@story(on=(*KINDS, "fsdp-no_shard"), optimizer=momentum)
def parameters_are_read_and_written_between_backward_and_step(user):
    for keeps in (False, True):
        user.quietly(0, 0)
        with user.full_params():
            copy.deepcopy(user.module)
        user.go_back(0, 1)
        with user.full_params(keep_changes=keeps) as model, torch.no_grad():
            user.full_state_dict()
            for param in model.parameters():
                param.mul_(1.0 if not keeps else 0.9)
            user.loss(1)
        user.step_and_clear()


@story(on=(*KINDS, "fsdp-no_shard"), instead=None)
def changes_are_not_kept(user):
    for factor in (0.5, 1.0 + (user.rank or 0)):
        before = user.full_state_dict()
        with user.full_params() as module, torch.no_grad():
            for param in module.parameters():
                param.mul_(factor)
        holds = 1.0 if user.name == "fsdp" or user.name == "zero3" else factor
        assert_states([user.full_state_dict()], {name: value * holds for name, value in before.items()})


@story(on=(*SHARDED, "fsdp-no_shard"), refused="have changed between forward and backward", instead=None)
def a_backward_through_values_that_are_lost(user):
    with user.full_params() as module:
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(2)
        loss = user.loss(0)
    user.refuses(user.backward, loss)


class Writes(cases.MLP):
    """Forward writes into a parameter, as some normalisations do."""

    def forward(self, x):
        with torch.no_grad():
            self[0].weight.div_(self[0].weight.norm())
        return super().forward(x)


@story(model=Writes, on=WHOLE)
def forward_writes_into_whole_parameters(user):
    for step in range(2):
        user.train(step)
        with torch.inference_mode():
            user.loss(10 + step)


@story(model=Writes, on=(*SHARDED, "fsdp-shard_grad_op", "fsdp-no_shard"), options={"wrap": "root"},
       refused=f"parameter '0\\.weight': it {WRITTEN}", instead=None)  # fmt: skip
def forward_writes_into_gathered_parameters(user):
    for use in (user.full_state_dict, lambda: user.save(user.directory), lambda: user.go_back(1)):
        user.loss(0)
        user.refuses(use)


def halve(module, _):
    module.weight.data = module.weight.data / 2


def convert(module, *_):
    module.weight.data = module.weight.data.float()


@story(on=(*SHARDED, "fsdp-no_shard"), options={"wrap": "root"}, refused=REPLACED, instead=lambda user: user.train(1))
def gathered_data_is_replaced(user):
    for register, change in ((nn.Module.register_forward_pre_hook, halve), (nn.Module.register_forward_hook, convert)):
        hook = register(user.module[2], change)
        user.refuses(user.go_back, 0)
        hook.remove()
    user.train(1)


# Dtypes and shapes.


@story(
    on=("bucketed",), refused=r"parameter '.*': its data was replaced by .*; convert the module before", instead=None
)
def the_module_of_gradients_in_buckets_is_converted(user):
    for dtype in (torch.float32, torch.bfloat16):
        user.module.to(dtype)
        x, y = (part.to(dtype) for part in user.rows(0))
        with user.refused():
            user.backward(cases.loss_of(user(x), y))
            user.step()
        user.zero_grad()


@story(on=PIECES, dtype=torch.float32, options={"precision": "bf16"}, instead=lambda user: clamped(user.module))
def rounded_data_is_replaced_inside_full_params(user):
    assert {param.dtype for param in user.module.parameters()} == {torch.bfloat16}
    with user.full_params(keep_changes=True):
        clamped(user.module)
    user.step()


def doubled(model):
    with torch.no_grad():
        model[0].weight.mul_(2)


def loaded_plainly(model):
    model.load_state_dict(cases.build("MLP").float().state_dict())


@story(on=("zero1", "zero2"), dtype=torch.float32, options={"precision": "bf16"},
       refused=WRITTEN, instead=None)  # fmt: skip
def rounded_copies_are_written_until_they_are_loaded(user):
    user.save(user.directory)
    state = user.full_state_dict()
    for write in (doubled, loaded_plainly):
        for load in (lambda: user.load(user.directory), lambda: user.load_full_state_dict(state)):
            write(user.module)
            for use in (user.step, lambda: user.save(user.directory), user.full_state_dict):
                user.refuses(use)
            load()
            assert_states([user.full_state_dict()], state)


@story(on=(*SHARDED, "fsdp-no_shard"), options={"precision": "bf16"}, instead=None)
def a_gradient_is_computed_with_the_rounded_weights_of_the_forward(user):
    x = user.rows(0)[0].requires_grad_()
    (plain,) = torch.autograd.grad(user(x).double().square().sum(), x)
    loss = user(x).double().square().sum()
    with user.full_params():
        (held,) = torch.autograd.grad(loss, x)
    loss = user(x).double().square().sum()
    user.close()
    for found in (held, *torch.autograd.grad(loss, x)):
        torch.testing.assert_close(found, plain)


# Other parameters and modules in their place.


@story(refused="it was taken out of the module or replaced, and the engine trains what was there", instead=None)
def a_submodule_is_replaced(user):
    model = user.module
    linear, bias = model[2], model[0].bias
    for value in (nn.Linear(16, 16).double(), None, nn.Tanh()):
        model[2] = value
        with user.refused():
            user.go_back(0)
        model[2] = linear
        user.zero_grad()
    model[0].bias = nn.Parameter(torch.zeros(16).double())
    with user.refused():
        user.go_back(0)
    model[0].bias = bias
    user.zero_grad()
    model[1] = nn.Tanh()  # has no parameters
    model[1].alias = model[0]
    model[1].alias = model[2]  # another name for what stays
    holder = nn.ModuleList([model])
    holder[0] = nn.Tanh()  # is no part of the engine's module
    model[2] = nn.Sequential(model[2])  # has those of before
    user.train(0)
    user.close()
    model[2] = nn.Linear(16, 16)


@story(on=(*KINDS, "fsdp-no_shard"), refused="or replaced", instead=lambda user: user.train(0))
def an_attribute_is_replaced_and_put_back(user):
    owned = user.module[4]._parameters
    own, other = owned["weight"], nn.Parameter(torch.zeros(owned["weight"].shape).double())
    owned["weight"] = other
    for use in (user.full_state_dict, user.step, lambda: user.save(user.directory), lambda: user.go_back(0)):
        user.refuses(use)
    owned["weight"] = own
    user.train(0)


class Scaled(nn.Module):
    """With a single element, as CLIP's ``logit_scale``: one that can be written to where others cannot."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(7, 5), nn.Parameter(torch.tensor(5.0))

    def forward(self, x):
        return self.linear(x) * self.scale


def assign(param):
    param.data = torch.ones(param.shape, dtype=param.dtype)


@pytest.mark.parametrize(("strategy", "options"), [("zero3", {}), ("fsdp", {}), ("fsdp", {"sharding": "no_shard"})])
def test_what_is_written_into_a_resharded_parameter_is_refused_and_does_not_stay(strategy, options):
    """Of a parameter that was kept from before the engine; the write would be lost without a word."""
    for write in (torch.zero_, lambda param: param.clamp_(max=4.5), assign):
        model = Scaled().double()
        kept, x = dict(model.named_parameters()), torch.ones(2, 7, dtype=torch.float64)
        with build_engine(strategy, model, adamw, **options) as engine:
            for _ in range(2):
                engine.backward(engine(x).sum())
                engine.step()
                before = engine.full_state_dict()
                # At once, or at the next verb.
                with pytest.raises(RuntimeError, match=r"parameter 'scale'.*full_params\(keep_changes=True\)"):
                    with torch.no_grad():
                        write(kept["scale"])
                    engine(x)
                engine.zero_grad()
                assert_states([engine.full_state_dict()], before)


test_stories = STORIES.told()


def formats(rank, keys):
    """For each strategy: whether a weight keeps the format that it had, and whether the output has the input's."""
    found, last = {}, {"memory_format": torch.channels_last}
    for key in keys:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).double().to(**last)
        with engine_of(key, 2, model, optimizer_fn=momentum) as engine:
            output = engine(torch.ones(2, 3, 8, 8, dtype=torch.float64).to(**last))
            engine.backward(output.sum())
            engine.step()
            with engine.full_params():
                kept = model[0].weight.is_contiguous(**last)
        found[key] = kept, output.is_contiguous(**last)
    return found


def test_weights_in_channels_last_are_kept_as_the_guide_says(pools):
    """Its row of channels_last: held flat they become contiguous, and convolutions go by the format of the input."""
    flat = ("zero1", "zero2", "zero3", "fsdp")
    said = "ZeRO and FSDP hold weights flat, so they become contiguous; convolutions then go by the format of the input"
    assert said in GUIDE.read_text()
    for found in pools(2).run(formats, ("ddp", "bucketed", *flat)):
        assert found == {"ddp": (True, True), "bucketed": (True, True), **dict.fromkeys(flat, (False, True))}
