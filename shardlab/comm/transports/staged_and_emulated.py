"""Transports around another transport: CUDA tensors staged through host memory, and an emulated, slower link.

``StagedTransport`` serves several ranks on one GPU, where NCCL refuses. It copies device to pinned host, sends by a
transport of the host and copies back; the queue's thread does the three in order, so the compute stream goes on. It is
slow beside NCCL, and every record says ``staged``.

``EmulatedLink`` sends the real bytes and then sleeps until the link would be done. The ranks first meet in a barrier,
because a ring can only begin when its last rank is there. From then on a collective takes the time of a ring on that
link (``Link.ring_time_us``) or the real transport's time, whichever is longer. Sleeping burns no CPU, so on a laptop
compute hides it as it would hide a network card; every record says ``emulated``.
"""

from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.streams import CUDA, Streams
from shardlab.comm.transports.base import Bounds, Reduction, Transport
from shardlab.partition.ring_cost import Link
from shardlab.vocabulary import Collective


class StagedTransport(Transport):
    """Another transport, for CUDA tensors; CPU tensors go straight through."""

    emulated = False
    name = "staged"

    def __init__(self, inner: Transport, device: torch.device, rank: int, streams: Streams = CUDA) -> None:
        self._inner, self._rank, self._streams = inner, rank, streams
        # A stream of its own: the host waits for each copy, and must not wait for what is computed meanwhile.
        self._stream = streams.Stream(device)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Reduce in place."""
        self._through_host(tensor, lambda host: self._inner.all_reduce(host, reduction, tag))

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Only this rank's chunk travels back to the device."""
        # The host copies live until the queue's job ends; pinned memory then returns to torch's cache.
        host = self._to_host(buffer)
        host_output = self._room_for(output)
        self._inner.reduce_scatter(host_output, host, bounds, tag)
        self._copy(output, host_output)

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """In place. Only this rank's chunk travels to the host."""
        host, own = self._room_for(buffer), slice(bounds[self._rank], bounds[self._rank + 1])
        self._copy(host[own], buffer[own])
        self._inner.all_gather(host, bounds, tag)
        self._copy(buffer, host)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy from ``src``."""
        self._through_host(tensor, lambda host: self._inner.broadcast(host, src))

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Part j of the buffer goes to rank j."""
        host = self._to_host(buffer)
        self._through_host(output, lambda received: self._inner.all_to_all(received, host))

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to one rank."""
        self._inner.send(self._to_host(tensor), dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive from one rank."""
        self._through_host(tensor, lambda host: self._inner.recv(host, src))

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._inner.barrier()

    def close(self) -> None:
        """Close the real transport."""
        self._inner.close()

    def _through_host(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        host = self._to_host(tensor)
        call(host)
        self._copy(tensor, host)

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = self._room_for(tensor)
        self._copy(host, tensor)
        return host

    def _room_for(self, tensor: Tensor) -> Tensor:
        """Pinned host memory of the tensor's size; a tensor that is in host memory itself."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if target.data_ptr() == source.data_ptr():  # a CPU tensor, which was given no other room
            return
        # Not for the stream that computes, which the queue's thread has waited for before it called: for that thread's
        # own, which has made a contiguous copy.
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The transport reads it from the host, and whoever waits for the queue on any stream.
        self._stream.synchronize()


def _paced(op: Collective, place: int) -> Callable[..., None]:
    """A verb of ``EmulatedLink``; ``place`` is that of the whole buffer among its arguments."""

    def verb(self: "EmulatedLink", *args: Any) -> None:
        self._inner.barrier()  # before the clock starts: a late rank is not the link's doing
        began = perf_counter()
        getattr(self._inner, op)(*args)
        self._sleep_until(began, op, args[place].nbytes)

    return verb


class EmulatedLink(Transport):
    """Delays every collective of ``inner`` to the time it would take on ``link``."""

    emulated = True

    def __init__(self, inner: Transport, link: Link, num_ranks: int) -> None:
        self.name = f"{inner.name} as {link}"
        self._inner, self._link, self._num_ranks = inner, link, num_ranks
        # Goes ahead of what one rank sends: from here on it travels. (A script may set another default device.)
        self._start = torch.zeros(1, dtype=torch.uint8, device="cpu")

    all_reduce = _paced(Collective.ALL_REDUCE, 0)
    reduce_scatter = _paced(Collective.REDUCE_SCATTER, 1)
    all_gather = _paced(Collective.ALL_GATHER, 0)
    broadcast = _paced(Collective.BROADCAST, 0)
    all_to_all = _paced(Collective.ALL_TO_ALL, 1)

    def send(self, tensor: Tensor, dst: int) -> None:
        """One message; the delay is on the receiver's side, where it is seen."""
        self._inner.send(self._start, dst)
        self._inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        """One message."""
        # Before the clock starts: a late sender is not the link's doing.
        self._inner.recv(torch.empty_like(self._start), src)
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
        """Close the real transport."""
        self._inner.close()

    def _sleep_until(self, began: float, op: Collective, num_bytes: int) -> None:
        left = began + self._link.ring_time_us(op, num_bytes, self._num_ranks) / 1e6 - perf_counter()
        if left > 0:
            sleep(left)
