"""A rank that leaves out a backward sends zeros for it."""

import pytest

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, momentum

# Where backward gathers parameters, all ranks have to call it.
NOT_GATHERED = [key for key in ENGINES if not key.startswith(("zero3", "fsdp"))]
KEYS = [*NOT_GATHERED, "fsdp-no_shard", "fsdp-no_shard-dim0", "fsdp-shard_grad_op"]
KIND = "SmallGPT"


def loss_of(module, rank, step, num_ranks):
    x, y = (cases.own_rows(part, rank) for part in cases.rows(KIND, step, 0, num_ranks))
    return cases.loss_of(module(x), y)


def skipping(rank, key, num_ranks, has_forward):
    strategy, options = ENGINES[key]
    model = cases.build(KIND, seed=rank)
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine(strategy, model, momentum, mesh, **options) as engine,
    ):
        for step in range(3):
            is_skipped = step == 1 and rank == 1
            if not is_skipped or has_forward:
                loss = loss_of(engine, rank, step, num_ranks)
            if not is_skipped:
                engine.backward(loss)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("key", KEYS)
def test_a_rank_that_skips_a_backward_sends_zeros(pools, key):
    model, num_ranks = cases.build(KIND), 3
    optimizer = momentum(model.parameters())
    for step in range(3):
        losses = [loss_of(model, rank, step, num_ranks) for rank in range(num_ranks) if step != 1 or rank != 1]
        (sum(losses) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for has_forward in (True,) if key == "fsdp-shard_grad_op" else (True, False):
        assert_states(pools(num_ranks).run(skipping, key, num_ranks, has_forward), model.state_dict())
