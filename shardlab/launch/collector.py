"""Waits until every rank has answered, or finds out why one never will, all in the caller's thread."""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from threading import Event
from time import monotonic, perf_counter_ns

from shardlab.comm.transports.shared_buffers import MismatchError
from shardlab.launch.board import BoardRow, CallState, describe, mismatch
from shardlab.launch.errors import RankDied, RankError, RankHang, describe_exit
from shardlab.launch.messages import Answer, Failure, Note, Payload, unpack
from shardlab.launch.processes import RankProcess, RankProcesses

_LOOK_EVERY_S = 0.1
_GRACE_S = 0.3
_CAUSE_GRACE_S = 1.0
# What gloo and NCCL say in the ranks that are left when one has gone: the effect of a failure, not the failure.
_AFTERMATH = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
    "failed to recv",
)


@dataclass(frozen=True)
class Death:
    """A process that ended without an answer; ``time_ns`` is when the parent saw it."""

    rank: int
    time_ns: int
    exit_code: int | None


class Collector:
    """One answer from every rank, once.

    Args:
        processes: the ranks that were given a task.
        timeout_s: how long a rank may wait in one collective; None never looks.
        on_message: called with (rank, message) for what ranks emit.
        interrupted: set from another thread to interrupt this one.
    """

    def __init__(
        self,
        processes: RankProcesses,
        timeout_s: float | None = None,
        on_message: Callable[[int, object], None] | None = None,
        interrupted: Event | None = None,
    ) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
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
            RankHang: a rank has waited in a collective for longer than the timeout.
            KeyboardInterrupt: ``interrupted`` was set.
        """
        while len(self._answers) < len(self._processes.ranks):
            self._wait_once()
            if self._interrupted is not None and self._interrupted.is_set():
                raise KeyboardInterrupt
            if self._failures or self._deaths:
                self._wait_for_others()
                raise self._first_failure()
            self._look_at_board()
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
        except (EOFError, OSError):
            self._closed.add(rank.rank)  # the sentinel will tell with what exit code
            return
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
            # With nothing but broken connections the rank that broke them is about to be reported dead.
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
        error = RankError(first.rank, first.exception_type, first.summary, first.traceback_text, difference)
        error.__cause__ = _original(first)
        return error

    def _look_at_board(self) -> None:
        if self._timeout_s is None or monotonic() < self._next_look:
            return
        self._next_look = monotonic() + _LOOK_EVERY_S
        rows = self._processes.board.read()
        now_ns = perf_counter_ns()
        waiting = [row for row in rows if row.rank not in self._answers and row.state is CallState.ISSUED]
        if any(row.waited_s(now_ns) > self._timeout_s for row in waiting):
            self._finish_output()
            raise self._hang(rows, waiting)

    def _hang(self, rows: list[BoardRow], waiting: list[BoardRow]) -> RankHang:
        assert self._timeout_s is not None
        places = "; ".join(f"rank {row.rank} in {row.call} at {row.source_line or '?'}" for row in waiting)
        summary = f"ranks waited in a collective for more than timeout_s={self._timeout_s:g} s: {places}"
        absent = [row for row in rows if row not in waiting]
        if absent:
            summary += ". Not in it: " + ", ".join(f"rank {row.rank} ({self._process(row.rank)})" for row in absent)
        if difference := mismatch(rows):
            summary += f". {difference}"
        return RankHang(summary, tuple(row.rank for row in waiting), self._table(rows))

    def _table(self, rows: list[BoardRow]) -> str:
        return describe(rows, [self._process(row.rank) for row in rows])

    def _process(self, rank: int) -> str:
        if rank in self._deaths:
            return f"dead: {describe_exit(self._deaths[rank].exit_code).partition(' (')[0]}"
        if rank in self._failures:
            return f"raised {self._failures[rank].exception_type}"
        return "returned" if rank in self._answers else "running"

    def _finish_output(self) -> None:
        for rank in self._processes.ranks:
            rank.output.finish()


def _is_aftermath(failure: Failure | Death) -> bool:
    return isinstance(failure, Failure) and any(words in failure.traceback_text for words in _AFTERMATH)


def _original(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        original = unpack(failure.exception)
    except Exception:  # its class may not be importable here; the traceback text says it all anyway
        return None
    return original if isinstance(original, BaseException) else None
