"""Backwards and forwards that raise, on all ranks or on one: what is owed is sent, nothing stays, training goes on."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist.every_engine import KINDS, SHARDED, WHOLE, adamw, momentum, sgd, told_of
from tests.dist.nasty import Block
from tests.dist.telling import Stories
from tests.dist.test_stories_of_forwards import Deep

STORIES = Stories()
story = STORIES.story
WORDS = r"call engine\.zero_grad\(\)|the last backward raised an exception"
NOT_UNITS = (*WHOLE, "zero2", "zero3")  # ranks may fail at different places


def gathered(user):
    return bytes_by_role(user.live_tensors()).get(Role.GATHERED_PARAMETER, 0)


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


class FailsSomewhere(Deep):
    """A backward that stops below the given block, where one is given."""

    fail_at = None

    def forward(self, x, depth=None):
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.fail_at:
                x = Fails.apply(x)
        return self.leave(x)


def failing(user, place, *, plain=False):
    """A backward that raises here; or, where ``place`` is None, on rank 0, of which the others are told in theirs."""
    user.module.fail_at = place
    loss = user.loss(0)
    user.module.fail_at = None
    failure = pytest.raises(RuntimeError, match=told_of(0)) if place is None else pytest.raises(ArithmeticError)
    with failure:
        loss.backward() if plain else user.backward(loss)


def train_0(user):
    user.train(0)


@story(model=FailsSomewhere, on=NOT_UNITS, refused=WORDS, instead=train_0, optimizer=momentum)
def at_another_place_on_each_rank(user):
    for plain in (False, True):
        failing(user, user.rank, plain=plain)
        with user.refused():
            user.step()
        user.zero_grad()
        failing(user, None if user.rank else 0, plain=plain)
        user.zero_grad()
    user.train(0)


@story(model=FailsSomewhere, on=NOT_UNITS, instead=train_0)
def inside_no_sync(user):
    """There is nothing to complete."""
    for plain in (False, True):
        for place, leaves_first in ((1, True), (None if user.rank else 1, True), (None if user.rank else 1, False)):
            with contextlib.suppress(ArithmeticError) if leaves_first else contextlib.nullcontext(), user.no_sync():
                if leaves_first or place is None:
                    user.module.fail_at = place
                    loss = user.loss(0)
                    user.module.fail_at = None
                    loss.backward() if plain else user.backward(loss)
                else:
                    failing(user, place, plain=plain)
            user.zero_grad()
    user.train(0)


@story(
    model=FailsSomewhere,
    on=(*KINDS, "fsdp-shard_grad_op"),
    instead=lambda user: user.train(0, 0, 0),
    optimizer=momentum,
)
def frozen_after_it_and_cleared(user):
    """Means are there, a backward raises, parameters are looked at, one is frozen, and gradients are cleared."""
    user.train(0)
    for is_evaluated in (False, True):
        failing(user, 1)
        if is_evaluated:
            with torch.no_grad():
                user.loss(0)
        else:
            with user.full_params():
                pass
        user.module.blocks[0].requires_grad_(False)
        user.zero_grad()
        user.module.blocks[0].requires_grad_(True)
        user.train(0)


class FailsWithAFrozenBlock(FailsSomewhere):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)


def turned(user):
    block = user.module.blocks[0]
    block.requires_grad_(not block.inner.weight.requires_grad)
    user.train(0)


def what_it_owes_is_that_of_its_beginning(user, tries_again):
    """A schedule may freeze or thaw before it clears gradients; the other ranks have sent what trained before."""
    block = user.module.blocks[0]
    trained = block.inner.weight.requires_grad
    failing(user, None if user.rank else 1)
    block.requires_grad_(not trained)
    if user.rank == 0 and tries_again:
        with user.refused():
            user.go_back(0)
    user.zero_grad()
    user.train(0)


for kind in (FailsSomewhere, FailsWithAFrozenBlock):

    @story(name=f"what_is_turned_after_{kind.__name__}", model=kind, instead=turned,
           on=("ddp", "bucketed", "zero1", "zero3", "fsdp-shard_grad_op", "fsdp-no_shard"))  # fmt: skip
    def turned_after_it(user):
        what_it_owes_is_that_of_its_beginning(user, tries_again=False)

    @story(name=f"what_is_tried_again_after_{kind.__name__}", model=kind, instead=turned, refused=WORDS,
           on=("ddp", "zero2"))  # fmt: skip
    def tried_again_after_it(user):
        what_it_owes_is_that_of_its_beginning(user, tries_again=True)


@story(
    model=FailsSomewhere,
    on=(*KINDS, "fsdp-dim0", "fsdp-shard_grad_op", "fsdp-no_shard"),
    instead=train_0,
    optimizer=adamw,
)
def nothing_stays_gathered(user):
    with pytest.raises(RuntimeError, match="mat1"):
        user(torch.ones(2, 3).double())
    left = gathered(user)
    failing(user, 1)
    assert left == gathered(user) == 0
    user.zero_grad()
    user.train(0)


@story(model="Uneven", optimizer=adamw, instead=lambda user: user.train(0, 1), on=(*KINDS, "zero2", "fsdp-no_shard"),
       options={"wrap": lambda name, _: name in ("first", "last")})  # fmt: skip
def zeros_are_kept_after_it(user):
    """The last rank's backward raises in the middle, when a unit has been sent."""
    for step in range(2):
        hidden = []
        hook = user.module.first.register_forward_hook(lambda _, __, output, hidden=hidden: hidden.append(output))
        loss = user.loss(step)
        hook.remove()
        if user.rank == 1:
            hidden[0].register_hook(lambda _: 1 / 0)
        with pytest.raises((ZeroDivisionError, RuntimeError), match=r"division by zero|rank 1 "):
            user.backward(loss)
        user.zero_grad(set_to_none=False)
        user.go_back(step)
        user.step()
        user.zero_grad()


