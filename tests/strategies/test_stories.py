"""What users may not do: refused with guards, on all ranks where one alone errs, and let through without."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import ALL

RANKS = 2
WHOLE, PIECES, SHARDED = ("bucketed",), ("zero1",), ("fsdp",)


class Story(NamedTuple):
    strategies: tuple[str, ...]
    told: str
    errs: Callable  # (engine, step) -> None, on rank 0 alone; ``step()`` trains on


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


def tell_all(rank, story):
    return [tell(rank, story, key, guarded) for key in STORIES[story].strategies for guarded in (True, False)]


def tell(rank, story, key, guarded):
    with Mesh({"data": RANKS}) as mesh:  # the engine is not closed, which what stays changed would refuse
        strategy, options = ALL[key]
        engine = build_engine(strategy, cases.build("MLP"), cases.OPTIMIZERS["sgd"], mesh, guards=guarded, **options)
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


@pytest.mark.parametrize("story", STORIES)
def test_is_refused_on_all_ranks_and_goes_on_without_guards(pools, story):
    first, other = pools(RANKS).run(tell_all, story)
    assert all(STORIES[story].told in said for said in first[::2])
    assert all("rank 0 raised, so all do" in said for said in other[::2])
    assert not any(first[1::2] + other[1::2])
