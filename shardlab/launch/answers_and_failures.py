"""Waits until every rank has answered, or finds out why one never will, all in the caller's thread."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from threading import Event
from time import monotonic, perf_counter_ns

from shardlab.comm.transports.base import MismatchError
from shardlab.launch.hang_board import BoardRow, CallState, describe, mismatch
from shardlab.launch.messages import Answer, Failure, Note, Payload, unpack
from shardlab.launch.processes import RankProcess, RankProcesses
from shardlab.launch.rank_errors import RankDied, RankError, RankHang, describe_exit
from shardlab.launch.stack import is_stopped, stack_of, state_of
from shardlab.vocabulary import TOLD

_LOOK_EVERY_S = 0.1
_GRACE_S = 0.3
_CAUSE_GRACE_S = 1.0
# What gloo, NCCL and engines report on the other ranks when one rank fails: an effect of the failure, not its cause.
_AFTERMATH = (
    TOLD, "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "remote process exited or there was a network error", "NCCL communicator was aborted", "failed to recv",
)  # fmt: skip


@dataclass(frozen=True)
class Death:
    """A process that ended without an answer; ``time_ns`` is when the parent saw it."""

    rank: int
    time_ns: int
    exit_code: int | None


@dataclass(frozen=True)
class Patience:
    """How long to wait for ranks, in seconds; None for no limit.

    Attributes:
        timeout_s: longest wait of a rank in one collective.
        limit_s: longest time until all ranks have answered.
        notice_s: silence after which a notice says what each rank does.
        limit: how the error message begins when ``limit_s`` is exceeded.
    """

    timeout_s: float | None = None
    limit_s: float | None = None
    notice_s: float | None = None
    limit: str = "the run took longer than limit_s"


class Collector:
    """One answer from every rank, once.

    Args:
        processes: the ranks that were given a task.
        patience: how long to wait for them.
        on_message: called with (rank, message) for what ranks emit.
        interrupted: set from another thread to interrupt this one.
    """

    def __init__(
        self, processes: RankProcesses, patience: Patience, on_message: Callable[[int, object], None] | None = None,
        interrupted: Event | None = None,
    ) -> None:  # fmt: skip
        self._processes = processes
        self._patience = patience
        self._began = monotonic()
        self._heard: object = None  # in the last look, and since when
        self._heard_at, self._next_notice_s = monotonic(), patience.notice_s
        self._num_messages = 0
        self._on_message = on_message
        self._interrupted = interrupted
        self._answers: dict[int, Payload] = {}
        self._failures: dict[int, Failure] = {}
        self._deaths: dict[int, Death] = {}
        self._closed: set[int] = set()
        self._next_look = monotonic() + _LOOK_EVERY_S

    def collect(self) -> list[Payload]:
        """The answers in rank order.

        Raises:
            RankError: a rank's function raised; the first one that did.
            RankDied: a rank's process is gone.
            RankHang: a rank has waited in a collective for longer than the timeout, or all took longer than the limit.
            KeyboardInterrupt: ``interrupted`` was set.
        """
        while len(self._answers) < len(self._processes.ranks):
            self._wait_once()
            if self._interrupted is not None and self._interrupted.is_set():
                raise KeyboardInterrupt
            if self._failures or self._deaths:
                self._wait_for_others()
                raise self._first_failure()
            if monotonic() >= self._next_look:
                self._next_look = monotonic() + _LOOK_EVERY_S
                self._look()
        # A rank flushes its output before it answers, so all of it is in the pipes now.
        self._finish_output()
        return [self._answers[rank.rank] for rank in self._processes.ranks]

    def _wait_once(self) -> None:
        outputs = [rank.output.fileno() for rank in self._processes.ranks if rank.output.is_open]
        controls = [rank.control for rank in self._processes.ranks if rank.rank not in self._closed]
        sentinels = [rank.process.sentinel for rank in self._processes.ranks if rank.rank not in self._deaths]
        ready = wait([*outputs, *controls, *sentinels], _LOOK_EVERY_S)
        for rank in self._processes.ranks:
            rank.output.pump()  # first: what a rank printed before its answer comes before its answer
            # Answers before deaths: a rank may answer and then end.
            if rank.control in ready:
                self._receive(rank)
            if rank.process.sentinel in ready:
                self._record_death(rank)

    def _receive(self, rank: RankProcess) -> None:
        try:
            message = rank.control.recv()
        except TimeoutError:
            raise  # an OSError too, but no pipe's: a signal handler of the user raised it
        except (EOFError, OSError):
            self._closed.add(rank.rank)  # the sentinel will tell with what exit code
            return
        self._num_messages += 1
        match message:
            case Note():
                if self._on_message is not None:
                    self._on_message(rank.rank, unpack(message.message))
            case Failure():
                self._failures[rank.rank] = message
            case Answer():
                self._answers[rank.rank] = message.result

    def _record_death(self, rank: RankProcess) -> None:
        # First all that it sent before it ended, among which may be its answer or the exception that ended it.
        while rank.rank not in self._closed and rank.control.poll(0):
            self._receive(rank)
        rank.output.finish()
        self._deaths[rank.rank] = Death(rank.rank, perf_counter_ns(), rank.process.exitcode)

    def _wait_for_others(self) -> None:
        """Give the other ranks time to report: the failure that is seen first need not have happened first."""
        start = monotonic()
        while len(self._answers.keys() | self._failures.keys() | self._deaths.keys()) < len(self._processes.ranks) or (
            self._only_aftermath()
        ):
            # If every failure is a broken connection, wait longer: the death of the rank that broke them comes next.
            if monotonic() - start > (_CAUSE_GRACE_S if self._only_aftermath() else _GRACE_S):
                break
            self._wait_once()
        self._finish_output()

    def _only_aftermath(self) -> bool:
        return not self._deaths and all(_is_aftermath(failure) for failure in self._failures.values())

    def _first_failure(self) -> RankError:
        failures: list[Failure | Death] = [*self._failures.values(), *self._deaths.values()]
        first = min(failures, key=lambda failure: (_is_aftermath(failure), failure.time_ns))
        if isinstance(first, Death):
            rows = self._processes.board.read()
            return RankDied(first.rank, first.exit_code, self._table(rows), mismatch(rows))
        differ = first.exception_type == MismatchError.__name__
        difference = mismatch(self._processes.board.read()) if differ else ""
        error = RankError(first, difference)
        error.__cause__ = _original(first)
        return error

    def _look(self) -> None:
        rows = self._processes.board.read()
        in_one = [row for row in rows if row.rank not in self._answers and row.state is CallState.ISSUED]
        now_ns, timeout_s, limit_s = perf_counter_ns(), self._patience.timeout_s, self._patience.limit_s
        if timeout_s is not None and any(row.waited_s(now_ns) > timeout_s for row in in_one):
            # First: what the ranks have printed then stands above the error.
            self._finish_output()
            raise self._hang(rows, in_one)
        if limit_s is not None and monotonic() - self._began > limit_s:
            self._finish_output()
            waiting = tuple(row.rank for row in in_one)
            summary = f"{self._patience.limit}={limit_s:g} s\n{self._places()}"
            raise RankHang(summary, waiting, self._table(rows))
        heard = (rows, self._num_messages, [rank.output.num_bytes for rank in self._processes.ranks])
        if heard != self._heard:
            self._heard, self._heard_at, self._next_notice_s = heard, monotonic(), self._patience.notice_s
        silent_s = monotonic() - self._heard_at
        if self._next_notice_s is not None and silent_s >= self._next_notice_s:
            self._next_notice_s *= 2
            sys.stderr.write(
                f"shardlab: for {silent_s:.0f} s no rank has printed, sent a message, or begun or ended a collective:\n"
                f"{self._places()}\n"
            )

    def _hang(self, rows: list[BoardRow], in_one: list[BoardRow]) -> RankHang:
        # A stopped rank may have a collective in flight, but it is not waiting: the others wait for it.
        waiting = [row for row in in_one if not is_stopped(self._pid(row.rank))]
        places = "; ".join(f"rank {row.rank} in {row.call} at {row.source_line or '?'}" for row in waiting)
        summary = (
            f"ranks waited in a collective for more than timeout_s={self._patience.timeout_s:g} s: {places or '-'}"
        )
        met = waiting or in_one
        absent = [row for row in rows if row not in waiting and any(one.may_meet(row.rank) for one in met)]
        if absent:
            summary += ". Not in it: " + ", ".join(f"rank {row.rank} ({self._process(row.rank)})" for row in absent)
        if difference := mismatch(rows):
            summary += f". {difference}"
        running = [row.rank for row in absent if row.rank not in self._answers]
        where = f"\n{self._places(running)}" if running else ""
        return RankHang(summary + where, tuple(row.rank for row in waiting), self._table(rows))

    def _places(self, ranks: Sequence[int] | None = None) -> str:
        """What each rank does, and where, in lines."""
        lines = []
        for rank in range(len(self._processes.ranks)) if ranks is None else ranks:
            is_running = self._process(rank) == "running"
            lines.append(f"  rank {rank}: {state_of(self._pid(rank)) if is_running else self._process(rank)}")
            frames = stack_of(self._processes.directory, rank, self._pid(rank)) if is_running else []
            lines += [f"    {'at' if number == 0 else 'by'} {frame}" for number, frame in enumerate(frames)]
        return "\n".join(lines)

    def _pid(self, rank: int) -> int | None:
        return self._processes.ranks[rank].process.pid

    def _table(self, rows: list[BoardRow]) -> str:
        return describe(rows, [self._process(row.rank) for row in rows])

    def _process(self, rank: int) -> str:
        if rank in self._deaths:
            return f"dead: {describe_exit(self._deaths[rank].exit_code).partition(' (')[0]}"
        if rank in self._failures:
            return f"raised {self._failures[rank].exception_type}"
        if rank in self._answers:
            return "returned"
        return state_of(self._pid(rank)) if is_stopped(self._pid(rank)) else "running"

    def _finish_output(self) -> None:
        for rank in self._processes.ranks:
            rank.output.finish()


def _is_aftermath(failure: Failure | Death) -> bool:
    return isinstance(failure, Failure) and any(words in failure.texts.whole for words in _AFTERMATH)


def _original(failure: Failure) -> BaseException | None:
    try:
        return None if failure.exception is None else unpack(failure.exception)
    except Exception:  # its class may not be importable here; the traceback text says it all anyway
        return None
