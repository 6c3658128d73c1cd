"""What a transport must do, and the queue that runs it beside the compute.

A transport moves the bytes of one collective and returns when they have moved (or are enqueued).

Every tensor is contiguous and one-dimensional. ``bounds`` are the num_ranks + 1 offsets of the ranks' chunks. ``tag``
says what is sent, the same on all ranks, so that a transport can refuse to mix two different collectives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from shardlab.comm.events import CollectiveEvent, Observers
from shardlab.partition.chunks import even_bounds

Reduction = Literal["sum", "max"]
REDUCTIONS = get_args(Reduction)
Bounds = tuple[int, ...]
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}  # torch widens no other unsigned ones
Job = Callable[[], None]


class Message(NamedTuple):
    """A send to ``peer``, or a receive from it, of a flat tensor.

    ``after`` is done once it has come; ``in_order``: see ``Communicator.send``.
    """

    transport: "Transport"
    is_send: bool
    tensor: Tensor
    peer: int
    after: Job | None = None
    in_order: bool = False

    def travel(self, wait: Job | None = None) -> None:
        """Go alone; ``wait``: it has begun, and this waits for its end."""
        move = self.transport.send if self.is_send else self.transport.recv
        (wait or (lambda: move(self.tensor, self.peer)))()
        if self.after is not None:
            self.after()


Came = Callable[[Job], int]
"""Waits for a letter, and before that calls what it is given, unless the letter has come; when it came, in nanoseconds
of ``time.perf_counter_ns``."""

Start = Callable[[], Job]
"""Begins what a job would do and returns at once what waits for its end."""


class MismatchError(RuntimeError):
    """Ranks are in different collectives."""


class Transport(ABC):
    """How collectives travel in one group of ranks; ranks are positions in the group."""

    name: str
    emulated: bool

    @abstractmethod
    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Reduce ``tensor`` over the group, in place."""

    def start_of_sum(self, tensor: Tensor, reduction: Reduction) -> Start | None:
        """What begins an all-reduce that goes on by itself; None, the default: only the queue can run it."""
        return None

    def start_of(self, message: Message) -> Start | None:
        """Likewise, of a message."""
        return None

    def letter_of(self, message: Message) -> Callable[[], Came] | None:
        """What begins a message that needs no thread (``letters``); None, the default: its queue runs it."""
        return None

    @abstractmethod
    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Sum ``buffer`` over the group; ``output`` receives this rank's chunk and may be that part of ``buffer``."""

    @abstractmethod
    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Fill ``buffer`` with every rank's chunk; this rank's is in place already."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` from ``src`` to all."""

    @abstractmethod
    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Send part j of ``buffer`` to rank j; part i of ``output`` comes from rank i; equal parts."""

    # Of messages between two ranks a transport has what its queue calls: ``send`` and ``recv``, or ``exchange``.

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to one rank."""
        raise NotImplementedError(f"send: over {self.name} ranks meet in collectives only; start ranks for messages")

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive from one rank."""
        raise NotImplementedError(f"recv: over {self.name} ranks meet in collectives only; start ranks for messages")

    def exchange(self, messages: "Sequence[Message]") -> None:
        """Send and receive several messages at once, whatever the order in which the other ranks name theirs."""
        raise NotImplementedError(f"{self.name} sends and receives one message at a time")

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:
        """Bytes of tensors, on their device, held during a collective besides the caller's buffers."""
        return 0

    def close(self) -> None:
        """Free what only this transport holds; its group is not part of that."""
        return


class Queue(Protocol):
    """Runs jobs one after another; ``submit`` returns at once with the function that waits for this job."""

    def submit(self, job: Job, event: CollectiveEvent, observers: Observers, start: Start | None = None) -> Job:
        """Queue ``job``, or do the same by ``start``; the returned call waits for it and raises what it raised."""

    def submit_message(self, message: Message, event: CollectiveEvent, observers: Observers) -> Job:
        """Queue a message so that none of its rank's sends keeps a receive from beginning, nor the other way round."""

    def close(self) -> None:
        """End the queue after the jobs that are in it."""


# What verbs may be given. Transports write into what they get without a check: of a wrong size, into its neighbours.


