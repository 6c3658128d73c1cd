"""The main function of a rank: isolate the process, join the group, then call the functions the parent sends."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread, main_thread
from time import perf_counter_ns, sleep
from types import FrameType
from typing import ClassVar

import torch
import torch.distributed as dist

from shardlab.comm import become_rank, end_retired, leave_group
from shardlab.launch import isolation
from shardlab.launch.errors import texts_of
from shardlab.launch.hang_board import BoardWriter
from shardlab.launch.messages import Answer, Failure, Note, Payload, Stop, Task, pack, unpack
from shardlab.launch.placement import Placement, RankContext, enter, make_group
from shardlab.launch.stack import StackWatch, answer_with_stack, failed_call

_LOOK_EVERY_S = 0.2


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
    isolation.isolate(config.output, config.life, config.environ)
    _reseed()
    # Only after isolate(): before it, the exception would print a traceback into the parent's terminal.
    signal.signal(signal.SIGTERM, _end_now)
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


def _watch(life: Connection, board: BoardWriter) -> None:
    stack, forkserver_pid = StackWatch(main_thread().ident or 0), os.getppid()
    while not life.poll(_LOOK_EVERY_S) and os.getppid() == forkserver_pid:
        board.seen(stack.look())
    isolation.cut()


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
        isolation.flush_output()  # before the answer goes: the parent prints all that came before it
        control.send(reply)
        del task, reply  # they hold the call's arguments and results, which would live until the next call
        _look_for_cycles()
        # After the cycles: only then is all that the call held free to be returned. On a GPU too: ranks may share it,
        # and what one strategy has reserved is not to be in the figures of the next.
        isolation.give_back()
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
            isolation.flush_output()
            os._exit(error is not None)
    return pack(result, f"the result of rank {rank}")


def _failure(rank: int, error: BaseException) -> Failure:
    # First: the parent orders failures by it, and all that follows takes time.
    time_ns = perf_counter_ns()
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # this file's own frames say nothing to the reader
    first_line = str(error).partition("\n")[0]
    return Failure(rank, time_ns, type(error).__name__, first_line, texts_of(error, trace), _portable(error))


def _portable(error: BaseException) -> Payload | None:
    """The exception, if it survives pickling: many cannot be built again from their ``args``."""
    try:
        payload = pack(error, "the exception")
        unpack(payload)
    except Exception:
        return None
    return payload
