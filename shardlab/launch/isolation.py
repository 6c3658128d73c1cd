"""What makes a process a rank: it ends with its parent, has its own session and output, and keeps its freed memory.

A rank never outlives its parent, whatever ends the parent, and its own children end with it. Each rank holds the read
end of a pipe whose only write end is in the parent; the kernel closes that with the process. Two things watch it, and
each covers a case that the other cannot:

- the kernel itself (Linux): end of file on the pipe sends SIGKILL to the rank's process group, also to ranks that are
  stopped or that hold the interpreter lock in a long call, and to children whose rank is dead;
- the rank's watcher thread, which works everywhere, and sees the forkserver end, the rank's parent by birth.

Both end the whole group. A signal to the rank alone, as the parent-death signal is, would leave its children.

A training step frees its gradients, activations and temporaries, and soon allocates them again. By default glibc
returns large freed blocks to the kernel at once, and the kernel zeroes every page again when it is next touched. On CPU
ranks this takes up to a tenth of a step, and varies from run to run. So a rank keeps freed blocks until the running
call ends. This costs only resident memory; live bytes, which the memory tables count, stay the same.
"""

import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = 2**31 - 1
_LARGEST = 32 * 1024**2  # glibc takes no more: a larger block comes from the kernel each time
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def isolate(output: Connection, life: Connection, environ: Mapping[str, str]) -> None:
    """Give this process its own session, its own output and the parent's environment.

    With its own session Ctrl-C reaches only the parent, which then ends the ranks.

    Args:
        output: what this process prints from now on; closed here.
        life: closes when the parent is gone, and this process ends with it.
        environ: the environment from now on.
    """
    os.setsid()
    hold(life)  # after setsid: the signal goes to the process group that this process then leads
    _let_children_be_forked()
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    output.close()
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    faulthandler.enable()  # a crash in C code prints its Python stack into the rank's output
    # The forkserver has the environment of its own start; a notebook may have changed it since.
    os.environ.clear()
    os.environ.update(environ)
    # After the environment, in which the user may set glibc's thresholds.
    keep_freed()


def hold(life: Connection) -> None:
    """Tie this process, the leader of its process group, to the parent that holds the other end of ``life``."""
    if not sys.platform.startswith("linux"):
        return
    fd = life.fileno()
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    # Set O_ASYNC last: from here on the signal may arrive, and it must already be SIGKILL to the whole group.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if life.poll():  # the parent went before any of this was in place
        cut()


def _let_children_be_forked() -> None:
    """Have this rank's children, such as workers of a data loader, be forks, as in a plain process on Linux.

    By default they would start as the rank itself has, in a new interpreter. That lacks what a cell has defined and
    needs seconds for its imports, and its semaphores have names, which stay in /dev/shm when the rank is killed.
    """
    if sys.platform.startswith("linux"):
        multiprocessing.set_start_method("fork", force=True)
    # A rank saves what it holds when SIGTERM comes; its children end at once, as those of a plain process.
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


def cut() -> None:
    """End this process and every process it started, at once."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def keep_freed() -> None:
    """Have glibc keep freed memory from now on, unless the user's environment sets its thresholds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name in os.environ for name in _SET_BY_USER):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back() -> None:
    """Return free memory to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def flush_output() -> None:
    """Write out all that this process has printed, also from C."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what C code printed sits in the C library's own buffer
