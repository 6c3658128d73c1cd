"""The main function of a rank: isolate the process, join the group, then call the functions the parent sends.

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
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread, main_thread
from time import perf_counter_ns, sleep
from types import FrameType
from typing import ClassVar

import torch
import torch.distributed as dist

from shardlab.comm import become_rank, end_retired, leave_group
from shardlab.launch.hang_board import BoardWriter
from shardlab.launch.messages import Answer, Failure, Note, Payload, Stop, Task, pack, unpack
from shardlab.launch.placement import Placement, RankContext, enter, make_group
from shardlab.launch.rank_errors import texts_of
from shardlab.launch.stack import StackWatch, answer_with_stack, failed_call

_LOOK_EVERY_S = 0.2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = 2**31 - 1
_LARGEST = 32 * 1024**2  # glibc takes no more: a larger block comes from the kernel each time
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class StartOptions:
    """How to start ranks.

    Attributes:
        group_timeout_s: after this torch gives up a collective by itself.
        num_threads: torch threads in each rank.
        preload: modules for the forkserver beside torch.
    """

    placement: Placement
    group_timeout_s: float
    num_threads: int
    preload: Sequence[str] = ()


@dataclass(frozen=True)
class RankConfig:
    """All that a rank needs to start.

    Attributes:
        directory: the pool's own; holds the board and the store through which the ranks find each other.
        environ: the parent's environment as it is now; the forkserver has it as it was when that began.
        control: tasks in, answers out.
        output: what the rank prints.
        life: closes when the parent is gone.
    """

    rank: int
    options: StartOptions
    directory: Path
    environ: dict[str, str]
    control: Connection
    output: Connection
    life: Connection


class _EndedByParent(BaseException):
    """SIGTERM as an exception, so that ``with`` blocks and ``finally`` clauses can save what they hold.

    Attributes:
        asked: whether SIGTERM has come; Python drops an exception that is raised in a finalizer.
    """

    asked: ClassVar[bool] = False


class _Control:
    """The rank's end of the control pipe; ``emit`` may be called from any thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = Lock()
        self._pid = os.getpid()

    def receive(self) -> object:
        return self._pipe.recv()

    def send(self, message: Answer | Note | Failure) -> None:
        with self._lock:
            self._pipe.send(message)

    def emit(self, message: object) -> None:
        if os.getpid() != self._pid:  # whose messages would come between the parts of the rank's
            raise RuntimeError("emit: this process is a child of a rank; emit in the rank what the child returns to it")
        self.send(Note(pack(message, "the message")))


