"""The same script, started by torchrun: the pool is the group that torchrun made."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardlab.launch import RankPool
from shardlab.launch import torchrun as torchrun_module
from shardlab.launch.placement import TorchrunEnv
from shardlab.launch.torchrun import TorchrunRanks
from tests.launch.helpers import script_env

SCRIPT = """
import os, torch, torch.distributed as dist
from shardlab.launch import RankPool, current, launch

def work(rank, base):
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    current().emit("note")
    return base + rank, x.tolist(), current().world_size

notes = []
with RankPool(2, device="cpu", timeout_s=30) as pool:
    first = pool.run(work, 10, on_message=lambda rank, note: notes.append((rank, note)))
    second = pool.run(lambda rank: rank)
again = launch(work, 2, 20, device="cpu")
# One write: two processes share this pipe, and print() may write piece by piece.
os.write(1, f"RESULT {first} {second} {again} {sorted(notes)}\\n".encode())
"""
RESULT = "RESULT [(10, [1.0, 1.0], 2), (11, [1.0, 1.0], 2)] [0, 1] [(20, [1.0, 1.0], 2), (21, [1.0, 1.0], 2)] {notes}"

ENDS_WITHOUT_THREADS = """
import atexit, os
from pathlib import Path

def say_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    os.write(1, f"THREADS {[name for name in names if 'gloo' in name]}\\n".encode())

atexit.register(say_threads)  # the first registered is the last called

import torch
from shardlab import Mesh, RankPool, build_engine

def train(rank):
    with Mesh({"data": 2}, device="cpu") as mesh:
        with build_engine("fsdp", torch.nn.Linear(8, 8), lambda t: torch.optim.SGD(t, lr=0.1), mesh) as engine:
            engine.backward(engine(torch.ones(4, 8)).sum())
            engine.step()

with RankPool(2, device="cpu") as pool:
    pool.run(train)
"""


def torchrun(path, text):
    path.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=script_env(), timeout=120)


def test_same_script_with_and_without_torchrun(tmp_path):
    both = torchrun(tmp_path / "script.py", SCRIPT)
    assert both.returncode == 0, both.stderr
    results = sorted(line for line in both.stdout.splitlines() if line.startswith("RESULT"))
    assert results == [RESULT.format(notes="[(0, 'note')]"), RESULT.format(notes="[]")]
    alone = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, env=script_env(), timeout=60
    )
    assert alone.stdout.strip() == RESULT.format(notes="[(0, 'note'), (1, 'note')]"), alone.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_no_thread_of_gloo_outlives_the_script(tmp_path):
    """One that lets go of a tensor while the interpreter ends aborts the process, once in some hundred runs.

    Not with torch's own engines: torch keeps what they make in caches of its own.
    """
    done = torchrun(tmp_path / "script.py", ENDS_WITHOUT_THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["THREADS []"] * 2


SURVIVES_A_FAILURE = """
import json, os
from shardlab import Mesh
from shardlab.launch import RankPool

def train(rank, lr):
    with Mesh({"data": 2}) as mesh:
        mesh.data.barrier().wait()
        if lr > 1 and WHO:
            raise ValueError("the loss is NaN")
    return (number for number in [lr]) if lr < 0 else lr

told = []
with RankPool(2, device="cpu", timeout_s=5) as pool:
    for lr in (0.1, 10.0, -1.0, 0.3, 0.5):
        try:
            told.append(pool.run(train, lr))
        except Exception as error:
            told.append(str(error).partition(";")[0].partition(" (")[0])
