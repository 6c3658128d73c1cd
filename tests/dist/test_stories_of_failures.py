"""Backwards and forwards that raise, on all ranks or on one: what is owed is sent, nothing stays, training goes on."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist.every_engine import KINDS, SHARDED, WHOLE, adamw, momentum, sgd
from tests.dist.nasty import Block, Deep
from tests.dist.telling import Stories

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
    what = r"(ArithmeticError: |RuntimeError: loss\.backward\(\) raised)"
    told = pytest.raises(RuntimeError, match=rf"rank 0 raised, so all do: {what}.*engine\.zero_grad\(\)")
    with told if place is None else pytest.raises(ArithmeticError):
        loss.backward() if plain else user.backward(loss)


def train_0(user):
    user.train(0)


@story(model=FailsSomewhere, on=(*NOT_UNITS, "fsdp-no_shard", "fsdp-shard_grad_op"), refused=WORDS, instead=train_0,
       optimizer=momentum)  # fmt: skip
def at_another_place_on_each_rank(user):
    for plain in (False, True):
        failing(user, user.rank, plain=plain)
        user.refuses(user.step)
        failing(user, None if user.rank else 0, plain=plain)
        user.zero_grad()
    user.train(0)


@story(model=FailsSomewhere, on=(*KINDS, "zero2", "fsdp-dim0"), num_ranks=3, optimizer=adamw,
       instead=lambda user: user.train(0, 1, 2))  # fmt: skip
def a_batch_that_is_bad_on_one_rank_is_skipped(user):
    for step, place in enumerate((0, 1, 2)):
        user.train(step)
        failing(user, None if user.rank else place, plain=step == 1)
        user.zero_grad()


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


@story(model=FailsSomewhere, on=(*KINDS, "fsdp-dim0", "fsdp-shard_grad_op", "fsdp-no_shard"), instead=train_0,
       optimizer=adamw)  # fmt: skip
def nothing_stays_gathered(user):
    with pytest.raises(RuntimeError, match="mat1"):
        user(torch.ones(2, 3).double())
    left = gathered(user)
    failing(user, 1)
    assert left == gathered(user) == 0
    user.zero_grad()
    user.train(0)


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
    user.step_and_clear()
    assert len(held) == user.rank


test_stories = STORIES.told()
