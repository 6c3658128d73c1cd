"""What several tests of ranks use."""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from shardlab.comm.signed_messages import SECRET
from shardlab.launch import processes
from tests.conftest import PRELOAD

ROOT = Path(__file__).parents[2]


def scaled(rank: int) -> int:
    return 2 * rank


def script_env() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    # The secret, so that torchrun's ranks make no file for it in the home directory.
    return {SECRET: "of the tests", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def start_python(*words: object, **options: Any) -> subprocess.Popen[str]:
    """This Python, with the checkout importable; what it prints can be read."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, *map(str, words)], text=True, env=script_env(), **pipes)


def start_forked(*words: object, cwd: Path, output: Path) -> ForkServerProcess:
    """As ``start_python``, but a fork, which has torch already, as have its ranks: children of the same server.

    Args:
        words: a script, or ``-m`` and a module, and arguments.
        cwd: its folder.
        output: a file for all that it prints.
    """
    context = processes._forkserver(PRELOAD)
    process = context.Process(target=_as_python, args=([*map(str, words)], str(cwd), script_env(), output))
    with processes.hidden_main():
        process.start()
    return process


def _as_python(words: list[str], cwd: str, env: Mapping[str, str], output: Path) -> None:
    become_program(cwd, env, output)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    atexit._clear()
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def become_program(cwd: str, env: Mapping[str, str], output: str | Path) -> None:
    """Of a fork of the server that forks ranks: a program of its own, whose ranks come from the same server."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for fd in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
    multiprocessing.set_start_method("fork", force=True)  # as in a program that has not asked for another
    # It would start a server of its own.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def as_under_torchrun(output: Path, call: Callable[..., object], *args: object) -> str:
    """What two ranks print that call this, as torchrun would start them, but as forks, which have torch already.

    Args:
        output: a file for it.
        call: a function of a module.
        args: its arguments.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = multiprocessing.get_context("forkserver").Process
    ranks = [start(target=_as_rank, args=(rank, store.port, output, call, *args)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0], output.read_text()
    return output.read_text()


def _as_rank(rank: int, port: int, output: Path, call: Callable[..., object], *args: object) -> None:
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": True, SECRET: "of the tests"}
    os.environ.update({name: str(value) for name, value in given.items()})
    sys.stdout.flush()
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    sys.stdout = os.fdopen(1, "w")
    # Torch: a group that goes with its last reference waits for its threads with Python locked, and one of them may be
    # letting go of a tensor of Python's. Here that happens once in five runs.
    end, groups = dist.destroy_process_group, []
    dist.destroy_process_group = lambda *group: (groups.append(dist.group.WORLD), end(*group))
    call(*args)
    sys.stdout.flush()


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether they end in so many seconds in which nobody waits for a core; on a busy machine 20 s more at most."""
    left, began, before = processes, time.monotonic(), _waited_for_cores_s()
    while left and time.monotonic() - began < seconds + min(20, _waited_for_cores_s() - before):
        _, left = psutil.wait_procs(left, timeout=0.05)
        left = [process for process in left if _runs(process)]
    return not left


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end between both questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _waited_for_cores_s() -> float:
    """For how long since boot some process has waited for a core; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


def wait_for_line(process: subprocess.Popen[str], words: str, seconds: float = 60.0) -> list[str]:
    """Lines of the script's output up to the first with ``words``."""
    assert process.stdout is not None
    lines = []
    deadline = time.monotonic() + seconds
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
        assert time.monotonic() < deadline, lines
    raise AssertionError(f"{words!r} never came: {lines}")
