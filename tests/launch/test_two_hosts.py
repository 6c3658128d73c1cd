"""Two torchrun agents that see each other only over a network, as on two machines: each in a network namespace."""

import os
import shutil
import subprocess
import sys
import uuid

import pytest

from tests.launch.helpers import script_env

SCRIPT = """
import os, torch
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
"""
OWN_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


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


def may_make_namespaces():
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces need root, ip and unshare")
def test_two_agents_in_two_network_namespaces_use_gloo_with_and_without_a_common_shm(hosts, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    started = []
    for number, (pair, shm) in enumerate(zip(hosts, ([], OWN_SHM), strict=True)):
        for rank, name in enumerate(pair):
            agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            where = [f"--node-rank={rank}", f"--master-addr=10.77.{number}.1", "--master-port=29511"]
            command = ["ip", "netns", "exec", name, *shm, *agent, *where, str(tmp_path / "train.py")]
            env = {**script_env(), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
            )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for output in outputs:
        assert "RESULT [(1, 'gloo'), (1, 'gloo')]" in output, output