def main(config: RankConfig) -> None:
    """Entry point of a rank's process."""
    _isolate(config.output, config.life, config.environ)
    _reseed()
    # Only after _isolate(): before it, the exception would print a traceback into the parent's terminal.
    signal.signal(signal.SIGTERM, _end_now)
    sys.unraisablehook = _tell_ignored
    control = _Control(config.control)
    board = BoardWriter(config.directory / "board", config.rank)
    answer_with_stack(config.directory, config.rank)
    # Before the group is joined, which can take long: the parent may go meanwhile, and a hang there must be seen.
    Thread(target=_watch, args=(config.life, board), daemon=True, name="shardlab-watch").start()
    try:
        _join_group(config, board, control)
        control.send(Answer(pack(None, "nothing")))
        _serve(config.rank, board, control)
    except (_EndedByParent, EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent ends this rank, or has gone
    except Exception as error:
        control.send(_failure(config.rank, error))
    finally:
        signal.signal(signal.SIGTERM, _end_soon)  # it ends anyway, and an exception would only be printed
        leave_group()


def _reseed() -> None:
    """Give this rank random numbers of its own, as a fresh process has.

    All ranks are forked from one process, whose generators they inherit in the same state: the default ones of torch
    and NumPy would give every rank of every pool the same numbers. Python reseeds its own at each fork.
    """
    torch.seed()  # CUDA's generators too, once CUDA begins
    if (numpy_random := sys.modules.get("numpy.random")) is not None:  # one that is imported later seeds itself
        numpy_random.seed()


def _end_now(signum: int, frame: FrameType | None) -> None:
    _end_soon(signum, frame)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a data loader's handler takes the end of its workers for an error
    raise _EndedByParent


def _end_soon(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    _EndedByParent.asked = True


def _tell_ignored(ignored: "sys.UnraisableHookArgs") -> None:
    if ignored.exc_type is not _EndedByParent:  # that of a signal in a finalizer is no fault of anybody's
        sys.__unraisablehook__(ignored)


def _watch(life: Connection, board: BoardWriter) -> None:
    stack, forkserver_pid = StackWatch(main_thread().ident or 0), os.getppid()
    while not life.poll(_LOOK_EVERY_S) and os.getppid() == forkserver_pid:
        # What is on the board waits for itself: no stack is walked of a thread that may go on meanwhile.
        board.seen(None if board.has_in_flight else stack.look())
    _cut()


def _watch_streams(device: torch.device, board: BoardWriter) -> None:
    """Run apart from ``_watch``, which must see the parent end even if a query to a hung device never returns."""
    torch.cuda.set_device(device)  # a new thread is on device 0, and would take memory there
    while True:
        sleep(_LOOK_EVERY_S)
        board.look_at_streams()


def _join_group(config: RankConfig, board: BoardWriter, control: _Control) -> None:
    torch.set_num_threads(config.options.num_threads)
    placement = config.options.placement
    device = torch.device(placement.devices[config.rank])
    if sys.platform.startswith("linux"):
        # Without it gloo looks up the host's name, which on many laptops and containers fails or takes seconds.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        Thread(target=_watch_streams, args=(device, board), daemon=True, name="shardlab-streams").start()
    context = RankContext(config.rank, placement.world_size, device, placement, board, control.emit)
    timeout = timedelta(seconds=config.options.group_timeout_s)
    become_rank(device, timeout, board)
    enter(context)
    store = dist.FileStore(str(config.directory / "store"), placement.world_size)  # type: ignore[attr-defined]
    make_group(context, store, timeout)


def _serve(rank: int, board: BoardWriter, control: _Control) -> None:
    gc.freeze()  # imported objects stay: searching them would take a tenth of a second after each call
    while not _EndedByParent.asked and not isinstance(task := control.receive(), Stop):
        assert isinstance(task, Task)
        end_retired()  # every rank has answered, so none still uses what the last call has dropped
        board.clear()  # before the call: the parent must not see a collective of the last one
        reply = _answer(rank, task, board)
        _flush_output()  # before the answer goes: the parent prints all that came before it
        control.send(reply)
        del task, reply  # they hold the call's arguments and results, which would live until the next call
        _look_for_cycles()
        # After the cycles: only then is all that the call held free to be returned. On a GPU too: ranks may share it,
        # and what one strategy has reserved is not to be in the figures of the next.
        _give_back()
        torch.cuda.empty_cache()


def _look_for_cycles() -> None:
    """Free the cycles that a call has left.

    Module, hooks, engine and mesh are a cycle. Python itself collects old objects so rarely that engines of earlier
    calls would stay, with their memory and their groups' threads.
    """
    signal.signal(signal.SIGTERM, _end_soon)  # finalizers run here, and Python would drop the exception in them
    gc.collect()
    signal.signal(signal.SIGTERM, _end_now)


def _answer(rank: int, task: Task, board: BoardWriter) -> Answer | Failure:
    # Before the call is unpacked, which may import what only the parent's path finds.
    sys.path[:] = task.sys_path
    try:
        torch.set_default_dtype(task.default_dtype)
        os.chdir(task.folder)  # a relative path means the same here as where it was written
        return Answer(_call(rank, task.call))
    except _EndedByParent:
        raise
    except BaseException as error:  # sys.exit() in a rank is an answer too: the caller must hear of it
        board.failed(failed_call(error.__traceback__))
        return _failure(rank, error)


def _call(rank: int, call: Payload) -> Payload:
    fn, args, kwargs = unpack(call)
    pid = os.getpid()
    try:
        result = fn(rank, *args, **kwargs)
    finally:
        if os.getpid() != pid:  # a child that os.fork has made in the call: the rank answers, and takes the next one
            if (error := sys.exception()) is not None:
                traceback.print_exception(error)
            _flush_output()
            os._exit(error is not None)
    return pack(result, f"the result of rank {rank}")


def _failure(rank: int, error: BaseException) -> Failure:
    # First: the parent orders failures by it, and all that follows takes time.
    time_ns = perf_counter_ns()
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # this file's own frames say nothing to the reader
    message = str(traceback.TracebackException(type(error), error, None))  # also where __str__ raises
    first_line = message.lstrip().partition("\n")[0]
    return Failure(rank, time_ns, type(error).__name__, first_line, texts_of(error, trace), _portable(error))


def _portable(error: BaseException) -> Payload | None:
    """The exception, if it survives pickling: many cannot be built again from their ``args``."""
    try:
        payload = pack(error, "the exception")
        same = str(unpack(payload)) == str(error)  # not where __init__ makes another message of the message
    except Exception:
        return None
    return payload if same else None


def _isolate(output: Connection, life: Connection, environ: Mapping[str, str]) -> None:
    """Give this process its own session, its own output and the parent's environment.

    With its own session Ctrl-C reaches only the parent, which then ends the ranks.

    Args:
        output: what this process prints from now on; closed here.
        life: closes when the parent is gone, and this process ends with it.
        environ: the environment from now on.
    """
    os.setsid()
    end_with(life)  # after setsid: the signal goes to the process group that this process then leads
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
    _keep_freed()


def end_with(life: Connection) -> None:
    """Tie this process, the leader of its process group, to the parent that holds the other end of ``life``.

    On Linux the kernel ends the group when the parent's end closes; elsewhere nothing does.
    """
    if not sys.platform.startswith("linux"):
        return
    fd = life.fileno()
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    # Set O_ASYNC last: from here on the signal may arrive, and it must already be SIGKILL to the whole group.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if life.poll():  # the parent went before any of this was in place
        _cut()


def _let_children_be_forked() -> None:
    """Have this rank's children, such as workers of a data loader, be forks, as in a plain process on Linux.

    By default they would start as the rank itself has, in a new interpreter. That lacks what a cell has defined and
    needs seconds for its imports, and its semaphores have names, which stay in /dev/shm when the rank is killed.
    """
    if sys.platform.startswith("linux"):
        multiprocessing.set_start_method("fork", force=True)
    # A rank saves what it holds when SIGTERM comes; its children end at once, as those of a plain process.
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


def _cut() -> None:
    """End this process and every process it started, at once."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _keep_freed() -> None:
    """Have glibc keep freed memory from now on, unless the user's environment sets its thresholds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name in os.environ for name in _SET_BY_USER):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def _give_back() -> None:
    """Return free memory to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _flush_output() -> None:
    """Write out all that this process has printed, also from C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # the function has put None there, or has closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code printed sits in the C library's own buffer
