"""FSDP with shards in host memory, and with small parameters replicated: the same result, other places."""

from math import inf, nan
from unittest import mock

import psutil
import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine, offload, sharded, shards
from shardlab.engines.checkpoint.directory import latest
from shardlab.engines.checkpoint.manifest import read_manifest
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import shards_of

KINDS = ("MLP", "SmallGPT", "Uneven", "Tied", "Frozen", "FewElements")
OPTIONS = (
    {"offload": "parameters"},
    {"offload": "all", "layout": "dim0"},
    {"offload": "all", "sharding": "shard_grad_op"},
    {"offload": "parameters", "sharding": "no_shard"},
    {"replicate_below": 20},
    {"replicate_below": 20, "layout": "dim0", "offload": "all"},
    {"replicate_below": 10**9},
)
SMALLER = 20


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2, weight_decay=0.1)


def train(engine, kind, steps, num_ranks, norm_type=2.0, first=0):
    norms = []
    for step in range(first, first + steps):
        for micro_batch in range(2):
            x, y = (
                part.tensor_split(num_ranks)[engine.data_rank]
                for part in cases.rows(kind, step, micro_batch, num_ranks)
            )
            if micro_batch == 0:
                with engine.no_sync():
                    engine.backward(cases.loss_of(engine(x), y) / 2)
            else:
                engine.backward(cases.loss_of(engine(x), y) / 2)
        norms.append(float(engine.clip_grad_norm_(0.1, norm_type)))
        engine.step()
        engine.zero_grad()
    return norms


def all_kinds(rank, axes, options, norm_type):
    num_ranks = torch.distributed.get_world_size()
    found = {}
    with Mesh(axes) as mesh:
        for kind in KINDS:
            with build_engine("fsdp", cases.build(kind, seed=rank), adamw, mesh, **options) as engine:
                norms = train(engine, kind, 3, num_ranks, norm_type)
                found[kind] = norms, engine.full_state_dict(), engine.full_optimizer_state_dict()
    return found


def reference(kind, num_ranks, norm_type):
    model = cases.build(kind)
    optimizer = adamw(list(model.parameters()))
    norms = []
    for step in range(3):
        for micro_batch in range(2):
            x, y = cases.rows(kind, step, micro_batch, num_ranks)
            (cases.loss_of(model(x), y) / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict(), optimizer.state_dict()


def check(results, num_ranks, norm_type):
    for kind in KINDS:
        norms, state, optimizer_state = reference(kind, num_ranks, norm_type)
        for found in results:
            assert found[kind][0] == pytest.approx(norms, abs=1e-10), kind
            for name, value in state.items():
                torch.testing.assert_close(found[kind][1][name], value, atol=1e-10, rtol=0)
            for number, values in optimizer_state["state"].items():
                ours = found[kind][2]["state"][number]["exp_avg_sq"]
                torch.testing.assert_close(ours, values["exp_avg_sq"], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("options", "num_ranks"), [(options, 2 + n % 3) for n, options in enumerate(OPTIONS)], ids=str)
def test_equals_one_process(pools, options, num_ranks):
    norm_type = {2: 2.0, 3: 1.0, 4: inf}[num_ranks]
    check(pools(num_ranks).run(all_kinds, {"data": num_ranks}, options, norm_type), num_ranks, norm_type)


@pytest.mark.parametrize("more", [{"offload": "all"}, {"replicate_below": SMALLER}], ids=str)
def test_equals_one_process_in_groups(pools, more):
    options = {"sharding": "hybrid_shard", **more}
    check(pools(4).run(all_kinds, {"replica": 2, "shard": 2}, options, 2.0), 4, 2.0)


def all_kinds_with_late_copies(rank, axes, options, norm_type):
    """As ``all_kinds``; what is copied to the host is there when the host has waited for it, and not before."""
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
        mock.patch.object(shards, "copy_to_host", copy_to_host),
        mock.patch.object(sharded, "wait_for_copies", wait_for_copies),
    ):
        return all_kinds(rank, axes, options, norm_type), waits


