"""Around and inside the engine's own step: hooks that write and read, optimizers that raise, look and assign."""

import contextlib
import copy
import pickle

import pytest
import torch

from tests.dist import own_optimizers as own
from tests.dist.every_engine import KINDS, PIECES, SHARDED, WHOLE, momentum
from tests.dist.telling import Stories

STORIES = Stories()
story = STORIES.story
NOT_STEPPED_IN_PIECES = ("bucketed", "zero3", "fsdp")
STALE = "pieces were written to.*engine.full_params"
UNGATHERED = "pieces were written to.*before engine.step"


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


@story(optimizer=own.RaisesFirst, refused=r"write engine\.step\(\)", instead=None)
def a_step_that_raised_opens_no_way_round_the_engine(user):
    user.go_back(0)
    with pytest.raises(ArithmeticError, match="once"):
        user.step()
    with user.refused():
        user.optimizer.step()
    user.step()
    assert user.num_steps == 1


for kind in (own.Assigns, own.HeavyBall, own.Extrapolates):
    STORIES.story(name=f"the_optimizer_is_{kind.__name__}", optimizer=kind)(lambda user: user.train(0, 1, 2, 3))


@story(optimizer=own.WithoutHooks)
def the_optimizer_has_no_hooks(user):
    user.go_back(0)
    user.step()


# Hooks of the optimizer that write.


@story(on=NOT_STEPPED_IN_PIECES)
def clamped_through_data_by_a_hook(user):
    """Where pieces are gathered, what is written through ``.data`` after that is seen by nobody."""

    def clamp_data(optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.data.clamp_(-0.1, 0.1)

    user.optimizer.register_step_post_hook(clamp_data)
    twice(user)


@story(on=(*KINDS, "fsdp-no_shard"))
def written_by_one_rank_in_a_hook(user):
    """In full parameters: it is in the piece of one rank alone."""

    @torch.no_grad()
    def halve(*_):
        with user.full_params(keep_changes=True) as model:
            model[0].weight[0].mul_(0.5)

    user.optimizer.register_step_post_hook(halve)
    twice(user)


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


@story(on=(*KINDS, "fsdp-no_shard"))
def clamped_in_full_params(user):
    with user.full_params(keep_changes=True) as model:

        @torch.no_grad()
        def clamp_all(*_):
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)

        user.optimizer.register_step_post_hook(clamp_all)
        twice(user)


@story()
def logged_by_some(user):
    if not user.rank:
        user.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0]["lr"])
    twice(user)


@story()
def patched_and_held(user):
    step = user.optimizer.step

    def patched(*args):
        step(*args)
        clamp(user.optimizer)

    user.optimizer.step = patched
    with user.full_params():
        twice(user)


@story(on=(*KINDS, "fsdp-no_shard"))
def parameters_are_written_before_the_update(user):
    for assigns in (False, True):
        with user.full_params(keep_changes=True) as model:

            @torch.no_grad()
            def shrink(*_, assigns=assigns, model=model):
                for param in model.parameters():
                    if assigns:
                        param.data = param.data * 0.9
                    else:
                        param.mul_(0.9)

            hook = user.optimizer.register_step_pre_hook(shrink)
            twice(user)
            hook.remove()


