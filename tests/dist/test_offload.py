"""FSDP with shards in host memory, and with small parameters replicated: the same result, other places."""

from math import nan
from unittest import mock

import pytest

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine, fsdp, offload
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import adamw, one_step, shards_of
from tests.dist.test_parity import Loop, assert_equal, train_all

TODO = [(kind, Loop("adamw", 2, 0.1), {}) for kind in ("SmallGPT", "Uneven", "Tied", "Frozen")]


def train(engine, *steps):
    for step in steps:
        one_step(engine, step=step)
        engine.zero_grad()


def all_kinds_with_late_copies(rank, key):
    """Parity again; what is copied to the host is there when the host has waited for it, and not before."""
    on_their_way, waits = [], []

    def copy_to_host(host, tensor):
        on_their_way.append((host, tensor.clone()))
        return host.fill_(nan)

    def wait_for_copies(_):
        waits.append(len(on_their_way))
        while on_their_way:
            host, values = on_their_way.pop(0)
            host.copy_(values)

    with (
        mock.patch.object(offload, "copy_to_host", copy_to_host),
        mock.patch.object(fsdp, "wait_for_copies", wait_for_copies),
    ):
        return train_all(rank, key, TODO), waits


@pytest.mark.parametrize("key", ["fsdp-offload-all", "fsdp-offload-shard_grad_op"])
def test_the_host_waits_once_for_all_copies_before_it_reads_them(pools, key):
    results = pools(2).run(all_kinds_with_late_copies, key)
    assert_equal([found for found, _ in results], TODO, 2)
    for _, waits in results:
        assert sum(waits) > 3 * len(TODO)
        assert max(waits) > 1  # copies of several units


def held_at_rest(_, options):
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", cases.build("MLP"), adamw, mesh, **options) as engine:
        train(engine, 0)
        built = bytes_by_role(engine.live_tensors())
        seen = []
        with engine.strategy.visiting():
            seen.append(bytes_by_role(engine.live_tensors())[Role.PARAMETER])
        padded = sum(bucket.layout.padded_numel for bucket in shards_of(engine))
        return built, seen[0], 8 * padded // 2, sum(piece.nbytes for piece in engine.step_tensors())


def test_what_is_offloaded_is_not_on_the_device(pools):
    for held, while_stepping, shard, _ in pools(2).run(held_at_rest, {"offload": "parameters"}):
        assert held[Role.PARAMETER] == held[Role.GATHERED_PARAMETER] == 0
        assert held[Role.OFFLOADED] == shard == while_stepping
        assert held[Role.OPTIMIZER_STATE] > 0
    for held, while_stepping, shard, pieces in pools(2).run(held_at_rest, {"offload": "all"}):
        assert [role for role, num_bytes in held.items() if num_bytes] == [Role.OFFLOADED, Role.OTHER]
        assert held[Role.OFFLOADED] == shard + 2 * pieces  # the gradients are forgotten
        assert while_stepping == 0
