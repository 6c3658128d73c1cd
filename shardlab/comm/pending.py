"""A collective under way: the caller holds it, waits for it once or many times, and its buffers live as long."""

from collections.abc import Callable
from time import perf_counter_ns

from torch import Tensor

from shardlab.comm.events import CollectiveEvent, Observer


class Pending:
    """What every verb of the communicator returns.

    ``wait()`` returns when the result may be used: on CPU the data is there; on CUDA the current stream waits for it
    and the host goes on. It raises what the collective raised. It may be called again.
    """

    def __init__(
        self,
        finish: Callable[[], None] | None = None,
        *,
        keep: tuple[Tensor, ...] = (),
        event: CollectiveEvent | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self._finish = finish
        self._keep = keep  # a buffer freed in flight would be written into after its reuse
        self._event = event
        self._observers = observers

    @property
    def waited(self) -> bool:
        """Whether ``wait()`` has returned before."""
        return self._finish is None

    def wait(self) -> None:
        """Return when the result may be used; raise the collective's error if it failed."""
        if self._finish is None:
            return
        began_ns = perf_counter_ns()
        self._finish()
        self._finish = None
        self._keep = ()
        if self._event is not None:
            self._event.wait_start_ns, self._event.wait_end_ns = began_ns, perf_counter_ns()
            for observer in self._observers:
                observer.waited(self._event)


def wait_all(pending: list[Pending]) -> None:
    """Wait for each in order and empty the list."""
    for item in pending:
        item.wait()
    pending.clear()
