"""On a GPU: ranks that share one (staged over gloo), NCCL where there are enough, CUDA clocks and memory."""

import pytest
import torch

from shardlab.analysis import allocator_items
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.experiment import CompareConfig, compare
from shardlab.launch import current, place
from shardlab.launch.placement import SHARING
from shardlab.vocabulary import Role
from tests.dist import cases

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")


def train(rank, strategy, kind, num_ranks):
    device = current().device
    with Mesh({"data": num_ranks}, device=device) as mesh:
        model = cases.build(kind, seed=rank).to(device)
        with build_engine(strategy, model, cases.OPTIMIZERS["adamw"], mesh) as engine:
            for step in range(5):
                x, y = (cases.own_rows(part, rank).to(device) for part in cases.rows(kind, step, 0, num_ranks))
                engine.backward(cases.loss_of(engine(x), y))
                engine.step()
                engine.zero_grad()
            return {name: value.cpu() for name, value in engine.full_state_dict().items()}, mesh.data.num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_one_process_on_the_cpu(gpu_pools, strategy, num_ranks):
    for kind in ("MLP", "SmallGPT", "Tied"):
        expected = cases.reference(kind, "adamw", num_ranks).state
        for state, _ in gpu_pools(num_ranks).run(train, strategy, kind, num_ranks):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, atol=1e-9, rtol=0)


def every_verb(rank):
    device = current().device
    with Mesh({"data": 2}, device=device) as mesh:
        summed = torch.full((1 << 20,), float(rank + 1), device=device)
        mesh.data.all_reduce(summed).wait()
        scattered = torch.arange(8.0, device=device)
        mesh.data.reduce_scatter(scattered).wait()
        gathered = torch.full((8,), float(rank), device=device)
        mesh.data.all_gather(gathered).wait()
        received = torch.zeros(4, device=device)
        sent = mesh.data.send(torch.full((4,), float(rank), device=device), dst=1 - rank)
        mesh.data.recv(received, src=1 - rank).wait()
        sent.wait()
        own = scattered[4 * rank : 4 * rank + 4]
        return float(summed.mean()), own.tolist(), gathered.tolist(), received.tolist()


def test_every_verb_on_device_tensors(gpu_pools):
    for rank, (mean, own, gathered, received) in enumerate(gpu_pools(2).run(every_verb)):
        assert mean == 3.0
        assert own == [2.0 * index for index in range(4 * rank, 4 * rank + 4)]
        assert gathered == [0.0] * 4 + [1.0] * 4
        assert received == [float(1 - rank)] * 4


def test_fewer_gpus_than_ranks_share_with_a_banner(monkeypatch):
    monkeypatch.delenv(SHARING, raising=False)
    num_gpus = torch.cuda.device_count()
    placement = place(num_gpus + 1, "cuda")
    assert (placement.backend, placement.staged) == ("gloo", True)
    assert placement.banner is not None
    assert place(num_gpus, "cuda").backend == "nccl"


def test_compare_records_the_allocator(tmp_path):
    config = CompareConfig(strategies=("single", "bucketed", "zero1", "fsdp"), ranks=2, steps=4, device="cuda")
    comparison = compare(config, tmp_path / "run")
    assert comparison.losses_equal
    memory = comparison.records.memory
    on_device = memory[memory["where"].isin(["rest", "peak"]) & (memory["role"] != Role.OFFLOADED)]
    held = on_device.groupby(["run", "rank", "step", "where"]).agg(
        bytes=("bytes", "sum"), allocated=("allocated_bytes", "first")
    )
    assert set(held.reset_index()["where"]) == {"rest", "peak"}
    assert (held["bytes"] == held["allocated"]).all()
    assert (memory["bytes"] >= 0).all()
    reserved = allocator_items(memory).groupby("run")["bytes"].sum()
    assert (reserved > 0).all()
    assert comparison.summary["as_planned"].all()
    steps = comparison.records.steps
    assert (steps["step_us"] > 0).all()
    assert (steps["peak_bytes"] > 0).all()
