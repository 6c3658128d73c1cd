"""The processes of one set of ranks: started together, ended together, never repaired.

This file knows processes and pipes, nothing of results: ``answers_and_failures.py`` waits for answers, and ``pool.py``
starts new processes where these have ended.

Ranks are forked from Python's own forkserver, one small process per parent, free of CUDA and of threads, which ends
with its parent. It has imported torch once, so that a rank is up in hundredths of a second. It and Python's resource
tracker have a session of their own: what a terminal or Jupyter sends to the parent's process group is not for them,
since they outlive the parent by a moment, to remove what it has left.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from types import ModuleType
from typing import Any

import psutil

from shardlab.comm.signed_messages import SECRET
from shardlab.launch import worker
from shardlab.launch.hang_board import Board
from shardlab.launch.messages import Stop, Task

_REAP_S = 2.0
_SPAWN_IN_THIS_SESSION = util.spawnv_passfds
_MAIN_IS_HIDDEN = Lock()
_ALWAYS = ("torch", "shardlab.launch.worker", "shardlab.launch.left_folders")
# Without preloading, each rank would import these when it builds an optimizer or a table: 0.5 to 2 s of CPU time.
# The forkserver preloads them if the parent uses them too; if not, its first start takes only the import of torch.
_IF_PARENT_HAS = {
    "torch._dynamo": ("torch._dynamo",),
    "pandas": ("pandas",),
    "shardlab.engines": ("shardlab.engines", "torch._dynamo"),  # which torch imports with the first optimizer
    "shardlab.experiment.run.rank_run": ("shardlab.experiment.run.rank_run", "torch._dynamo"),
}
_PIPE_BYTES = 1 << 16  # so much a pipe holds unless told otherwise: all that was written before a read


class RankOutput:
    """Reads one rank's output pipe without waiting and prints its lines as ``[rank 2] ...``."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self._prefix = f"[rank {rank}] "
        self._pipe = pipe
        self._unended = bytearray()  # the last line, whose end has not come
        self.num_bytes = 0  # that have come
        self.is_open = True
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """What ``multiprocessing.connection.wait`` waits on."""
        return self._pipe.fileno()

    def pump(self) -> None:
        """Print every whole line that has come; returns at once."""
        read = self._read() if self.is_open else b""
        self._unended.extend(read)
        if b"\n" in read:  # only then: at every read a long line would be copied whole
            *lines, self._unended = self._unended.split(b"\n")
            self._print(lines)

    def finish(self) -> None:
        """Print all that has come, also a last line without a newline."""
        self.pump()
        if self._unended:
            self._print([self._unended])
            self._unended = bytearray()

    def close(self) -> None:
        """Close the pipe."""
        self.is_open = False
        self._pipe.close()

    def _read(self) -> bytes:
        try:
            read = os.read(self._pipe.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return b""
        self.is_open = bool(read)  # else the rank and all that wrote for it are gone
        self.num_bytes += len(read)
        return read

    def _print(self, lines: list[bytearray]) -> None:
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        # A progress bar redraws its line after a carriage return: its last state is the line.
        shown = [f"{self._prefix}{text.rpartition(chr(13))[2]}\n" for text in texts]
        sys.stdout.write("".join(shown))
        sys.stdout.flush()


@dataclass(frozen=True)
class RankProcess:
    """The parent's side of one rank.

    Attributes:
        life: when its last copy closes, the kernel ends the rank and the processes that it started.
        rank_life: the end that the kernel watches for that; open here too, since a rank may die before its children. Of
            a process that is killed Linux releases it after ``life``, whose number is higher.
    """

    rank: int
    process: ForkServerProcess
    control: Connection
    output: RankOutput
    life: Connection
    rank_life: Connection

    def send_signal(self, signum: int) -> None:
        """Signal the rank and the processes it started, if it still runs."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            return
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:  # not yet the leader of a group of its own
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def close(self) -> None:
        """Free what this side holds of a rank that has ended."""
        # Joined before its output is finished: only then has it written the last of it.
        self.process.join(_REAP_S)
        if not self.process.is_alive():
            self.process.close()
        self.output.finish()
        self.output.close()
        self.control.close()
        self.rank_life.close()


class RankProcesses:
    """The running ranks. Call ``end`` in every case; if this process dies, the ranks end by themselves."""

    def __init__(self, options: worker.StartOptions) -> None:
        self._owner_pid = os.getpid()
        # The ranks' own, in their environment, which other users cannot read; unless the user has set one.
        self._environ = {SECRET: secrets.token_hex(), **os.environ}
        self._ended = False
        # If this process is killed, the forkserver removes the folders named after its pid (``left_folders``).
        self.directory = Path(tempfile.mkdtemp(prefix=f"shardlab-{os.getpid()}-"))
        self.board = Board(self.directory / "board", options.placement.world_size)
        self.ranks: list[RankProcess] = []
        self._children: set[psutil.Process] = set()
        self._sender: Thread | None = None
        try:
            context = _forkserver(options.preload)
            with hidden_main():
                for rank in range(options.placement.world_size):
                    self.ranks.append(self._start_rank(rank, options, context))
        except BaseException:
            self.end()  # some may run already, and nobody else knows of them
            raise

    @property
    def is_alive(self) -> bool:
        """Whether every rank still runs; not in a fork of this process, whose ranks they are not."""
        is_own = not self._ended and os.getpid() == self._owner_pid
        return is_own and all(rank.process.is_alive() for rank in self.ranks)

    def send(self, task: Task) -> None:
        """Send every rank the same task. A dead rank takes none; the collector learns of it from its sentinel."""
        # In a thread: a rank that hangs after the last call, or waits for room in the pipe of its output, takes no more
        # than its pipe holds, and this thread must read that output, and count the time.
        self._sender = Thread(target=self._send, args=(ForkingPickler.dumps(task),), daemon=True, name="shardlab-send")
        self._sender.start()

    def _send(self, pickled: memoryview) -> None:
        for rank in self.ranks:
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.control.send_bytes(pickled)

    def stop(self, grace_s: float) -> None:
        """Ask idle ranks to leave, then ``end``."""
        if not self._ended and os.getpid() == self._owner_pid:
            self._note_children()
            for rank in self.ranks:
                with suppress(BrokenPipeError, ConnectionResetError):
                    rank.control.send(Stop())
            self._wait_for_all(grace_s)
        # In every case: a rank that did not leave in time is killed, and pipes and board are freed.
        self.end()

    def end(self, grace_s: float = 0.0) -> None:
        """End all ranks: SIGTERM, and after ``grace_s`` SIGKILL. Doing it twice is harmless."""
        # A fork of this process holds a copy of this object, whose processes are not its own to end.
        if self._ended or os.getpid() != self._owner_pid:
            return
        self._ended = True  # first: an interrupt in the grace period must not start all over
        self._note_children()
        try:
            if grace_s > 0:
                self._signal(signal.SIGTERM)
                self._wait_for_all(grace_s)
        finally:
            self._signal(signal.SIGKILL)
            # Closing it ends a rank that the signal missed, since it was not yet the leader of its group.
            for rank in self.ranks:
                rank.life.close()
            for child in self._children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        if self._sender is not None:
            self._sender.join(_REAP_S)  # the pipes that it writes to have no readers any more
        for rank in self.ranks:
            rank.close()
        # After the ranks: they write to the board and find each other through a file in the directory.
        self.board.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _note_children(self) -> None:
        """Remember the ranks' child processes: once a rank has ended, nothing shows whose children they were."""
        for rank in self.ranks:
            if not rank.process.is_alive():  # its number may be another's by now
                continue
            with suppress(psutil.NoSuchProcess):
                self._children.update(psutil.Process(rank.process.pid).children(recursive=True))

    def _signal(self, signum: int) -> None:
        for rank in self.ranks:
            rank.send_signal(signum)

    def _wait_for_all(self, grace_s: float) -> None:
        deadline = monotonic() + grace_s
        while running := [rank for rank in self.ranks if rank.process.is_alive()]:
            if monotonic() >= deadline:
                return
            # Their output is taken meanwhile: a rank that waits for room in its pipe could not leave.
            outputs = [rank.output for rank in running if rank.output.is_open]
            wait(
                [*(output.fileno() for output in outputs), *(rank.process.sentinel for rank in running)],
                max(0.0, deadline - monotonic()),
            )
            for output in outputs:
                output.pump()

    def _start_rank(self, rank: int, options: worker.StartOptions, context: ForkServerContext) -> RankProcess:
        control, rank_control = context.Pipe()
        output, rank_output = context.Pipe(duplex=False)
        rank_life, life = context.Pipe(duplex=False)
        rank_config = worker.RankConfig(
            rank, options, self.directory, self._environ, rank_control, rank_output, rank_life
        )
        process = context.Process(target=worker.main, args=(rank_config,), name=f"shardlab-rank-{rank}")
        process.start()
        util.register_after_fork(life, Connection.close)  # a child of this process may outlive it
        # A pipe reports its end only when all copies of the other side are closed, this process' included.
        for theirs in (rank_control, rank_output):
            theirs.close()
        return RankProcess(rank, process, control, RankOutput(rank, output), life, rank_life)


def _forkserver(preload: Sequence[str] = ()) -> ForkServerContext:
    """Start the forkserver if it does not run yet, without waiting for it.

    Args:
        preload: more modules for it to import; without effect once it runs.
    """
    forkserver = multiprocessing.get_context("forkserver")
    shared = (name for known, names in _IF_PARENT_HAS.items() if known in sys.modules for name in names)
    forkserver.set_forkserver_preload(list(dict.fromkeys((*_ALWAYS, *shared, *preload))))
    # Started here, and not at the first process, which would start it in this process's group.
    try:
        with hidden_main(), _own_session():
            multiprocessing.forkserver.ensure_running()
    except ChildProcessError:  # it is a child of the process of which this one is a fork
        raise RuntimeError(
            "RankPool: this process is a fork of one that has started ranks, and cannot start its own; start it by "
            "multiprocessing.get_context('spawn')"
        ) from None
    return forkserver


@contextmanager
def hidden_main() -> Iterator[None]:
    """Give multiprocessing an empty ``__main__``, so that no rank runs the user's script again.

    Functions travel by cloudpickle and need no ``__main__`` on the other side: a script works without a guard.
    """
    # Of two threads that start ranks at once, the second would take the first one's empty module for the user's.
    with _MAIN_IS_HIDDEN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextmanager
def _own_session() -> Iterator[None]:
    # Multiprocessing has no public way to say in which session its helpers run.
    util.spawnv_passfds = _spawn
    try:
        yield
    finally:
        util.spawnv_passfds = _SPAWN_IN_THIS_SESSION


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    process = subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True)
    process.returncode = 0  # multiprocessing waits for it, and subprocess is not to
    return process.pid
