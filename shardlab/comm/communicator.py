"""The verbs: every tensor that ranks exchange passes through a ``Communicator``, and each call is an event.

    pending = comm.all_reduce(tensor, tag="gradients of bucket 0")
    ...                                   # compute goes on
    pending.wait()                        # now the sum is in ``tensor``

A communicator belongs to one axis of the mesh: the group of ranks along it, a transport, a queue. A group of one moves
nothing and records nothing, so engines need no special case for it. Sums stay sums: whoever wants a mean divides.

Transports get contiguous, one-dimensional tensors alone, since gloo reads the wrong memory of any other, without an
error; verbs that take any shape make them so.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shardlab.comm.events import Mark, Pending
from shardlab.comm.observed_group import ObservedGroup
from shardlab.comm.transports import base
from shardlab.comm.transports.base import Bounds, Job, Message, Queue, Reduction, Start, Transport
from shardlab.vocabulary import Collective


class Communicator(ObservedGroup):
    """Collectives along one axis of the mesh.

    Every verb returns at once with a ``Pending``: only after its ``wait()`` may the result be read or the buffer be
    touched. Along an axis collectives run one after another in the order of the calls, which must be the same on all
    ranks; what the transport raises, ``wait()`` raises. A ``tag`` says what is sent, in the same words on all ranks:
    ranks whose tags differ are in different collectives.

    Args:
        transport: how bytes move; None for a group of one.
        queue: where the transport runs.
        ranks: the global ranks of the group, in group order.
        rank: this process's position in ``ranks``.
        axis: the axis' name, which every event carries.
        mark: of the stream that computes; None on the CPU.
    """

    def __init__(
        self, transport: Transport | None, queue: Queue | None, ranks: Sequence[int], rank: int, axis: str,
        mark: Mark | None = None,
    ) -> None:  # fmt: skip
        super().__init__(transport, ranks, rank, axis)
        self._queue, self._mark, self._is_closed = queue, mark, False

    def all_reduce(self, tensor: Tensor, *, reduction: Reduction = "sum", tag: str = "") -> Pending:
        """Reduce ``tensor`` (any shape) over the group, in place on every rank.

        Dtype and reduction must be the same on all ranks. Over gloo nothing compares them: the numbers would be wrong.

        Raises:
            ValueError: another reduction than 'sum' and 'max'; a tensor that gradients are to flow through.
        """
        if reduction not in base.REDUCTIONS:
            raise ValueError(
                f"reduction: {reduction!r} is given; allowed are 'sum' and 'max' (divide a sum for a mean)"
            )
        transport = self._transport
        own = base.without_graph("tensor", tensor)  # the memory of now: an engine may give the tensor another
        if transport is None:
            return Pending()

        # The job runs in the queue's thread: what it closes over lives until the caller has waited.
        def job() -> None:
            # Copied here, if at all, and not before: a collective ahead of this one may still write into the memory.
            flat = _flattened(own)
            transport.all_reduce(flat, reduction, tag)
            _copy_back(flat, own)

        # A copy would have to be written back at the end, which only the job does.
        start = transport.start_of_sum(own.view(-1), reduction) if own.is_contiguous() else None
        return self._submit(Collective.ALL_REDUCE, own, job, tag, keep=(own,), start=start)

    def reduce_scatter(
        self, buffer: Tensor, output: Tensor | None = None, *, bounds: Bounds | None = None, tag: str = ""
    ) -> Pending:
        """Sum ``buffer`` over the group; this rank keeps its chunk.

        Args:
            buffer: contiguous, one-dimensional, the same size on every rank.
            output: receives this rank's chunk, [its length] of the buffer's dtype; None leaves the chunk in its place
                in ``buffer`` (the rest is then stale).
            bounds: num_ranks + 1 offsets of the chunks; None for equal ones.
            tag: what it is for.

        Raises:
            ValueError: a tensor that does not fit, or that gradients are to flow through; the bounds do not fit.
        """
        bounds = base.bounds_of(buffer, bounds, self.num_ranks)
        buffer = base.without_graph("buffer", buffer)
        target = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        if output is not None:
            base.require_output(output, buffer, target.numel())
            target = base.without_graph("output", output)
        transport = self._transport
        if transport is None:
            _copy_back(buffer, target)
            return Pending()
        own_bytes = target.nbytes
        return self._submit(
            Collective.REDUCE_SCATTER, buffer, lambda: transport.reduce_scatter(target, buffer, bounds, tag), tag,
            own_chunk_bytes=own_bytes, bounds=bounds,
            scratch_bytes=transport.scratch_bytes(own_bytes * self.num_ranks, reduces_and_scatters=True),
            keep=(buffer, target),
        )  # fmt: skip

    def all_gather(
        self, buffer: Tensor, chunk: Tensor | None = None, *, bounds: Bounds | None = None, tag: str = ""
    ) -> Pending:
        """Fill ``buffer`` with the chunks of all ranks.

        Args:
            buffer: contiguous, one-dimensional, the size of all chunks together.
            chunk: this rank's chunk (any shape), rounded to the buffer's dtype if both are real or both complex, and
                widened if both are integers; None where it lies in its place in ``buffer`` already.
            bounds: num_ranks + 1 offsets of the chunks; None for equal ones.
            tag: what it is for.

        Raises:
            ValueError: a tensor that does not fit, or that gradients are to flow through; the bounds do not fit.
        """
        bounds = base.bounds_of(buffer, bounds, self.num_ranks)
        buffer = base.without_graph("buffer", buffer)
        place = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        # Copied by the caller, not by the job: the caller may change its chunk as soon as this returns.
        if chunk is not None:
            base.require_chunk(chunk, place)
            place.copy_(base.without_graph("chunk", chunk).reshape(-1))
        transport = self._transport
        if transport is None:
            return Pending()
        return self._submit(
            Collective.ALL_GATHER, buffer, lambda: transport.all_gather(buffer, bounds, tag), tag,
            own_chunk_bytes=place.nbytes, bounds=bounds, keep=(buffer,),
        )  # fmt: skip

    def broadcast(self, tensor: Tensor, src: int = 0, *, tag: str = "") -> Pending:
        """Copy ``tensor`` (any shape, any dtype) from group rank ``src`` into the others', in place.

        Raises:
            ValueError: a rank that the group does not have; a tensor that gradients are to flow through.
        """
        src = base.rank_of("src", src, self.num_ranks)
        transport, own = self._transport, base.without_graph("tensor", tensor)
        if transport is None:
            return Pending()

        def job() -> None:
            flat = _flattened(own)  # as for an all-reduce
            transport.broadcast(flat, src)
            _copy_back(flat, own)

        return self._submit(Collective.BROADCAST, own, job, tag, keep=(own,))

    def all_to_all(self, output: Tensor, buffer: Tensor, *, tag: str = "") -> Pending:
        """Send part j of ``buffer`` to rank j; part i of ``output`` comes from rank i; all parts are equal.

        Args:
            output: contiguous, one-dimensional, of the buffer's size and dtype.
            buffer: contiguous, one-dimensional.
            tag: what it is for.

        Raises:
            ValueError: a tensor that does not fit, or that gradients are to flow through.
        """
        base.require_flat("buffer", buffer)
        base.require_output(output, buffer, buffer.numel())
        if buffer.numel() % self.num_ranks:
            raise ValueError(f"buffer: {buffer.numel()} elements do not divide into {self.num_ranks} equal parts")
        output, buffer = base.without_graph("output", output), base.without_graph("buffer", buffer)
        transport = self._transport
        if transport is None:
            _copy_back(buffer, output)
            return Pending()
        job = partial(transport.all_to_all, output, buffer)
        return self._submit(Collective.ALL_TO_ALL, buffer, job, tag, keep=(output, buffer))

    def send(self, tensor: Tensor, dst: int, *, tag: str = "", in_order: bool = False) -> Pending:
        """Send ``tensor`` to group rank ``dst``.

        It may not leave before somebody waits for it, or for another message that it then travels with: NCCL, which
        does one thing after another, has to be told of all that must happen at the same time. Unless all messages of
        the group stand in one order, in which each rank calls for its own: then ``in_order`` lets each leave at once.
        """
        flat = _flattened(tensor)
        message = Message(self._peer(dst, "dst"), True, flat, dst, in_order=in_order)
        return self._submit(Collective.SEND, flat, message, tag, keep=(flat,))

    def recv(self, tensor: Tensor, src: int, *, tag: str = "", in_order: bool = False) -> Pending:
        """Receive from group rank ``src`` into ``tensor``; as for ``send``, somebody has to wait for it.

        Length and dtype must be those of the sent tensor. Over gloo any other waits until the timeout, and so does a
        large one for a small one (``transports.letters``).

        Raises:
            ValueError: no other rank; a tensor that gradients are to flow through.
        """
        tensor = base.without_graph("tensor", tensor)
        flat = _flattened(tensor)
        # The queue copies back, once the message has come: before that there is nothing in ``flat`` to copy.
        message = Message(self._peer(src, "src"), False, flat, src, partial(_copy_back, flat, tensor), in_order)
        return self._submit(Collective.RECV, flat, message, tag, keep=(tensor, flat))

    def barrier(self, *, tag: str = "") -> Pending:
        """Complete when every rank of the group has issued it."""
        if self._transport is None:
            return Pending()
        return self._submit(Collective.BARRIER, None, self._transport.barrier, tag)

    def close(self) -> None:
        """End the queue after the collectives in it; raise the first error of the mesh that nobody was told of."""
        self._is_closed = True
        # It stays: where an interrupt ends the wait, a second close() waits again.
        if self._queue is not None:
            self._queue.close()

    def _submit(
        self, op: Collective, buffer: Tensor | None, job: Job | Message, tag: str, *,
        own_chunk_bytes: int | None = None, bounds: Bounds | None = None, scratch_bytes: int = 0,
        keep: tuple[Tensor, ...] = (), start: Start | None = None,
    ) -> Pending:  # fmt: skip
        queue = self._queue
        if queue is None or self._transport is None or self._is_closed:
            raise RuntimeError(f"communicator: axis {self.axis!r} is closed; build a new mesh")
        buffers = () if buffer is None else (buffer,)
        # Announced before it is queued: the board must show a collective that the transport never comes back from.
        event = self.announce(
            op, buffers, tag, own_chunk_bytes=own_chunk_bytes, bounds=bounds, scratch_bytes=scratch_bytes,
            is_letter=isinstance(job, Message) and job.transport.letter_of(job) is not None,
        )  # fmt: skip
        if isinstance(job, Message):
            finish = queue.submit_message(job, event, self._observers)
        else:
            finish = queue.submit(job, event, self._observers, start)
        dropped = None if buffer is None else self.dropped  # a barrier brings nothing
        return Pending(finish, keep=keep, event=event, observers=self._observers, mark=self._mark, dropped=dropped)

    def _peer(self, rank: int, field: str) -> Transport:
        if self._transport is None or rank == self.rank or not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"{field}: {rank} is not another rank of axis {self.axis!r}; it has {self.num_ranks}, and this one "
                f"is {self.rank}"
            )
        return self._transport


def _flattened(tensor: Tensor) -> Tensor:
    """The same elements, one-dimensional and contiguous: the tensor's own memory where it is so, else a copy."""
    # An empty one of NumPy's has a stride of 0, with which torch reads no bytes.
    return tensor.detach().contiguous().view(-1) if tensor.numel() else tensor.new_empty(0)


def _copy_back(flat: Tensor, tensor: Tensor) -> None:
    """Write ``flat`` into a tensor of as many elements, unless it is that tensor's own memory."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
