"""A rank never outlives its parent, whatever ends the parent, and takes its own children along.

Each rank holds the read end of a pipe whose only write end is in the parent; the kernel closes that with the process.
Three things watch, for each covers what the others cannot:

- the kernel itself (Linux): end of file on the pipe sends SIGKILL to the rank's process group, also to ranks that are
  stopped or that hold the interpreter lock in a long call;
- the parent-death signal (Linux), which fires if the forkserver, the rank's parent by birth, is killed;
- the rank's watcher thread, which works everywhere.
"""

import ctypes
import fcntl
import os
import signal
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def hold(life: Connection) -> None:
    """Tie this process, the leader of its process group, to the parent that holds the other end of ``life``."""
    if not sys.platform.startswith("linux"):
        return
    fd = life.fileno()
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if life.poll():  # the parent went before any of this was in place
        cut()


def cut() -> None:
    """End this process and every process it started, at once."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
