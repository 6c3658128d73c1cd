"""The same script, started by torchrun: the pool is the group that torchrun made."""

import json
import re
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
from tests.launch.helpers import as_under_torchrun, script_env, start_forked

SCRIPT = """
import atexit, json, os, time
from pathlib import Path

def say_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    os.write(1, f"THREADS {[name for name in names if 'gloo' in name]}\\n".encode())

atexit.register(say_threads)  # the first registered is the last called

import torch, torch.distributed as dist
from shardlab import Mesh, RankPool, build_engine
from shardlab.launch import current, launch

def work(rank, base):
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    current().emit("note")
    return base + rank, x.tolist(), current().world_size

def train(rank, meshes):
    weights = []
    for ranks in meshes:
        with Mesh({"data": 2 if ranks is None else 1}, ranks=[rank] if ranks else None, device="cpu") as mesh:
            model = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.ones_(model.weight)
            with build_engine("fsdp", model, lambda tensors: torch.optim.SGD(tensors, lr=1.0), mesh) as engine:
                engine.backward(engine(torch.full((1, 2), float(rank))).sum())
                engine.step()
                weights.append(engine.full_state_dict()["weight"].tolist())
    return weights

def differs(rank):
    with Mesh({"data": 2}) as mesh:
        mesh.data.barrier().wait()
    raise ValueError("the loss is NaN")

notes, told = [], []
with RankPool(2, device="cpu", timeout_s=TIMEOUT) as pool:
    first = pool.run(work, 10, on_message=lambda rank, note: notes.append((rank, note)))
    second = pool.run(train, [None, "each its own"])
    for fn in (differs, lambda rank: (number for number in [rank]), lambda rank: time.sleep(0 if rank else SLEEP)):
        try:
            told.append(pool.run(fn))
        except Exception as error:
            told.append(str(error).partition(";")[0].partition(" (")[0].splitlines()[0])
again = launch(work, 2, 20, device="cpu")
# One write: two processes share this pipe, and print() may write piece by piece.
told = [os.environ.get("RANK"), first, second, told, again, sorted(notes)]
os.write(1, f"RESULT {json.dumps(told)}\\n".encode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_same_script_with_and_without_torchrun(tmp_path):
    """Calls go on after failures on all ranks alike; a rank may work alone for longer than the timeout.

    A thread of gloo that lets go of a tensor while the interpreter ends aborts the process, once in some hundred runs.
    (Torch keeps what its own engines make in caches of its own.)
    """
    path, options = tmp_path / "script.py", {"capture_output": True, "text": True, "env": script_env(), "timeout": 240}
    path.write_text(SCRIPT.replace("TIMEOUT", "2").replace("SLEEP", "2.5 if 'RANK' in os.environ else 0"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run([*torchrun, str(path)], **options)
    assert both.returncode == 0, both.stderr
    alone = start_forked(path, cwd=tmp_path, output=tmp_path / "alone.txt")
    alone.join(60)
    lines = [*both.stdout.splitlines(), *(tmp_path / "alone.txt").read_text().splitlines()]
    assert [line for line in lines if line.startswith("THREADS")][:2] == ["THREADS []"] * 2
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT")]
    weights = [[[[0.5, 0.5]], [[1.0, 1.0]]], [[[0.5, 0.5]], [[0.0, 0.0]]]]  # the mean of 0 and 1; of each alone
    for rank, first, second, told, again, notes in results:
        assert first == [[10, [1.0, 1.0], 2], [11, [1.0, 1.0], 2]]
        assert again == [[20, [1.0, 1.0], 2], [21, [1.0, 1.0], 2]]
        assert second == weights
        assert told[0].endswith("the loss is NaN")
        assert re.search(f"the result of rank {'.' if rank is None else rank} cannot be pickled", told[1])
        assert told[2] == [None, None]
        assert notes == {"0": [[0, "note"]], "1": [], None: [[0, "note"], [1, "note"]]}[rank]
    assert sorted(str(rank) for rank, *_ in results) == ["0", "1", "None"]


TELLS = """
import json, os
import torch.distributed as dist
from shardlab import Mesh
from shardlab.launch import RankPool

def train(rank, lr=0.1):
    with Mesh({"data": 2}) as mesh:
        mesh.data.barrier().wait()
        if lr > 1 and rank == 1:
            raise ValueError("the loss is NaN")
    return lr

def destroy(rank):
    dist.destroy_process_group()

told = []
with RankPool(2, device="cpu", timeout_s=5) as pool:
    for call in CALLS:
        try:
            told.append(pool.run(*call))
        except Exception as error:
            told.append(str(error).partition(";")[0].partition(" (")[0])
os.write(1, f"{json.dumps([os.environ['RANK'], *told])}\\n".encode())
"""


def told(pools, directory, calls):
    """What a script says of these calls on each of two ranks."""
    pools(2).start()  # and with it the server that forks
    said = as_under_torchrun(directory / "output.txt", exec, TELLS.replace("CALLS", calls), {"__name__": "__main__"})
    return sorted(map(json.loads, said.splitlines()))


def test_no_rank_gets_results_of_another_call_after_a_failure_that_the_script_catches(pools, tmp_path):
    found = told(pools, tmp_path, "((train, 0.1), (train, 10.0), (train, 0.3), (train, 0.5))")
    differ = "RankPool: rank 0 returned from call 2, rank 1 raised ValueError in call 2 of run"
    refused = "RankPool: its ranks have left an earlier call in different ways"
    assert found == [
        ["0", [0.1, 0.1], differ, refused, refused],
        ["1", [0.1, 0.1], "the loss is NaN", differ, refused],
    ]


def test_a_group_that_the_function_destroys_is_told(pools, tmp_path):
    found = told(pools, tmp_path, "((str,), (destroy,), (str,))")
    destroyed = "RankPool: the default process group has been destroyed"
    assert found == [[str(rank), ["0", "1"], destroyed, destroyed] for rank in range(2)]


def test_other_world_size_is_refused_with_both_numbers(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="world_size: 4 is given, but torchrun started 2"):
        RankPool(4, device="cpu")


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
