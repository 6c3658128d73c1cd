"""gloo on CPU tensors: its own all-reduce, and the other collectives composed of messages.

gloo's own reduce-scatter and all-gather are slow. Composed, the same result takes half to a quarter of the time:

* reduce-scatter = every rank receives all versions of its own chunk and sums them, segment by segment, so that it holds
  no more than N-1 segments and sums them while they are still in the cache;
* all-gather = every rank sends its chunk to every other, all at once, each straight into its place; chunks may be
  uneven.

Broadcast and all-to-all send what gloo's own do; but messages have a number: ranks in two different collectives wait,
and are reported, instead of taking each other's bytes. Only an all-reduce has no number, nor has a barrier.

A large all-reduce goes as two halves, one for each of gloo's two threads: one travels while the other is summed.

Reduce-scatter and all-gather move (N-1)/N of the buffer per rank, as a ring does. The local sum adds in the order of
the ranks, pair by pair, so that it is deterministic.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.transports.base import Bounds, Job, Message, Reduction, Start, Transport
from shardlab.vocabulary import Collective, HostTransport

SEGMENT_BYTES = 2 * 1024**2  # of a reduce-scatter: less costs latency, more costs memory
HALVES_FROM_BYTES = 8 * 1024**2  # of an all-reduce: a smaller one gains nothing
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class GlooTransport(Transport):
    """Collectives over gloo.

    Args:
        group: a gloo process group, of which this process is a member.
    """

    emulated = False
    name: str = HostTransport.GLOO

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, tag: str = "") -> None:
        """Reduce in place; needs a dtype gloo can add."""
        _wait(self._begin_all_reduce(tensor, reduction))

    def start_of_sum(self, tensor: Tensor, reduction: Reduction) -> Start | None:
        """gloo's own threads do it."""
        return lambda: partial(_wait, self._begin_all_reduce(tensor, reduction))

    def _begin_all_reduce(self, tensor: Tensor, reduction: Reduction) -> list[dist.Work | None]:
        # By the size alone, which all ranks share: gloo pairs collectives by the order of the calls.
        parts = tensor.chunk(2) if tensor.nbytes >= HALVES_FROM_BYTES else (tensor,)
        return [dist.all_reduce(part, REDUCE_OPS[reduction], self._group, async_op=True) for part in parts]

    def reduce_scatter(self, output: Tensor, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Each segment is exchanged between all pairs; then its N versions are summed."""
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        what = f"{Collective.REDUCE_SCATTER} {bounds} {tag}"
        length = max(1, SEGMENT_BYTES // buffer.element_size())
        # Allocated once and reused by every segment, so that no more is ever held.
        received = [
            buffer.new_empty(0 if rank == self._rank else min(length, output.numel()))
            for rank in range(self._num_ranks)
        ]
        # As many rounds on every rank, also where its own chunk is shorter: the others need its segments.
        for start in range(0, max(chunk.numel() for chunk in chunks), length):
            segments = [chunk[start : start + length] for chunk in chunks]
            own = segments[self._rank]
            versions = [own if rank == self._rank else room[: own.numel()] for rank, room in enumerate(received)]
            self._exchange(segments, versions, what)
            if own.numel():
                add_in_order(versions, output[start : start + length], room=versions[1 if self._rank == 0 else 0])

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], what: str) -> None:
        """Send every other rank its tensor and receive the one it has for this rank; empty ones are skipped."""
        # Receives are posted first, so that nothing that arrives has to be buffered.
        works = [
            call(as_bytes(tensor), group=self._group, tag=_number(what, tensor), **{peer: rank})
            for call, peer, tensors in ((dist.irecv, "group_src", incoming), (dist.isend, "group_dst", outgoing))
            for rank, tensor in enumerate(tensors)
            if rank != self._rank and tensor.numel()
        ]
        # Sends too: once this returns the caller may write into the memory that they read.
        _wait(works)

    def all_gather(self, buffer: Tensor, bounds: Bounds, tag: str = "") -> None:
        """Every rank sends its chunk to all others, each straight into its place."""
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        self._exchange([chunks[self._rank]] * self._num_ranks, chunks, f"{Collective.ALL_GATHER} {bounds} {tag}")

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy bytes, so every dtype travels, down the same binomial tree as gloo's own broadcast."""
        if not tensor.numel():
            return
        number = _number(f"{Collective.BROADCAST} from {src}", tensor)
        place = (self._rank - src) % self._num_ranks  # counted from the root
        if place:  # its parent is at the place without the highest bit
            parent = place - (1 << place.bit_length() - 1)
            dist.recv(as_bytes(tensor), group=self._group, group_src=(src + parent) % self._num_ranks, tag=number)
        steps = (1 << level for level in range(place.bit_length(), (self._num_ranks - 1).bit_length()))
        children = [(src + place + step) % self._num_ranks for step in steps if place + step < self._num_ranks]
        _wait([dist.isend(as_bytes(tensor), group=self._group, group_dst=child, tag=number) for child in children])

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """Copy bytes, so every dtype travels."""
        incoming, outgoing = (tensor.tensor_split(self._num_ranks) for tensor in (output, buffer))
        incoming[self._rank].copy_(outgoing[self._rank])
        self._exchange(outgoing, incoming, Collective.ALL_TO_ALL)

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send bytes."""
        self.start_of(Message(self, True, tensor, dst))()()

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive bytes."""
        self.start_of(Message(self, False, tensor, src))()()

    def start_of(self, message: Message) -> Start:
        """gloo's own thread moves it."""
        call, peer = (dist.isend, "group_dst") if message.is_send else (dist.irecv, "group_src")
        number = _number(Collective.SEND, message.tensor)

        def start() -> Job:
            work = call(as_bytes(message.tensor), group=self._group, tag=number, **{peer: message.peer})
            return partial(message.travel, partial(_wait, [work]))

        return start

    def barrier(self) -> None:
        """An all-reduce of one element, which gloo does faster than its own barrier."""
        dist.all_reduce(torch.zeros(1), group=self._group)

    def scratch_bytes(self, num_bytes: int, *, reduces_and_scatters: bool) -> int:
        """A reduce-scatter holds a segment of its chunk from every other rank."""
        segment_bytes = min(SEGMENT_BYTES, num_bytes // self._num_ranks)
        return (self._num_ranks - 1) * segment_bytes if reduces_and_scatters else 0


def add_in_order(versions: list[Tensor], output: Tensor, room: Tensor, add: Callable[..., Tensor] = torch.add) -> None:
    """Add in the order of the ranks; ``room`` is a version to overwrite, and ``output`` may be this rank's own."""
    # Only the last sum goes into ``output``, which may be this rank's own version: sums before it still read that.
    total, *others = versions
    for number, version in enumerate(others, 1):
        total = add(total, version, out=output if number == len(others) else room)


def _number(what: str, tensor: Tensor) -> int:
    """By which gloo matches messages: those that differ wait and are reported, and nobody takes another's bytes.

    ``what`` is the collective with all that its ranks share. Never 0, the number of a script's own ``dist.send``; below
    2**31, as torch demands.
    """
    return 1 + (zlib.crc32(f"{what} of {tensor.numel()} {tensor.dtype}".encode()) >> 2)


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes."""
    return tensor.view(torch.uint8)