@story()
def pieces_are_written_before_the_update(user):
    @torch.no_grad()
    def shrink(optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.mul_(0.9)

    user.optimizer.register_step_pre_hook(shrink)
    twice(user)


@torch.no_grad()
def write_into_copies(user):
    for param in user.module.parameters():
        param.mul_(0.5)


@story(on=("zero1", "zero2"), options={"precision": "bf16"}, refused="it is a rounded copy", instead=None)
def a_hook_writes_into_rounded_copies(user):
    state = user.full_state_dict()
    hook = user.optimizer.register_step_pre_hook(lambda *_: write_into_copies(user))
    user.go_back(0)
    with user.refused():
        user.step()
    hook.remove()
    with pytest.raises(RuntimeError, match="Missing key"):
        user.load_full_state_dict({})
    with user.refused():
        user.step()
    user.load_full_state_dict(state)  # replaces it
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


@story(on=WHOLE)
def a_hook_averages_the_module(user):
    return averaging(user, lambda user: [param.detach().clone() for param in user.module.parameters()])


@story(on=(*KINDS, "fsdp-offload"))
def a_hook_averages_the_full_state(user):
    return averaging(user, lambda user: list(user.full_state_dict().values()))


class Hooked(own.Assigns):
    """Registers a hook itself, and so needs to say what it looks at."""

    shardlab_looks_at = "element"
    read = None

    def __init__(self, params):
        super().__init__(params)
        self.seen = []
        self.register_step_post_hook(lambda *_: self.seen.append(self.read()))


@story(optimizer=Hooked, on=(*KINDS, "fsdp-no_shard"), instead=None)
def a_hook_reads_what_is_there_after_the_step(user):
    late = []
    for holds in (False, True):
        user.optimizer.read = (
            (lambda: [p.detach().clone() for p in user.module.parameters()]) if holds
            else (lambda: list(user.full_state_dict().values()))
        )  # fmt: skip
        hook = user.optimizer.register_step_post_hook(lambda *_: late.append(user.optimizer.read()))
        with user.full_params() if holds else contextlib.nullcontext():
            user.train(0)
            for seen in (user.optimizer.seen[-1], late[-1]):
                assert all(torch.equal(*pair) for pair in zip(seen, user.optimizer.read(), strict=True))
        hook.remove()


@story(optimizer=own.Steps, on=("fsdp-offload", "fsdp-offload-all"), instead=None)
def a_state_read_inside_an_offloaded_step_is_the_stepped_one(user):
    seen = []
    user.optimizer.after = lambda _: seen.append(user.full_state_dict())
    user.train(0)
    assert all(torch.equal(value, seen[0][name]) for name, value in user.full_state_dict().items())


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

    @story(name=f"{kind.__name__}_evaluates", optimizer=kind, on=("zero1",), refused="pieces were written to",
           instead=twice)  # fmt: skip
    def evaluates(user):
        """A model of old and new pieces."""
        user.optimizer.after = lambda _: user.loss(0)
        user.go_back(0)
        with user.refused():
            user.step()
        user.optimizer.after = None
        user.zero_grad()
        user.step()  # of nothing: it gathers what the step that was refused had stepped
        user.train(1)


@story(optimizer=own.steps_and_more, instead=clamped_after_each)
def hooks_that_torch_runs_halfway_through_a_step(user):
    user.optimizer.after = clamp
    logged_by_some(user)


@story(optimizer=own.Looks, on=SHARDED, refused=STALE, instead=twice)
def the_model_is_used_in_the_middle_of_a_step(user):
    user.optimizer.look = lambda: user.loss(0)
    user.train(0)  # what is gathered is new
    with user.full_params():  # and what is held is not
        user.go_back(1)
        with user.refused():
            user.step()
    user.zero_grad()


@story(optimizer=own.FusedAndRaises, on=("zero1",), refused="pieces were written to", instead=twice)
def a_fused_step_raises_after_the_update(user):
    user.train(0)
    user.optimizer.fails = True
    user.go_back(1)
    with pytest.raises(KeyError, match="after the update"):
        user.step()
    with user.refused():
        user.loss(2)
    user.optimizer.fails = False
    user.zero_grad()
    user.step()  # of nothing: it gathers
    assert torch.isfinite(user.loss(2))


for kind in (own.Raises, own.FusedAndRaises):

    @story(name=f"{kind.__name__}_while_changes_are_kept", optimizer=kind, on=SHARDED, refused=STALE, instead=twice)
    def raises_while_changes_are_kept(user):
        user.train(0)
        with user.refused(), user.full_params(keep_changes=True):
            user.go_back(1)
            user.optimizer.fails = True
            with pytest.raises(KeyError):
                user.step()
            with user.refused():
                user.loss(2)


def old_values(user, between):
    """A backward through what a step, or the user, has written over."""
    user.train(0)
    user.go_back(0)
    old = user.loss(1)
    between()
    with user.refused():
        user.backward(old)
    user.zero_grad()
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
    refused="not of these pieces; write engine.load_full_optimizer_state_dict",
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
    user.optimizer.load_state_dict(own_state)
    user.load_full_optimizer_state_dict(user.full_optimizer_state_dict())
    user.train(1)


@story(on=("ddp", "bucketed", "fsdp-no_shard"), optimizer=adam, instead=twice)
def the_state_of_whole_parameters_is_torchs(user):
    user.train(0)
    user.optimizer.load_state_dict(user.optimizer.state_dict())
    assert list(user.optimizer.state_dict()) == ["state", "param_groups"]
    user.train(1)


test_stories = STORIES.told()
