"""What a rank does while it waits in no collective, as its parent can find out: the state of its process, its stack.

A rank in an endless loop, or stopped by a signal, shows on no board. The kernel says what state its process is in. For
the stack the parent sends a signal, on which ``faulthandler`` writes it into a file of the pool's directory: that works
also while C code holds the interpreter lock. A stopped process answers when it goes on.
"""

import faulthandler
import linecache
import os
import re
import signal
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep

import psutil

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


class Silence:
    """Since when nothing new has been seen of the ranks, and when to say so.

    Args:
        notice_s: seconds until the first notice; each later one comes after twice the time. None for no notice.
    """

    def __init__(self, notice_s: float | None) -> None:
        self._notice_s = notice_s
        self._seen: object = None
        self._since = monotonic()
        self._next_s = notice_s

    def due(self, seen: object) -> float:
        """Seconds of silence if a notice is due now, else 0.

        Args:
            seen: what is seen now; whatever differs from the last look ends the silence.
        """
        now = monotonic()
        if seen != self._seen:
            self._seen, self._since, self._next_s = seen, now, self._notice_s
        silent_s = now - self._since
        if self._next_s is None or silent_s < self._next_s:
            return 0.0
        self._next_s *= 2
        return silent_s
