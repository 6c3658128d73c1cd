"""Errors of collectives that no caller has been told of."""

from threading import Lock
from time import perf_counter_ns

from shardlab.comm.events import CollectiveEvent


class Failures:
    """The first error on the axes of a mesh that no caller has been told of, for ``close()`` to raise.

    One error is told and not many: what was issued before it mostly failed for the same reason.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._untold: BaseException | None = None
        self._told_ns = 0

    def note(self, event: CollectiveEvent, error: BaseException) -> None:
        """A collective has failed."""
        with self._lock:
            if self._untold is None and event.issue_ns > self._told_ns:
                self._untold = error

    def tell(self, event: CollectiveEvent) -> None:
        """A caller is told now why ``event`` failed; if it was issued before the last time, that is nothing new."""
        with self._lock:
            if event.issue_ns > self._told_ns:
                self._untold, self._told_ns = None, perf_counter_ns()

    def take_untold(self) -> BaseException | None:
        """The error for a caller who is told of it now; None, which tells nobody anything, if there is none."""
        with self._lock:
            untold, self._untold = self._untold, None
            if untold is not None:
                self._told_ns = perf_counter_ns()
        return untold
