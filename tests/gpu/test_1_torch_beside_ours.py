"""Torch's engines and torch's scripts over NCCL: two GPUs, or one that NCCL is told to share (``launch.placement``)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardlab.analysis import allocator_items
from shardlab.experiment import CompareConfig, compare
from shardlab.launch import place
from shardlab.records.store import load_run
from shardlab.vocabulary import Role
from tests.launch.helpers import script_env

STRATEGIES = ("fsdp", "torch_ddp", "torch_fsdp2", "bucketed", "zero2")


@pytest.fixture(autouse=True)
def _needs_nccl_between_two_ranks():
    if torch.cuda.is_available() and place(2, "cuda").backend != "nccl":
        pytest.skip("needs two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nccl") / "run"
    return compare(CompareConfig(strategies=STRATEGIES, ranks=2, steps=6, device="cuda"), directory)


def test_losses_are_equal_and_what_is_exposed_is_known(comparison, figure):
    assert comparison.losses_equal
    steps = comparison.records.steps
    for name, own in steps[steps["step"] > 0].groupby("run", sort=False):
        exposed, step = own["exposed_comm_us"].median() / 1e3, own["step_us"].median() / 1e3
        figure(f"{name} on two ranks: exposed of a step", f"{exposed:.1f} of {step:.1f} ms")
        assert 0 < exposed < step


def test_a_closed_engine_leaves_nothing_to_those_behind_it(comparison):
    memory = comparison.records.memory
    peaks = memory[(memory["where"] == "peak") & (memory["role"] == Role.WORKSPACE)]
    in_no_tensor = peaks.groupby("run")["bytes"].max()
    assert in_no_tensor["bucketed"] <= in_no_tensor["fsdp"] + (2 << 20)


def test_what_ranks_send_to_try_nccl_is_not_left_reserved(comparison):
    reserved = allocator_items(comparison.records.memory)
    cached = reserved[reserved["item"] == "cached"].groupby("run")["bytes"].max()
    assert cached["fsdp"] < 100e6


def test_stages_send_in_one_order(tmp_path):
    schedules = ("gpipe", "1f1b", "zb-h1")
    config = CompareConfig(strategies=("single", "ddp", "fsdp"), ranks=2, pipe=2, schedule=schedules, device="cuda")
    comparison = compare(config, tmp_path / "run")
    assert comparison.losses_equal
    assert comparison.summary["as_planned"].all()


def test_a_script_with_ddp_is_recorded(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "device = int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()\n"
        "torch.cuda.set_device(device)\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', device))\n"
        "model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[device])\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.ones(8, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "dist.destroy_process_group()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    record = ["-m", "shardlab", "record", "--out", str(tmp_path / "run"), str(script)]
    subprocess.run([*launch, *record], check=True, timeout=120, env=script_env(), cwd=Path(__file__).parents[2])
    rows = load_run(tmp_path / "run").collectives
    assert rows[rows["step"] == 3].groupby("rank")["tag"].apply(list).tolist() == [["gradients of bucket 0"]] * 2
    assert rows[rows["step"] == 3]["wait_end_us"].notna().all()
