"""What several tests of ranks use."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from shardlab.comm.signed_messages import SECRET

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


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


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
