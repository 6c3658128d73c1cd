"""Ranks for a notebook: start once, call functions on all of them, get the results in rank order.

Only the first start in a process is slow (one ``import torch``, in the forkserver). Later starts take about a tenth of
a second, and a call on warm ranks a few milliseconds.
"""

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from shardlab.installed import num_cores
from shardlab.launch.answers_and_failures import Collector, Patience
from shardlab.launch.cell_bar import cell_bar
from shardlab.launch.messages import Payload, Task, pack, unpack
from shardlab.launch.placement import Placement, check_world_size, is_inside_rank, place, torchrun_env
from shardlab.launch.processes import RankProcesses
from shardlab.launch.rank_errors import RankError, RankHang
from shardlab.launch.torchrun import TorchrunRanks
from shardlab.launch.worker import StartOptions

T = TypeVar("T")

_START_LIMIT = "the ranks did not come up within start_s"
_CLOSED_MEANWHILE = "RankPool: it was closed during this call"
_STOP_GRACE_S = 2.0
_INTERRUPT_GRACE_S = 1.0  # ranks are gone within 2 s of Ctrl-C; meanwhile their `finally` clauses save what they hold
_FAILURE_GRACE_S = 0.3
_MOST_S = 1e9  # torch, C and Python each take less than infinity


class RankPool:
    """A group of ranks that stays warm between calls.

    Ranks start at the first ``run`` and end with ``close``, with the ``with`` block, or with this process, however that
    ends. After an error the ranks are ended and the next ``run`` starts fresh ones. Each rank draws random numbers of
    its own, unless the function seeds. Under ``torchrun`` the pool is the group that torchrun made, and ``run`` calls
    the function in this process; after an error there a further ``run`` is possible only if it has come on all ranks.

    Args:
        world_size: number of ranks.
        device: ``auto``, ``cpu`` or ``cuda`` (``placement.place``).
        timeout_s: a rank that waits in one collective for longer than this ends the run with ``RankHang``.
        limit_s: a ``run`` that takes longer than this ends with ``RankHang``, whatever the ranks do; None for no limit.
            Under torchrun this process then prints its stack and ends, and torchrun ends the others.
        notice_s: where nothing has been seen of any rank for so long (no output, no message, no collective), a notice
            on stderr says what each does and where, and again after twice the time; None for no notice. Under torchrun
            there is no parent that could look.
        threads_per_rank: torch threads in each rank; by default the cores of this machine divided among the ranks.
        preload: modules that all ranks will import, imported once instead (``torch._dynamo`` for every optimizer,
            ``pandas`` for records); counts for the first pool of a process only.
        start_s: ranks that have not come up so many seconds after their start end with ``RankHang``, which says what
            each does and where. Under torchrun ``timeout_s`` holds for that too.

    Raises:
        ValueError: a field has a value it cannot have; the message names it.
        RuntimeError: this process is itself a rank of a pool.
    """

    def __init__(
        self, world_size: int, *, device: str = "auto", timeout_s: float = 60.0, limit_s: float | None = None, notice_s:
        float | None = 30.0, threads_per_rank: int | None = None, preload: Sequence[str] = (), start_s: float = 300.0,
    ) -> None:  # fmt: skip
        check_world_size(world_size)
        if threads_per_rank is not None and (type(threads_per_rank) is not int or threads_per_rank < 1):
            raise ValueError(f"threads_per_rank: {threads_per_rank!r} is given; allowed values are integers from 1")
        if isinstance(preload, str):
            raise ValueError(f"preload: {preload!r} is given; give a list of modules, such as [{preload!r}]")
        _check_seconds(timeout_s=timeout_s, start_s=start_s, limit_s=limit_s, notice_s=notice_s)
        if is_inside_rank():
            raise RuntimeError("RankPool: ranks cannot start ranks; make the pool in the parent process")
        env = torchrun_env()
        self._torchrun = TorchrunRanks(env, world_size, device, timeout_s, limit_s) if env else None
        self._placement = None if self._torchrun else place(world_size, device)
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._patience = Patience(timeout_s, limit_s, notice_s)
        self._start_s = start_s
        self._options = StartOptions(
            placement=self.placement,
            # Longer than our own timeout, whose report covers all ranks. It ends waits that the board cannot see.
            group_timeout_s=max(timeout_s + 2.0, 10.0),
            num_threads=threads_per_rank or max(1, num_cores() // world_size),
            preload=preload,
        )
        self._processes: RankProcesses | None = None
        self._ender: weakref.finalize[[], RankPool] | None = None
        self._is_closed = False
        self._calls: list[object] = []  # under way, the first one first
        self._is_running = False
        self._interrupted = threading.Event()
        self._is_announced = False

    def run(
        self, fn: Callable[..., T], /, *args: object, on_message: Callable[[int, object], None] | None = None,
        **kwargs: object,
    ) -> list[T]:  # fmt: skip
        """Call ``fn(rank, *args, **kwargs)`` on every rank, inside the initialised process group.

        ``fn`` may be defined in a cell, be a lambda or a closure. What ranks print appears while they run, each line
        behind ``[rank r]``. Ranks have this process's folder and default dtype. CUDA tensors are sent and returned as
        CPU tensors.

        Args:
            fn: the function.
            args: its arguments after the rank.
            on_message: called here with (rank, message) for each ``current().emit(message)`` of a rank.
            kwargs: its keyword arguments.

        Returns:
            The results in rank order.

        Raises:
            RankError: ``fn`` raised; the first rank that did, with its traceback and the exception as ``__cause__``.
            RankDied: a rank's process is gone.
            RankHang: a rank waited in a collective for longer than ``timeout_s``, or all of it took longer than
                ``limit_s``.
            RuntimeError: the pool is closed, before or during the call, or another call of it runs.
            TypeError: ``fn`` or an argument cannot be pickled.
        """

        def call() -> list[T]:
            if self._torchrun is not None:
                self._start()
                return self._torchrun.run(fn, args, kwargs, on_message)
            # Before the ranks start: what cannot be pickled is told at once.
            packed = pack((fn, args, kwargs), "the function or one of its arguments")
            self._start()
            return [unpack(payload) for payload in self._attempt(Task(packed), on_message)]

        return self._alone(call)

    def start(self) -> None:
        """Start the ranks and wait until their group is up; does nothing if they are."""
        self._alone(self._start)

    def interrupt(self) -> None:
        """Interrupt a ``run`` in another thread, as Ctrl-C does in this one: it raises KeyboardInterrupt there.

        Does nothing while no function runs, and nothing under torchrun, where the other processes cannot be reached.
        """
        if self._is_running:
            self._interrupted.set()

    def restart(self) -> None:
        """End the ranks; the next ``run`` starts fresh ones."""
        self._alone(lambda: self._end_processes(_STOP_GRACE_S, politely=True))

    def close(self) -> None:
        """End the ranks for good, also while they run a function. Closing twice is harmless."""
        self._is_closed = True
        self._end_processes(_STOP_GRACE_S, politely=True)

    @property
    def placement(self) -> Placement:
        """Which device each rank has and what sends between them; under torchrun on GPUs exact after the start."""
        return self._torchrun.placement if self._placement is None else self._placement  # type: ignore[union-attr]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order; empty while no ranks run, and under torchrun."""
        ranks = self._processes.ranks if self._processes is not None else []
        return tuple(rank.process.pid or 0 for rank in ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "warm" if self._processes is not None else "not started"
        return f"RankPool({self.world_size} ranks on {', '.join(dict.fromkeys(self.placement.devices))}, {state})"

    def _start(self) -> None:
        if self._torchrun is not None:
            self._torchrun.start()
        if not self._is_announced and self.placement.banner is not None:
            sys.stdout.write(f"{self.placement.banner}\n")
        self._is_announced = True
        if self._torchrun is not None or (self._processes is not None and self._processes.is_alive):
            return
        self._end_processes(0.0)  # one that died between two calls
        with cell_bar(f"starting {self.world_size} ranks"):
            self._processes = RankProcesses(self._options)
            # Not a bound method of the pool, which would keep the pool alive. Registered with atexit as well, because
            # that runs before multiprocessing's own exit function, which would wait for the ranks for ever.
            self._ender = weakref.finalize(self, self._processes.end)
            atexit.register(self._ender)
            self._attempt(None, None)

    def _attempt(self, task: Task | None, on_message: Callable[[int, object], None] | None) -> list[Payload]:
        """Send ``task`` and collect the answers; None collects those of a start. If ranks fail, all are ended."""
        processes = self._processes
        # Before it counts as running: an interrupt that comes after that must not be lost.
        self._interrupted.clear()
        self._is_running = True
        try:
            if self._is_closed:  # by another thread, since this call began
                raise RuntimeError(_CLOSED_MEANWHILE)
            assert processes is not None
            if task is None:
                start = Patience(limit_s=self._start_s, notice_s=self._patience.notice_s, limit=_START_LIMIT)
                return Collector(processes, start, None, self._interrupted).collect()
            processes.send(task)
            return Collector(processes, self._patience, on_message, self._interrupted).collect()
        except Exception as error:
            self._end_processes(_FAILURE_GRACE_S)
            if self._is_closed:  # ranks that another thread has ended did not fail
                raise RuntimeError(_CLOSED_MEANWHILE) from None
            if isinstance(error, RankError | RankHang):
                # The frames of the collector say nothing to the reader of a notebook, and would fill a screen.
                raise error.with_traceback(None) from error.__cause__
            raise
        except BaseException:
            self._end_processes(_INTERRUPT_GRACE_S)
            raise
        finally:
            self._is_running = False

    def _end_processes(self, grace_s: float, *, politely: bool = False) -> None:
        # Forgotten first: if ending them is interrupted, the next run still starts fresh ones.
        processes, self._processes = self._processes, None
        if processes is None:
            return
        if politely:
            processes.stop(grace_s)
        else:
            processes.end(grace_s)
        # Unregister only now: until the ranks have ended, the exit of this process must still end them.
        if self._ender is not None:
            atexit.unregister(self._ender)
            self._ender.detach()

    def _alone(self, call: Callable[[], T]) -> T:
        """Refuse a second call meanwhile, be it of another thread or of ``on_message``: it would take our answers."""
        if self._is_closed:
            raise RuntimeError("RankPool: it is closed; make a new one")
        own = object()
        try:
            # No lock: an interrupt may come between its being taken and our knowing, and it would stay taken.
            self._calls.append(own)
            if self._calls[0] is not own:
                raise RuntimeError("RankPool: it is running a function; run one at a time, or use a second pool")
            return call()
        finally:
            if own in self._calls:
                self._calls.remove(own)


def launch(
    fn: Callable[..., T], /, world_size: int, *args: object, device: str = "auto", timeout_s: float = 60.0,
    limit_s: float | None = None, **kwargs: object,
) -> list[T]:  # fmt: skip
    """Call ``fn(rank, *args, **kwargs)`` on ``world_size`` fresh ranks, once; the results in rank order.

    The one-shot form of ``RankPool``: the same arguments, output and errors.
    """
    with RankPool(world_size, device=device, timeout_s=timeout_s, limit_s=limit_s) as pool:
        return pool.run(fn, *args, **kwargs)  # type: ignore[arg-type]


def _check_seconds(**fields: float | None) -> None:
    for name, value in fields.items():
        if value is None and name in ("limit_s", "notice_s"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MOST_S:
            raise ValueError(f"{name}: {value!r} is given; allowed values are seconds above 0 and below 1e9")


def check_pool(pool: RankPool, ranks: int, device: str, *, by: str = "config") -> None:
    """Check that a configuration asks for the ranks that a pool has.

    Args:
        pool: the ranks.
        ranks: the number that is asked for.
        device: ``auto``, which these ranks are, ``cpu`` or ``cuda``.
        by: the configuration, for the message.

    Raises:
        ValueError: it asks for others.
    """
    if pool.world_size != ranks:
        raise ValueError(f"pool: {pool.world_size} ranks, but {by}.ranks is {ranks}")
    own = pool.placement.device_type
    if device not in ("auto", own):
        raise ValueError(f"pool: its ranks are on {own}, but {by}.device is {device!r}; leave device out")