def rank_of(field: str, rank: int, num_ranks: int) -> int:
    """A position in a group; ValueError for a rank that it does not have."""
    if not 0 <= rank < num_ranks:
        raise ValueError(f"{field}: {rank} is given; the group has the ranks 0 to {num_ranks - 1}")
    return index(rank)


def without_graph(field: str, tensor: Tensor) -> Tensor:
    """The tensor's memory of now, which may be written into.

    Raises:
        ValueError: a gradient would flow past a collective, as if that had done nothing. A parameter, or a view of
            one, is allowed: nothing has been computed yet.
    """
    if tensor.grad_fn is not None and torch.is_grad_enabled() and not _is_view_of_a_leaf(tensor):
        raise ValueError(
            f"{field}: the result of {tensor.grad_fn.name()} is given, and no gradient flows through this collective; "
            f"pass {field}.detach(), which shares its memory, or use shardlab.comm.autograd_collectives"
        )
    return tensor.detach()


def _is_view_of_a_leaf(tensor: Tensor) -> bool:
    """Whether it is a leaf's memory and no more: a custom Function may return a view, and compute in its backward."""
    base = tensor._base  # (torch has no public way to ask what a tensor is a view of)
    if base is None or not base.is_leaf:
        return False
    node: Any = tensor.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction):
        node = next((before for before, _ in node.next_functions), None)
    return node is None


def require_flat(field: str, tensor: Tensor) -> None:
    """Raise ValueError, naming shape and strides, unless the tensor is contiguous and one-dimensional."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{field}: shape {tuple(tensor.shape)} with strides {tensor.stride()} is given; it must be contiguous and "
            "one-dimensional"
        )


def require_output(output: Tensor, buffer: Tensor, numel: int) -> None:
    """Raise ValueError unless ``output`` has room for just ``numel`` elements of ``buffer``, [numel]."""
    require_flat("output", output)
    if output.numel() != numel or output.dtype != buffer.dtype or output.device != buffer.device:
        raise ValueError(
            f"output: {output.numel()} elements of {output.dtype} on {output.device} are given; {numel} of "
            f"{buffer.dtype} on {buffer.device} are needed, as in the buffer"
        )


def require_chunk(chunk: Tensor, place: Tensor) -> None:
    """Raise ValueError unless ``chunk`` can be written into ``place``, as ``_is_written_as`` says of their dtypes."""
    if chunk.numel() != place.numel() or not _is_written_as(chunk.dtype, place.dtype):
        raise ValueError(
            f"chunk: {chunk.numel()} elements of {chunk.dtype} are given; {place.numel()} of {place.dtype} are needed, "
            "as in the buffer"
        )


def _is_written_as(given: torch.dtype, needed: torch.dtype) -> bool:
    """Whether values may be copied into another dtype: real and complex ones rounded, integers only where all fit."""
    if {given, needed} <= _INTEGERS:
        return torch.promote_types(given, needed) == needed
    are_real = given.is_floating_point and needed.is_floating_point
    return given == needed or are_real or (given.is_complex and needed.is_complex)


def bounds_of(buffer: Tensor, bounds: Sequence[int] | None, num_ranks: int) -> Bounds:
    """Offsets of the ranks' chunks in a buffer, num_ranks + 1 of them; None for equal chunks.

    Raises:
        ValueError: the buffer is not flat, does not divide, or the bounds do not fit it.
    """
    require_flat("buffer", buffer)
    if bounds is None:
        if buffer.numel() % num_ranks:
            raise ValueError(
                f"buffer: {buffer.numel()} elements do not divide into {num_ranks} equal chunks; pass bounds"
            )
        return even_bounds(buffer.numel(), num_ranks)
    # As Python's integers: transports compare them between ranks as text, and NumPy's read differently.
    bounds = tuple(map(index, bounds))
    ends = (bounds[0], bounds[-1]) if len(bounds) == num_ranks + 1 else None
    if ends != (0, buffer.numel()) or sorted(bounds) != list(bounds):
        raise ValueError(
            f"bounds: {bounds} is given; {num_ranks + 1} offsets are needed that begin at 0, do not descend and end at "
            f"{buffer.numel()}"
        )
    return bounds
