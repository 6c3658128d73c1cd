"""Around and inside the engine's own step: hooks that write and read, optimizers that raise, look and assign."""

import contextlib
import copy
import pickle

import pytest
import torch

from tests.dist import own_optimizers as own
from tests.dist.every_engine import KINDS, PIECES, SHARDED, momentum
from tests.dist.telling import Stories

STORIES = Stories()
story = STORIES.story
NOT_STEPPED_IN_PIECES = ("bucketed", "zero3", "fsdp")
UNGATHERED = "was written to, and nobody has gathered it; write before engine.step"
HALF = r"it was used inside engine\.step\(\)"
ASSIGNED = r"the data of the piece of '.*' was replaced by \.data ="


def twice(user):
    user.train(0, 1)


@torch.no_grad()
def clamp(optimizer):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.clamp_(-0.1, 0.1)


# Who steps.


@story(
    on=(*KINDS, "torch_ddp"),
    optimizer=momentum,
    refused=r"engine\.optimizer\.step\(\): .*; write engine\.step\(\)",
    instead=lambda user: rates_fall(user, torch.optim.lr_scheduler.StepLR(user.optimizer, 1, 0.5)),
)
def only_the_engine_steps(user):
    scheduler = torch.optim.lr_scheduler.StepLR(user.optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    user.go_back(0)
    for step in (user.optimizer.step, lambda: scaler.step(user.optimizer)):
        with user.refused():
            step()
    user.zero_grad()
    rates_fall(user, scheduler)
    assert user.learning_rate == 0.05
    optimizer, others = user.optimizer, []
    if user.name != "torch_ddp":
        others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        assert all(other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"] for other in others)
        assert len(optimizer.state_dict()["state"]) > 0
    user.close()
    for free in others:
        free.zero_grad()
        free.step()


def rates_fall(user, scheduler):
    user.train(0)
    scheduler.step()
    user.train(1)


story(name="the_optimizer_assigns", optimizer=own.Assigns, on=("bucketed",))(lambda user: user.train(0, 1, 2, 3))


@story(optimizer=own.Assigns, on=(*PIECES, "fsdp-offload"), refused=ASSIGNED, instead=None)
def an_optimizer_that_assigns_to_pieces(user):
    """It goes on stepping what nobody gathers, so it is refused for good."""
    user.train(0)
    for use in (lambda: user.go_back(1), user.step, user.full_state_dict, lambda: user.save(user.directory)):
        user.refuses(use)
    with user.refused():
        user.close()


# Hooks of the optimizer that write.


@story(on=(*NOT_STEPPED_IN_PIECES, "fsdp-no_shard", "fsdp-offload"))
def written_by_one_rank_in_a_hook(user):
    """In full parameters: it is in the piece of one rank alone."""
    user.optimizer.register_step_post_hook(lambda *_: halve_first_row(user))
    twice(user)


@torch.no_grad()
def halve_first_row(user):
    with user.full_params(keep_changes=True) as model:
        model[0].weight[0].mul_(0.5)


@torch.no_grad()
def clamp_far(optimizer):
    """In place, but no value changes."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.clamp_(-100.0, 100.0)


@torch.no_grad()
def clamp_some(optimizer):
    """A rank that holds nothing of a parameter has no gradient there."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                tensor.clamp_(-0.1, 0.1)


@story()
def clamped_by_a_hook(user):
    for change in (clamp_far, clamp, clamp_some):
        hook = user.optimizer.register_step_post_hook(lambda optimizer, *_, change=change: change(optimizer))
        twice(user)
        hook.remove()


@torch.no_grad()
def shrink_in_place(user):
    for param in user.module.parameters():
        param.mul_(0.9)


@story(on=("bucketed",))
def parameters_are_written_before_the_update(user):
    user.optimizer.register_step_pre_hook(lambda *_: shrink_in_place(user))
    twice(user)


# Hooks of the optimizer that read.


def averaging(user, read):
    average = []

    def update(*_):
        values = read(user)
        average[:] = [0.7 * old + 0.3 * new for old, new in zip(average or values, values, strict=True)]

    user.optimizer.register_step_post_hook(update)
    user.train(0, 1, 2)
    return dict(enumerate(average))


def copies(user):
    return [param.detach().clone() for param in user.module.parameters()]


@story(on=("zero1", "zero2"), refused=HALF, instead=lambda user: user.train(0, 0, 0, 0, 0, 1))
def a_hook_uses_a_module_that_is_half_stepped(user):
    """It raises, and nothing of the step is lost."""
    uses = (copies, shrink_in_place, halve_first_row, lambda user: user.loss(0))
    for use in uses:
        for register in (user.optimizer.register_step_pre_hook, user.optimizer.register_step_post_hook):
            hook = register(lambda *_, use=use: use(user))
            user.go_back(0)
            user.refuses(user.step)
            hook.remove()
    twice(user)


@story(on=(*NOT_STEPPED_IN_PIECES, "fsdp-offload", "fsdp-offload-all"))
def a_hook_averages_the_full_state(user):
    return averaging(user, lambda user: list(user.full_state_dict().values()))


@story(on=(*NOT_STEPPED_IN_PIECES, "fsdp-no_shard", "fsdp-offload", "fsdp-offload-no_shard"), optimizer=own.Steps)
def an_optimizer_computes_with_what_it_has_stepped(user):
    """Not with the copy in host memory, which is older until the step is over."""
    outputs, row = [], torch.ones_like(user.rows(0)[0][:1])  # the same on all ranks

    @torch.no_grad()
    def look(_):
        outputs.append(user(row).clone())

    user.optimizer.after = look
    twice(user)
    return dict(enumerate(outputs))


# In the middle of it, and after an error.


def clamped_after_each(user):
    for step in range(2):
        user.train(step)
        clamp(user.optimizer)


for kind in (own.Steps, own.steps_and_more):

    @story(name=f"{kind.__name__}_writes_after_its_base", optimizer=kind, instead=clamped_after_each)
    def writes_after_its_base(user):
        user.optimizer.after = clamp
        twice(user)


for kind in (own.Raises, own.FusedAndRaises):

    @story(name=f"{kind.__name__}_after_the_update", optimizer=kind)
    def raises_after_the_update(user):
        user.train(0)
        user.optimizer.fails = True
        user.go_back(1)
        with pytest.raises(KeyError, match="after the update"):
            user.step()
        user.optimizer.fails = False
        if user.rank is not None:  # nor does what raised open a way round the engine
            with pytest.raises(RuntimeError, match=r"write engine\.step\(\)"):
                user.optimizer.step()
        user.zero_grad()
        user.train(2)


def old_values(user, between):
    """A backward through what a step, or the user, has written over."""
    user.train(0)
    user.go_back(0)
    old = user.loss(1)
    between()
    user.refuses(user.backward, old)
    user.step()
    twice(user)


for kind in (own.Clears, own.Raises, own.FusedAndRaises):

    @story(name=f"a_backward_through_values_from_before_{kind.__name__}", optimizer=kind, on=SHARDED,
           refused="modified by an inplace operation", instead=None)  # fmt: skip
    def backward_through_old_values(user):
        fails = hasattr(user.optimizer, "fails")

        def step():
            user.optimizer.fails = fails
            with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                user.step()
            user.optimizer.fails = False

        old_values(user, step)


# Its state.


@story(optimizer=own.Forgetful, instead=twice)
def an_optimizer_with_its_own_load_state_dict(user):
    user.train(0)
    user.load_full_optimizer_state_dict(user.full_optimizer_state_dict())
    user.save(user.directory)
    user.train(1)
    user.load(user.directory)
    user.train(1)


def adam(tensors):
    return torch.optim.AdamW(tensors, lr=0.05, eps=0.1)


@story(
    on=(*PIECES, "fsdp-dim0", "fsdp-offload-all", "zero2-round_robin"),
    optimizer=adam,
    refused="nothing says of which the state is; write engine.load_full_optimizer_state_dict",
    instead=twice,
)
def the_state_of_another_rank_s_pieces(user):
    user.train(0)
    own_state = user.optimizer.state_dict()
    path = user.directory.with_name("state.pt")
    if user.rank == 0:
        torch.save(own_state, path)
    user.mesh.data.barrier().wait()
    plain = adam([torch.ones(3)]).state_dict()
    for refused in (*([torch.load(path)] if user.rank == 1 else []), plain):
        with user.refused():
            user.optimizer.load_state_dict(refused)
    user.load_full_optimizer_state_dict(user.full_optimizer_state_dict())
    user.train(1)


test_stories = STORIES.told()
