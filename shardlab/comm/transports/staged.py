"""CUDA tensors, staged through pinned host memory: several ranks on one GPU, where NCCL refuses.

Device to pinned host, a transport of the host, pinned host to device; the lane's thread does the three in order, so the
compute stream of the rank goes on meanwhile. Slow beside NCCL, and every record says ``staged``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.comm.transports.base import Bounds, Reduction, Transport


class StagedTransport(Transport):
    """Another transport, for CUDA tensors; CPU tensors go straight through."""

    emulated = False
    name = "staged"

    def __init__(self, inner: Transport, device: torch.device) -> None:
        self._inner = inner
        self._stream = torch.cuda.Stream(device)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Reduce in place."""
        self._through_host(tensor, lambda host: self._inner.all_reduce(host, reduction, tag))

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Only this rank's chunk travels back to the device."""
        host = self._to_host(buffer)
        host_output = torch.empty_like(output, device="cpu")
        self._inner.reduce_scatter(host_output, host, bounds, tag)
        self._to_device(output, host_output)

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """In place."""
        self._through_host(buffer, lambda host: self._inner.all_gather(host, bounds, tag))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy from ``src``."""
        self._through_host(tensor, lambda host: self._inner.broadcast(host, src))

    def all_to_all(self, output: Tensor, buffer: Tensor, output_sizes: list[int], sizes: list[int]) -> None:
        """Sizes are elements per rank."""
        host = self._to_host(buffer)
        self._through_host(output, lambda received: self._inner.all_to_all(received, host, output_sizes, sizes))

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to one rank."""
        self._inner.send(self._to_host(tensor), dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive from one rank."""
        self._through_host(tensor, lambda host: self._inner.recv(host, src))

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._inner.barrier()

    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:  # noqa: ARG002
        """The staging is host memory; the device holds nothing more."""
        return 0

    def close(self) -> None:
        """Of the real transport."""
        self._inner.close()

    def _through_host(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        host = self._to_host(tensor)
        call(host)
        if tensor.is_cuda:
            self._to_device(tensor, host)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host

    def _to_device(self, tensor: Tensor, host: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        self._stream.synchronize()  # whoever waits for the lane may then read it on any stream
