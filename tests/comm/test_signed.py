"""What ranks are told over sockets by somebody who is no rank: nothing of it runs."""

import base64
import io
import os
import stat
import subprocess
import sys

import pytest
import torch

from shardlab.comm import signed_messages as signed
from shardlab.engines.checkpoint import module_state
from tests.launch.helpers import script_env

# gloo takes anybody for a rank. Here one member of the group is none; where root runs the tests, it is another user's.
TAKEN_OVER = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from shardlab import Mesh
from shardlab.comm.transports.rendezvous import share_buffers
from shardlab.launch import torchrun

folder = sys.argv[1]
calls = [
    lambda: Mesh({"data": 2}),
    lambda: share_buffers(dist.group.WORLD, timedelta(seconds=30)),
    lambda: torchrun._ends_of_all(torchrun._End(1)),
]

class Evil:
    def __reduce__(self):
        return os.mkdir, (os.path.join(folder, "taken over"),)

is_rank = os.fork() > 0
store = dist.FileStore(os.path.join(folder, "store"), 2)
dist.init_process_group("gloo", store=store, rank=int(not is_rank), world_size=2, timeout=timedelta(seconds=60))
if not is_rank and os.geteuid() == 0:
    os.setuid(65534)
for call in calls:
    try:
        if is_rank:
            call()
        else:
            dist.all_gather_object([None, None], Evil())
    except Exception as error:
        if is_rank:
            print(error)
os._exit(0)
"""


def test_no_rank_runs_what_another_user_sends(tmp_path):
    env = {**script_env(), "GLOO_SOCKET_IFNAME": "lo", signed.SECRET: "of the rank alone"}
    ran = subprocess.run(
        [sys.executable, "-c", TAKEN_OVER, str(tmp_path)], capture_output=True, text=True, env=env, timeout=120
    )
    assert not (tmp_path / "taken over").exists()
    assert ran.stdout.count("rank 1: a message came without the signature of a rank") == 3, ran


def test_extra_state_that_no_rank_has_written_is_not_unpickled(monkeypatch):
    monkeypatch.setenv(signed.SECRET, "of these ranks")
    assert module_state._unpickled(module_state._pickled({"a": 1})) == {"a": 1}
    torch.save({"a": 1}, file := io.BytesIO())
    with pytest.raises(RuntimeError, match="without the signature of a rank"):
        module_state._unpickled(base64.b64encode(file.getvalue()).decode())


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(signed.SECRET, raising=False)
    signed._of_user.cache_clear()
    yield tmp_path
    signed._of_user.cache_clear()


def test_the_secret_of_a_user_is_made_once_and_only_the_user_may_read_it(home):
    made, path = signed.signature("a rank"), home / ".cache" / "shardlab" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    signed._of_user.cache_clear()
    assert signed.signature("a rank") == made != signed.signature("another")
    path.chmod(0o640)
    signed._of_user.cache_clear()
    with pytest.raises(RuntimeError, match=r"SHARDLAB_SECRET: .* others may read it"):
        signed.signature("a rank")


def test_without_a_home_directory_the_variable_is_named(home, monkeypatch):
    monkeypatch.setenv("HOME", os.devnull)
    with pytest.raises(RuntimeError, match="set SHARDLAB_SECRET to one long random text"):
        signed.signature("a rank")
