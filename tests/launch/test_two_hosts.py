"""Two ranks that see each other only over a network, as on two machines: each in a network namespace.

In the first pair they are forks that enter theirs. In the second torchrun's agents have started them, each has memory
of its own to share, and one a clock that is 5,000 seconds ahead: the records have one time axis all the same.
"""

import os
import shutil
import subprocess
import sys
import uuid

import pytest

from shardlab.records.store import load_run
from tests.launch.helpers import script_env, start_forked

SCRIPT = """
import os, sys, torch
from shardlab import Mesh, RankPool, build_engine

def train(rank):
    with Mesh({"data": 2}) as mesh:
        model = torch.nn.Linear(8, 8)
        with build_engine("zero3", model, lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh) as engine:
            engine.backward(engine(torch.ones(4, 8)).square().mean())
            engine.step()
            return engine.num_steps, str(mesh.data.transport)

with RankPool(2, device="cpu", timeout_s=60) as pool:
    os.write(1, f"RESULT {pool.run(train)}\\n".encode())
    if sys.argv[1]:
        from shardlab import CompareConfig, compare
        config = CompareConfig(strategies=("bucketed",), ranks=2, steps=3, model="mlp", seq_len=8, device="cpu")
        compare(config, sys.argv[1], pool=pool)
"""
PORT = "29511"
OWN_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
AHEAD = ["unshare", "--time", "--monotonic", "5000", "--fork"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """Names of two pairs of namespaces, joined by a cable each; the address of the first of a pair is 10.77.N.1."""
    names = [[f"shardlab-{uuid.uuid4().hex[:8]}" for _ in range(2)] for _ in range(2)]
    try:
        for number, pair in enumerate(names):
            for name in pair:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", pair[0], "type", "veth", "peer", "name", "cable", "netns", pair[1])
            for place, name in enumerate(pair, 1):
                ip("-n", name, "addr", "add", f"10.77.{number}.{place}/24", "dev", "cable")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in (name for pair in names for name in pair):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def agent_of(rank, address):
    """Arguments of Python for torchrun, on a machine of two."""
    where = [f"--node-rank={rank}", f"--master-addr={address}", f"--master-port={PORT}"]
    return ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where]


def as_of_an_agent(rank, address):
    """What torchrun sets there: each agent would import torch for this alone."""
    one = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    return {**one, "MASTER_ADDR": address, "MASTER_PORT": PORT}


def may_make_namespaces():
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    needed = ["unshare", "--net", "--mount", *AHEAD[1:], "true"]
    return subprocess.run(needed, capture_output=True, check=False).returncode == 0


NEEDS_NAMESPACES = pytest.mark.skipif(
    not may_make_namespaces(), reason="network and time namespaces need root, ip and unshare"
)


@NEEDS_NAMESPACES
def test_ranks_in_two_network_namespaces_with_a_common_shm_use_gloo(hosts, tmp_path):
    started = []
    for rank, name in enumerate(hosts[0]):
        env = as_of_an_agent(rank, "10.77.0.1") | {"GLOO_SOCKET_IFNAME": "cable"}
        script, place = tmp_path / f"train{rank}.py", f"/var/run/netns/{name}"
        enters = f"import ctypes, os\nassert not ctypes.CDLL(None).setns(os.open({place!r}, os.O_RDONLY), 0)\n"
        script.write_text(f"{enters}os.environ |= {env}\n{SCRIPT}")
        started.append(start_forked(script, "", cwd=tmp_path, output=tmp_path / f"printed{rank}.txt"))
    for rank, process in enumerate(started):
        process.join(120)
        process.kill()
        output = (tmp_path / f"printed{rank}.txt").read_text()
        assert "RESULT [(1, 'gloo'), (1, 'gloo')]" in output, output


@NEEDS_NAMESPACES
def test_ranks_of_torchruns_agents_on_two_hosts_have_one_time_axis(hosts, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    env, started = {**script_env(), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}, []
    for rank, name in enumerate(hosts[1]):
        python = [sys.executable, *agent_of(rank, "10.77.1.1"), str(tmp_path / "train.py"), str(tmp_path / "out")]
        command = ["ip", "netns", "exec", name, *OWN_SHM, *(AHEAD if rank else []), *python]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for output in outputs:
        assert "RESULT [(1, 'gloo'), (1, 'gloo')]" in output, output
    rows = load_run(tmp_path / "out" / "records" / "bucketed").collectives
    ends = rows[rows["op"] == "all_reduce"].pivot_table(index=["step", "seq"], columns="rank", values="end_us")
    assert len(ends)
    assert ((ends[0] - ends[1]).abs() < 1e6).all()
    assert (ends < 100e6).all().all()