@story(on=("zero3",), instead=train_0)
def a_forward_reshards_what_a_backward_without_an_end_has_left(user):
    """A plain backward that raised, and ``torch.autograd.grad``: neither has an end that the engine sees."""
    x = user.rows(0)[0]
    with pytest.raises(ArithmeticError):
        Fails.apply(user(x)).sum().backward()
    user(x)
    assert gathered(user) == 0
    user.zero_grad()
    x = x.clone().requires_grad_()
    torch.autograd.grad(user(x).sum(), x)
    user(x)
    assert gathered(user) == 0
    user.train(0)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fails = nn.Linear(7, 5), True

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("planted")
        return self.inner(x)


class RaisesInAUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Block(7), Tail()

    def forward(self, x):
        x = self.first(x)
        self.seen.append(weakref.ref(x))
        return self.last(x * 1)


@story(model=RaisesInAUnit, options={"wrap": [Block, Tail]}, instead=None)
def no_activation_stays_of_a_forward_that_raised(user):
    """What came before the unit that fails must not stay in memory."""
    user.module.seen = []
    with contextlib.suppress(ArithmeticError):
        user.loss(0)
    gc.collect()
    assert user.module.seen[0]() is None
    assert gathered(user) == 0


class Catches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Tail(), nn.Linear(7, 5)

    def forward(self, x):
        with contextlib.suppress(ArithmeticError):
            self.first(x)
        return self.last(x)


@story(model=Catches, options={"wrap": [Tail]})
def the_model_catches_the_error_of_a_unit(user):
    loss = user.loss(0)
    if user.rank is not None:
        assert gathered(user) <= sum(param.numel() * 8 for param in user.module.last.parameters())
    user.backward(loss)
    user.step()


@story(on=("zero1", "zero3"), dtype=torch.float32, options={"precision": "bf16", "bucket_bytes": 100}, instead=None)
def memory_runs_out_in_full_params(user):
    """On all ranks; then they train on."""
    empty, made = torch.empty, []

    def fails_once(*args, **kwargs):
        made.append(args)
        if len(made) == 2:
            raise torch.OutOfMemoryError("no memory")
        return empty(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", fails_once)
        with pytest.raises(torch.OutOfMemoryError), user.full_params():
            pass
    x, y = (part.float() for part in user.rows(0))
    losses = []
    for _ in range(2):
        losses.append(nn.functional.mse_loss(user(x).float(), y))
        user.backward(losses[-1])
        user.step()
        user.zero_grad()
    assert losses[1] < losses[0]


@story(model="Tied", on=SHARDED, optimizer=sgd, instead=train_0)
def kept_graphs_of_what_failed_change_nothing(user):
    """One rank keeps the loss of a forward that a backward which raised did not come to."""
    first, last = user.loss(0), user.loss(1)
    held = [first] if user.rank == 1 else []
    last.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        user.backward(first + last)
    user.zero_grad()
    del first, last
    user.loss(0).backward()
    user.step()
    user.zero_grad()
    assert len(held) == user.rank


test_stories = STORIES.told()