@pytest.mark.parametrize("options", [*OPTIONS[:4]], ids=str)
def test_the_host_waits_once_for_all_copies_before_it_reads_them(pools, options):
    results = pools(2).run(all_kinds_with_late_copies, {"data": 2}, options, 2.0)
    check([found for found, _ in results], 2, 2.0)
    for _, waits in results:
        assert sum(waits) > 3 * len(KINDS)
        assert max(waits) > 1  # copies of several units


def held_at_rest(_, options):
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", cases.build("MLP"), adamw, mesh, **options) as engine:
        train(engine, "MLP", 1, 2)
        built = bytes_by_role(engine.live_tensors())
        seen = []
        with engine.stepping():
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


def too_little_memory(rank):
    true = psutil.virtual_memory()
    available = true._replace(available=1000 if rank == 1 else 10**12)
    with Mesh({"data": 2}) as mesh, mock.patch("psutil.virtual_memory", return_value=available):
        with pytest.raises(ValueError, match="offload") as refusal:
            build_engine("fsdp", cases.build("MLP"), adamw, mesh, offload="all")
        return str(refusal.value)


def test_too_little_host_memory_is_refused_by_all_ranks_together(pools):
    for message in pools(2).run(too_little_memory):
        assert "offload: the 2 ranks of this host need at least" in message
        assert "(on rank 1)" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "disk"}, "offload: 'disk' is not one of none, parameters, all"),
        ({"replicate_below": -1}, "replicate_below: -1 elements is below 0"),
        ({"replicate_below": 5, "sharding": "no_shard"}, "every parameter is replicated"),
    ],
)
def test_bad_options(options, words):
    axes_of_one = Mesh.alone()
    with pytest.raises(ValueError, match=words):
        build_engine("fsdp", cases.build("MLP"), adamw, axes_of_one, **options)


def who_has_what(_):
    with (
        Mesh({"data": 3}) as mesh,
        build_engine("fsdp", cases.build("MLP"), adamw, mesh, replicate_below=SMALLER) as engine,
    ):
        spread = {name: len(axes) for name, axes in engine.spread_over().items()}
        sizes = {name: param.numel() for name, param in engine.params.items()}
        return sizes, spread, engine.owners(), engine.owned()


def test_small_parameters_are_whole_on_every_rank(pools):
    for sizes, spread, owners, owned in pools(3).run(who_has_what):
        assert 0 < sum(size < SMALLER for size in sizes.values()) < len(sizes)
        for name, size in sizes.items():
            assert spread[name] == (size >= SMALLER)
            if size < SMALLER:
                assert owners[name] == (0, 1, 2)
                assert owned[name] == (0, size)


def save(_, directory, options):
    with Mesh({"data": 3}) as mesh, build_engine("fsdp", cases.build("MLP"), adamw, mesh, **options) as engine:
        train(engine, "MLP", 2, 3)
        engine.save(directory)
        train(engine, "MLP", 2, 3, first=2)
        return engine.full_state_dict()


def load(_, directory, strategy, options):
    with Mesh({"data": 3}) as mesh, build_engine(strategy, cases.build("MLP", 1), adamw, mesh, **options) as engine:
        engine.load(directory)
        train(engine, "MLP", 2, 3, first=2)
        return engine.full_state_dict()


@pytest.mark.parametrize(
    "options", [{"offload": "parameters"}, {"offload": "all", "replicate_below": SMALLER}], ids=str
)
def test_checkpoints_go_in_and_out(pools, tmp_path, options):
    expected = pools(3).run(save, tmp_path, options)[0]
    written = {}
    for row in read_manifest(latest(tmp_path)).rows:
        if row.kind != "buffer" and row.key != "step":
            written.setdefault((row.name, row.key), []).extend(range(row.start, row.stop))
    for (name, key), elements in written.items():
        assert sorted(elements) == list(range(len(elements))), f"{key} of {name} is written once"
    for strategy, other in (("zero1", {}), ("fsdp", {}), ("fsdp", options), ("fsdp", {"offload": "all"})):
        for state in pools(3).run(load, tmp_path, strategy, other):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
