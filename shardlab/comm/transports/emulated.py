"""A slower link round another transport: real bytes, real result, and then a sleep until the link would be done.

The ranks first meet (a barrier), because a ring can only begin when the last rank has come; from there the collective
takes the time of a ring on that link (``Link.ring_time_us``) or what the real transport took, whichever is longer. The
sleep burns no CPU, so on a laptop compute hides it as a network card would; every record says ``emulated``.
"""

from collections.abc import Callable
from time import perf_counter, sleep

from torch import Tensor

from shardlab.comm.transports.base import Bounds, Reduction, Transport
from shardlab.partition.wire import Link
from shardlab.vocabulary import Collective


class EmulatedLink(Transport):
    """Delays every collective of ``inner`` to the time it would take on ``link``."""

    emulated = True

    def __init__(self, inner: Transport, link: Link, num_ranks: int) -> None:
        self.name = f"{inner.name} as {link}"
        self._inner, self._link, self._num_ranks = inner, link, num_ranks

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Ring all-reduce: 2(N-1) steps."""
        self._paced(Collective.ALL_REDUCE, tensor, lambda: self._inner.all_reduce(tensor, reduction, tag))

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Ring reduce-scatter: N-1 steps."""
        self._paced(Collective.REDUCE_SCATTER, buffer, lambda: self._inner.reduce_scatter(output, buffer, bounds, tag))

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Ring all-gather: N-1 steps."""
        self._paced(Collective.ALL_GATHER, buffer, lambda: self._inner.all_gather(buffer, bounds, tag))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Pipelined along the ring."""
        self._paced(Collective.BROADCAST, tensor, lambda: self._inner.broadcast(tensor, src))

    def all_to_all(self, output: Tensor, buffer: Tensor, output_sizes: list[int], sizes: list[int]) -> None:
        """N-1 exchanges."""
        self._paced(Collective.ALL_TO_ALL, buffer, lambda: self._inner.all_to_all(output, buffer, output_sizes, sizes))

    def send(self, tensor: Tensor, dst: int) -> None:
        """One message; the delay is on the receiver's side, where it is seen."""
        self._inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        """One message."""
        began = perf_counter()
        self._inner.recv(tensor, src)
        self._sleep_until(began, Collective.RECV, tensor.nbytes)

    def barrier(self) -> None:
        """Latency only."""
        began = perf_counter()
        self._inner.barrier()
        self._sleep_until(began, Collective.BARRIER, 0)

    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:
        """What the real transport holds."""
        return self._inner.scratch_bytes(num_bytes, reduces_and_scatters=reduces_and_scatters)

    def close(self) -> None:
        """Of the real transport."""
        self._inner.close()

    def _paced(self, op: Collective, tensor: Tensor, call: Callable[[], None]) -> None:
        self._inner.barrier()
        began = perf_counter()
        call()
        self._sleep_until(began, op, tensor.nbytes)

    def _sleep_until(self, began: float, op: Collective, num_bytes: int) -> None:
        left = began + self._link.ring_time_us(op, num_bytes, self._num_ranks) / 1e6 - perf_counter()
        if left > 0:
            sleep(left)