os.write(1, f"{json.dumps([os.environ['RANK'], *told])}\\n".encode())
"""


def told_after_a_failure(path, who):
    done = torchrun(path, SURVIVES_A_FAILURE.replace("WHO", who))
    return [told for _, *told in sorted(map(json.loads, done.stdout.splitlines()))]


def test_no_rank_gets_results_of_another_call_after_a_failure_that_the_script_catches(tmp_path):
    differ = "RankPool: rank 0 returned from call 2, rank 1 raised ValueError in call 2 of run"
    refused = "RankPool: its ranks have left an earlier call in different ways"
    assert told_after_a_failure(tmp_path / "script.py", "rank == 1") == [
        [[0.1, 0.1], differ, refused, refused, refused],
        [[0.1, 0.1], "the loss is NaN", differ, refused, refused],
    ]


def test_calls_go_on_after_a_failure_on_all_ranks_alike_that_the_script_catches(tmp_path):
    told = told_after_a_failure(tmp_path / "script.py", "True")
    for rank, own in enumerate(told):
        not_sent = f"the result of rank {rank} cannot be pickled"
        assert own == [[0.1, 0.1], "the loss is NaN", not_sent, [0.3, 0.3], [0.5, 0.5]]


DESTROYS_THE_GROUP = """
import json, os
import torch.distributed as dist
from shardlab.launch import RankPool

def destroy(rank):
    dist.destroy_process_group()

told = []
with RankPool(2, device="cpu", timeout_s=5) as pool:
    for fn in (str, destroy, str):
        try:
            told.append(pool.run(fn))
        except Exception as error:
            told.append(str(error).partition(";")[0])
os.write(1, f"{json.dumps([os.environ['RANK'], *told])}\\n".encode())
"""


def test_a_group_that_the_function_destroys_is_told(tmp_path):
    done = torchrun(tmp_path / "script.py", DESTROYS_THE_GROUP)
    destroyed = "RankPool: the default process group has been destroyed"
    assert sorted(map(json.loads, done.stdout.splitlines())) == [
        [str(rank), ["0", "1"], destroyed, destroyed] for rank in range(2)
    ]


IN_DIFFERENT_CALLS = """
from shardlab.launch import RankPool

with RankPool(2, device="cpu") as pool, RankPool(2, device="cpu") as other:
    print(pool.run(lambda rank: other.run(str) if rank == 0 else rank))
"""


def test_results_of_different_calls_are_refused(tmp_path):
    done = torchrun(tmp_path / "script.py", IN_DIFFERENT_CALLS)
    assert not done.stdout
    assert "RankPool: rank 0 returned from call 2, rank 1 returned from call 1 of run" in done.stderr


def test_other_world_size_is_refused_with_both_numbers(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="world_size: 4 is given, but torchrun started 2"):
        RankPool(4, device="cpu")


ONE_RANK_TAKES_LONG = """
import os, time
from shardlab.launch import RankPool

with RankPool(2, device="cpu", timeout_s=2) as pool:
    print(pool.run(lambda rank: time.sleep(0 if rank else 4)))
"""


def test_a_rank_may_work_alone_for_longer_than_the_timeout(tmp_path):
    done = torchrun(tmp_path / "script.py", ONE_RANK_TAKES_LONG)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("num_visible", "device"), [(2, "cuda:1"), (1, "cuda:0")])
def test_nccl_is_told_its_device_also_where_each_process_sees_one_gpu_of_its_own(monkeypatch, num_visible, device):
    """Else it connects in the first collective, and asks the driver for a device."""
    asked, store = {}, dist.HashStore()
    store.set("shardlab/gpu of rank 0", "cuda:0 GPU-a")
    monkeypatch.setattr(torchrun_module, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-b"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torchrun_module.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torchrun_module.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        torchrun_module.dist, "init_process_group", lambda backend, **given: asked.update(given, backend=backend)
    )
    for name in ("enter", "become_rank", "make_patient_group"):
        monkeypatch.setattr(torchrun_module, name, lambda *_: None)
    monkeypatch.setattr(torchrun_module.atexit, "register", lambda _: None)
    TorchrunRanks(TorchrunEnv(1, 2, 1, 2), 2, "cuda", 30.0, None).start()
    assert (asked["backend"], asked["device_id"]) == ("nccl", torch.device(device))
    assert (asked["store"], asked["rank"], asked["world_size"]) == (store, 1, 2)
