"""One rank's backward raises, the error is caught, and training goes on: a skipped bad batch."""

import re

import pytest
import torch
from torch import nn

from shardlab.launch import RankError
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of, told_of

PLACES = [(key, 4 if "hybrid" in key else 3) for key in ENGINES if "offload" not in key and "-dim0" not in key]
# Where the run may end instead, in an error that names both ranks: the others gather in this backward, or hold nothing
# of what is incomplete and go on to the next gather.
MAY_END = [key for key in ENGINES if key.startswith("fsdp") and "no_shard" not in key and "grad_op" not in key]
MAY_END += ["zero1-balanced", "zero2-round_robin"]


class BadBatch(Exception):  # noqa: N818
    """The user's own."""


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise BadBatch("a bad batch")


def skipping(rank, key, num_ranks, where, way):
    """Three steps, of which the second is skipped: what this rank is told, and the state at the end.

    Args:
        where: the layer behind which the last rank's backward raises.
        way: of calling backward.
    """
    told = []
    model = cases.build("MLP")
    units = {"wrap": nn.Linear} if key.startswith("fsdp") else {}
    with engine_of(key, num_ranks, model, "adamw", **units) as engine:
        for step in range(3):
            fails = step == 1 and rank == num_ranks - 1
            hook = model[where].register_forward_hook(lambda _, __, output: Fails.apply(output)) if fails else None
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", step, 0, num_ranks))
            try:
                loss = cases.loss_of(engine(x), y)
                engine.backward(loss) if way == "engine" else loss.backward()
                told.append("")
                engine.step()
            except (BadBatch, RuntimeError) as error:
                told[step:] = [f"{type(error).__name__}: {error}"]
            if hook is not None:
                hook.remove()
            engine.zero_grad()
        return told, engine.full_state_dict()


def expected(num_ranks):
    model = cases.build("MLP")
    optimizer = cases.OPTIMIZERS["adamw"](list(model.parameters()))
    for step in (0, 2):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def run_or_end(pool, key, *args):
    """What the ranks return; None if the run has ended, where it may."""
    if key not in MAY_END:
        return pool.run(skipping, key, *args)
    try:
        return pool.run(skipping, key, *args)
    except RankError as error:
        if not re.search(r"rank \d of the group meets .* on rank \d|nobody has gathered", str(error)):
            raise
        return None


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_all_ranks_raise_are_told_which_rank_and_train_on(pools, key, num_ranks):
    for where, way in ((4, "engine"), (0, "engine"), (2, "plain")):
        results = run_or_end(pools(num_ranks), key, num_ranks, where, way)
        if results is None:
            continue
        for rank, (told, _) in enumerate(results):
            assert [bool(text) for text in told] == [False, True, False], told
            if rank == num_ranks - 1:
                assert told[1] == "BadBatch: a bad batch"
            else:
                assert re.search(told_of(num_ranks - 1), told[1]), told[1]
        assert_states([state for _, state in results], expected(num_ranks))
