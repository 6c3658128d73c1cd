"""What a rank does that no communicator reports, found on its stack: a plain ``dist.all_reduce``, an endless loop.

A learner's cell may call ``dist.all_reduce(x)``: it makes no event, and yet a hang should name it. So a rank's watcher
thread looks at the main thread's stack a few times a second. If the innermost Python frame is in torch's
collectives module, or in a communicator that nobody observes, the rank is inside that call. Asynchronous calls of torch
that are waited for in user code do not show: the group's own timeout ends those.

A rank in an endless loop, or stopped by a signal, is in no collective at all. Its parent asks the kernel what state the
process is in. For the stack it sends a signal, on which ``faulthandler`` writes it into a file of the pool's directory:
that works also while C code holds the interpreter lock. A stopped process answers when it goes on.
"""

import concurrent.futures
import faulthandler
import linecache
import os
import queue
import re
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

import psutil
from torch.distributed import distributed_c10d

from shardlab.comm.callers import is_library
from shardlab.installed import PACKAGE

_COLLECTIVES_FILE = str(distributed_c10d.__file__)
_COMM_FOLDER = str(PACKAGE / "comm")
# A communicator that waits for its thread is, innermost, in one of these.
_WAIT_FILES = (str(threading.__file__), str(queue.__file__), str(concurrent.futures._base.__file__))
_PACKAGE = str(PACKAGE)

# A real-time signal: schedulers and users send SIGUSR1 and SIGUSR2 for purposes of their own.
_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_ANSWER_S = 0.5
_MOST_FRAMES = 8
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_WORKER = str(Path(__file__).with_name("worker.py"))
_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
_IN_WORDS = {
    psutil.STATUS_RUNNING: "computing",
    psutil.STATUS_SLEEPING: "sleeping",
    psutil.STATUS_DISK_SLEEP: "in a system call that cannot be interrupted, mostly a disk's",
    psutil.STATUS_STOPPED: "stopped by a signal; SIGCONT wakes it",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_ZOMBIE: "dead",
}

Frame = tuple[FrameType, int | None]


@dataclass(frozen=True)
class SeenCall:
    """A collective found on a stack; it has the fields of a ``CollectiveEvent`` that the board shows."""

    op: str
    source_line: str
    issue_ns: float
    seq: int = -1
    axis: str = ""
    dtype: str = ""
    numel: int = 0
    tag: str = ""
    ranks: tuple[int, ...] = ()


class StackWatch:
    """Looks at one thread's stack and recognises the call that the last look found."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._call: SeenCall | None = None
        self._mark = _Mark()
        self._is_known = False  # whether the marked frame is in a collective

    def look(self) -> SeenCall | None:
        """The collective the thread is in; the same object for as long as it is the same call.

        The frames of a thread that runs must not be walked: CPython 3.11 has crashed in that. So they are walked once,
        when a second look finds the thread in the same innermost frame, which is one that waits.
        """
        frame = sys._current_frames().get(self._thread_id)
        file = "" if frame is None else frame.f_code.co_filename
        if frame is None or not (file in _WAIT_FILES or _is_collective_file(file)):
            self._call = None
            return None
        # The mark lives and dies with the frame, so a second call of the same function is never taken for the first.
        # (Comparing id(frame) would take it so: freed frames are re-used. Keeping the frame would keep its tensors.)
        if frame.f_trace is not self._mark:
            self._mark = frame.f_trace = _Mark()
            self._call, self._is_known = None, False
        elif not self._is_known:
            frames = list(walk_stack(frame))
            self._call, self._is_known = _call_of(frames) if _is_collective(frames) else None, True
        return self._call


def failed_call(traceback: TracebackType | None) -> SeenCall | None:
    """The collective in which an exception was raised; None if it was raised elsewhere."""
    frames = list(walk_tb(traceback))[::-1]
    return _call_of(frames) if _is_collective(frames) else None


def _is_collective(frames: Iterable[Frame]) -> bool:
    """Whether the innermost frame that does not merely wait for a thread belongs to a collective."""
    files = (frame.f_code.co_filename for frame, _ in frames)
    return _is_collective_file(next((file for file in files if file not in _WAIT_FILES), ""))


def _is_collective_file(file: str) -> bool:
    return file == _COLLECTIVES_FILE or file.startswith(_COMM_FOLDER)


def _call_of(frames: Iterable[Frame]) -> SeenCall:
    """``frames``: innermost first."""
    op = of_package = of_installed = of_user = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if is_library(file):
            if _is_collective_file(file):
                op = _name_of(frame)  # the outermost: all_gather_bytes, not the all_gather inside it
        elif file.startswith(_PACKAGE):
            of_package = of_package or f"{file}:{line}"
        elif "/site-packages/" in file:  # between a person's code and torch; as in line_of_caller()
            of_installed = of_installed or f"{file}:{line}"
        else:
            of_user = f"{file}:{line}"
            break
    return SeenCall(op, of_user or of_installed or of_package, perf_counter_ns())


def _name_of(frame: FrameType) -> str:
    """The function's name; a class's where its objects are made, so ``Mesh`` and not ``__init__``."""
    name = frame.f_code.co_qualname.removesuffix(".__init__")
    return name.rpartition(".")[2]


class _Mark:
    """A trace function that traces nothing; each is told from every other by identity."""

    def __call__(self, *_: object) -> None:
        return None


def answer_with_stack(directory: Path, rank: int) -> None:
    """Have this process, a rank, write its stack when its parent asks for it."""
    path = _stack_file(directory, rank)
    unready = path.with_suffix(".unready")
    descriptor = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=False, chain=False)
    # Rename the file only now: the parent signals a rank whose file exists, and without a handler that would end it.
    unready.rename(path)


def state_of(pid: int | None) -> str:
    """The state of a process in a few words: computing, sleeping, stopped by a signal, ..."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return _IN_WORDS.get(status, status)


def is_stopped(pid: int | None) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    try:
        return psutil.Process(pid).status() in _STOPPED
    except psutil.NoSuchProcess:
        return False


def stack_of(directory: Path, rank: int, pid: int | None) -> list[str]:
    """The frames of a rank's stack, innermost first, as ``file:line in function: code``; empty without an answer."""
    path = _stack_file(directory, rank)
    if pid is None or not path.is_file() or is_stopped(pid):
        return []
    before = path.stat().st_size
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return []
    deadline = monotonic() + _ANSWER_S
    size = before
    # Written frame by frame: it is whole when it has stopped growing.
    while monotonic() < deadline and (size == before or path.stat().st_size != size):
        size = path.stat().st_size
        sleep(0.02)
    with path.open("rb") as file:
        file.seek(before)
        return _frames(file.read().decode(errors="replace").splitlines())


def _frames(lines: Sequence[str]) -> list[str]:
    frames = []
    for found in filter(None, map(_FRAME.fullmatch, lines)):
        file, line, name = found["file"], int(found["line"]), found["name"]
        if file == _WORKER:
            break  # from here on outwards they are the same in every rank
        code = "" if file.startswith(sysconfig.get_path("stdlib")) else linecache.getline(file, line).strip()
        frames.append(f"{file}:{line} in {name}" + (f": {code[:80]}" if code else ""))
    return frames[:_MOST_FRAMES]


def _stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}"
