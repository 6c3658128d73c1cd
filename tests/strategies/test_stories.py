"""What users may not do: refused with guards, on all ranks where one alone errs, and let through without."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine
from tests.dist import cases
from tests.strategies.test_parity import strategy_of

RANKS = 2
WHOLE, PIECES, SHARDED = ("bucketed",), ("zero1", "zero2"), ("zero3", "fsdp")


class Story(NamedTuple):
    strategies: tuple[str, ...]
    told: str
    errs: Callable  # (engine, step) -> None; ``step()`` trains on
    alone: bool = True  # rank 0 does it, and no other


def _torch_clip_of_sums(engine, step):
    with engine.no_sync():
        step(backward_only=True)
    if step.rank == 0:
        for param in engine.params.values():
            if param.grad is not None:
                param.grad.mul_(0.5)


def _replaces_data(engine, step):
    if step.rank == 0:
        param = engine.params["0.weight"]
        param.data = param.data.clone()


def _writes_piece(engine, step):
    if step.rank == 0:
        with torch.no_grad():
            engine.step_tensors().by_name("0.weight").add_(1.0)


def _clears_gradient(engine, step):
    step(backward_only=True)
    if step.rank == 0:
        engine.params["0.weight"].grad = None


def _freezes_piece(engine, step):
    step(backward_only=True)
    if step.rank == 0:
        engine.step_tensors().by_name("0.weight").requires_grad_(False)


STORIES = {
    "torch's clipping inside no_sync": Story(
        WHOLE + PIECES + SHARDED, "changed in place after a backward", _torch_clip_of_sums
    ),
    "data replaced": Story(PIECES, "its data was replaced", _replaces_data),
    "piece written": Story(PIECES, "was written to, and nobody has gathered it", _writes_piece),
    "gradient cleared": Story(PIECES + SHARDED, "set or cleared at the parameter", _clears_gradient),
    "piece frozen": Story(PIECES + SHARDED, "frozen or thawed", _freezes_piece),
}
PLACES = [(story, key) for story, told in STORIES.items() for key in told.strategies]


class Steps:
    def __init__(self, engine, rank):
        self.engine, self.rank, self.number = engine, rank, 0

    def __call__(self, *, backward_only=False):
        x, y = (cases.own_rows(part, self.rank) for part in cases.rows("MLP", self.number, 0, RANKS))
        self.engine.backward(cases.loss_of(self.engine(x), y))
        if not backward_only:
            self.engine.step()
            self.engine.zero_grad()
            self.number += 1


def tell(rank, story, key, guarded):
    with Mesh({"data": RANKS}) as mesh:
        engine = Engine(cases.build("MLP"), cases.OPTIMIZERS["sgd"], mesh, strategy_of(key, "MLP"), guards=guarded)
        step = Steps(engine, rank)
        step()
        STORIES[story].errs(engine, step)
        try:
            if "cleared" in story or "frozen" in story:
                engine.step()
            else:
                step()
        except RuntimeError as error:
            engine.zero_grad()
            return str(error)
    return ""


@pytest.mark.parametrize(("story", "key"), PLACES)
def test_is_refused_on_all_ranks_and_goes_on_without_guards(pools, story, key):
    first, other = pools(RANKS).run(tell, story, key, True)
    assert STORIES[story].told in first
    assert "rank 0 raised, so all do" in other
    assert pools(RANKS).run(tell, story, key, False) == ["", ""]


class Bad(nn.Module):
    """Raises in the backward of one step on one rank."""

    def __init__(self):
        super().__init__()
        self.inner = cases.MLP()
        self.raises = False

    def forward(self, x):
        x = self.inner[1](self.inner[0](x))
        if self.raises:
            x = _Raise.apply(x)
        return self.inner[4](self.inner[3](self.inner[2](x)))


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("a bad row")


def skips_a_bad_batch(rank, key, plain):
    with Mesh({"data": RANKS}) as mesh:
        torch.manual_seed(0)
        module = Bad().double()
        engine = Engine(module, cases.OPTIMIZERS["sgd"], mesh, strategy_of(key, "MLP"))
        told = []
        for number in range(4):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", number, 0, RANKS))
            module.raises = number == 1 and rank == 0
            loss = cases.loss_of(engine(x), y)
            try:
                loss.backward() if plain else engine.backward(loss)
                engine.clip_grad_norm_(0.05)
                engine.step()
            except (ArithmeticError, RuntimeError) as error:
                told.append((number, str(error)))
            engine.zero_grad()
        return told, engine.full_state_dict()


def expected_without_the_bad_batch():
    torch.manual_seed(0)
    module = Bad().double()
    optimizer = cases.OPTIMIZERS["sgd"](module.parameters())
    for number in (0, 2, 3):
        x, y = cases.rows("MLP", number, 0, RANKS)
        cases.loss_of(module(x), y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("key", ["ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp", "fsdp-shard_grad_op"])
def test_a_backward_that_raises_on_one_rank_raises_on_all_and_training_goes_on(pools, key, plain):
    expected = expected_without_the_bad_batch()
    for rank, (told, state) in enumerate(pools(RANKS).run(skips_a_bad_batch, key, plain)):
        ((number, text),) = told
        assert number == 1
        assert ("a bad row" in text) if rank == 0 else ("rank 0 raised, so all do" in text)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
