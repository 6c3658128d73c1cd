"""Meshes over a part of the ranks: two that train at once, ranks that are on none, ranks that disagree."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.partition.ring_cost import Link
from tests.dist import cases
from tests.dist.every_engine import assert_states, step_on

STEPS = {0: 2, 1: 5}
KINDS = {0: "Uneven", 1: "SmallGPT"}
STRATEGIES = {0: "zero2", 1: "fsdp"}


def train_halves(rank, how, transport):
    """Another model, another strategy and another number of steps on each half of the ranks."""
    pairs = [[0, 2], [1, 3]]
    number = next(index for index, pair in enumerate(pairs) if rank in pair)
    half, place = number, pairs[number].index(rank)
    if how == "all by all":
        meshes = [Mesh({"data": 2}, ranks=pair, transport=transport) for pair in pairs]
        assert [mesh.is_member for mesh in meshes] == [number == 0, number == 1]
        with pytest.raises(RuntimeError, match=rf"rank {rank} is not among its ranks .* ask mesh\.is_member first"):
            build_engine("zero1", cases.build("MLP"), cases.OPTIMIZERS["sgd"], meshes[1 - number])
    else:
        meshes = [Mesh({"data": 2}, ranks=pairs[half], transport=transport)] * 2
    kind, mesh = KINDS[half], meshes[half]
    with build_engine(STRATEGIES[half], cases.build(kind, seed=place), cases.OPTIMIZERS["sgd"], mesh) as engine:
        for step in range(STEPS[half]):
            x, y = (cases.own_rows(part, place) for part in cases.rows(kind, step, 0, 2))
            step_on(engine, cases.loss_of(engine(x), y))
        state = engine.full_state_dict()
    for mesh in dict.fromkeys(meshes):
        mesh.close()
    with Mesh({"data": 4}) as everyone:
        total = torch.ones(1)
        everyone.data.all_reduce(total).wait()
    return half, state, float(total)


@pytest.mark.parametrize(("how", "transport"), [("each its own", "gloo"), ("all by all", "shared_memory")])
def test_two_halves_train_different_models_at_once(pools, how, transport):
    results = pools(4).run(train_halves, how, transport)
    assert [half for half, *_ in results] == [0, 1, 0, 1]
    assert [total for *_, total in results] == [4.0] * 4
    for half in (0, 1):
        expected = cases.reference(KINDS[half], "sgd", 2, steps=STEPS[half])
        assert_states([state for found, state, _ in results if found == half], expected.state)


def unsorted(rank):
    with pytest.raises(ValueError, match=r"ranks: \[1, 0\] does not ascend along axis 'data'; use \[0, 1\]"):
        Mesh({"data": 2}, ranks=[1, 0])
    with Mesh({"replica": 2, "shard": 2}, ranks=[0, 2, 1, 3]) as mesh:
        return mesh["replica"].ranks, mesh["shard"].ranks


def test_ranks_ascend_along_each_axis_as_in_a_group_of_torch(pools):
    assert pools(4).run(unsorted) == [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]


def disagreeing(rank):
    messages = []
    for axes, options in (
        ({"data": 2}, {"ranks": [[0, 1], [0, 1], [1, 2]][rank]}),
        ({"data": 3} if rank else {"shard": 3}, {}),
        ({"data": 3}, {"link": None if rank == 0 else Link(10.0, 1.0)}),
    ):
        with pytest.raises(ValueError, match="ranks: ") as caught:
            Mesh(axes, **options)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match=r"ranks names them, ranks=\[0, 1\]") as caught:
        Mesh({"data": 2})
    value = torch.ones(1)
    with Mesh({"data": 3}) as mesh:
        mesh.data.all_reduce(value).wait()
    return messages, float(value)


def test_ranks_that_want_different_meshes_with_each_other_are_told_so_on_all(pools):
    results = pools(3).run(disagreeing)
    messages, total = results[0]
    assert messages[0] == (
        "ranks: rank 2 builds Mesh({'data': 2}, ranks=[1, 2]), while rank 1, which is on it, builds "
        "Mesh({'data': 2}, ranks=[0, 1]); all ranks of a mesh build the same one at the same time"
    )
    assert "Mesh({'shard': 3}, ranks=[0, 1, 2])" in messages[1]
    assert "link=Link(latency_us=10.0, bandwidth_gbps=1.0)" in messages[2]
    assert total == 3.0
    assert all(result == results[0] for result in results)
