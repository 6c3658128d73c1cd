"""Parameters of which each rank keeps a chunk, gathered to compute with, freed, and reduced: their only owner.

Parameters of one kind (dtype, device, all frozen or none) make a ``Shards``. In ZeRO-1 and ZeRO-2 each is a bucket (see
``in_buckets``), whose parameters show their values all the time. From ZeRO-3 on those that are gathered together make a
``Unit``, which alone writes the state; a parameter stays the same object, and what it shows changes:

================================  ===================  ================  =====================  ====================
stage: state of the unit          who acts             param.data        param.grad             .grad of the piece
================================  ===================  ================  =====================  ====================
at rest: SHARDED                  -                    stub, NaN         None                   None
GATHERING                         Unit.start           stub              as before              as before
GATHERED                          Unit.gather          full              as before              as before
after forward: SHARDED            Unit.reshard         stub              as before              as before
backward comes to it: GATHERED    Unit.gather          full              this rank's sum grows  means so far
backward is over it: REDUCING     Unit.reduce          stub              None                   as before
the means are there: SHARDED      Unit.advance         stub              None                   means
inside no_sync(): SHARDED         Unit.reshard         stub              this rank's sum        as before
step, zero_grad: SHARDED          optimizer, engine    stub              None                   stepped; None
================================  ===================  ================  =====================  ====================

Three chunks, each a part of the one before it: what this rank keeps of the parameters between passes (``at_rest``; in
zero1 and zero2 that is all of them), of the means of gradients, and what it steps. Which axes divide each is a row
(``Placements``); the verb follows from two of them:

=================  ==========  =====  =======  ====================================================================
strategy           parameters  means  stepped  what travels
=================  ==========  =====  =======  ====================================================================
zero1              whole       chunk  chunk    reduce-scatter in place; after the step all-gather, in place too
zero2              whole       chunk  chunk    reduce-scatter; after the step all-gather, in place
zero3, fsdp        chunk       chunk  chunk    all-gather before each pass, reduce-scatter
hybrid_shard       inner       inner  inner    the same inside; all-reduce of the chunk over replicas
hfsdp              inner       both   both     the same inside; reduce-scatter, all-gather of the chunk over replicas
=================  ==========  =====  =======  ====================================================================

Where nothing is rounded, ``stepped`` is a view of ``at_rest``: a gather after the step needs no copy. Who owns which
memory, from when to when: ``at_rest`` and ``stepped``, this object, always; what is gathered, this object, from
``start`` to ``show_at_rest``; the buffer of gradients, this object, from ``reduce`` (where they add up in it, from the
first gradient) until their sums are there (zero1's stays, with the means in this rank's chunk of it); what is being
sent, the message's ``Pending`` too, until it has been waited for; means, this object and the pieces' ``.grad``, until
they are cleared.

(With hfsdp gradients are reduced inside ``no_sync()`` too, and a partial sum of them rests here.)

A stub has the parameter's shape, for which autograd may ask, in one element, and the dtype of what is gathered: with
another dtype a parameter would get another node in autograd. NaN, so that nobody computes with numbers that are not
the parameter's. (To look at all this build the engine with ``guards=False``: guards refuse to read a stub, and put a
placeholder at ``param.grad`` where the mean is at the piece.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending
from shardlab.engines.gradient_buffer import GradientBuffer
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.plain_mode import in_plain_mode, unrefused
from shardlab.engines.precision import Precision
from shardlab.engines.strategy import check_replaced
from shardlab.partition.chunks import Layout
from shardlab.partition.nested import chunk_in, nested
from shardlab.vocabulary import Role

ByAddress = dict[int, tuple["Shards", str]]
"""Whose gathered parameters lie in a storage, and which of its ``storages`` that is, or whose stub."""


class Placements(NamedTuple):
    """How shards are stored and moved.

    Attributes:
        precision: dtypes to gather and to sum in.
        replicas: axes over which the shards are replicated, in the order in which gradients are summed.
        axes: whose product the ranks of the layout are: the first cuts it into groups of chunks, the next each group.
            Gradients are scattered in this order. Empty: these ranks are one axis.
        rests_over: of these axes, those over which parameters are divided at rest, from the first on; None for all.
            Over the others only what is stepped is divided, and gathered after the step. 0: every rank shows all
            parameters all the time.
        means_over: likewise, those over which the means of gradients are divided in memory: what is summed over them
            comes into a chunk of its own. Over the others it comes into this rank's part of what was sent, which stays
            in memory with the means in it; 0: that is the whole buffer of gradients.
        scatter: begins to sum a buffer over an axis and to scatter it; takes what ``Communicator.reduce_scatter`` does.
    """

    precision: Precision
    replicas: Sequence[Communicator] = ()
    axes: Sequence[Communicator] = ()
    rests_over: int | None = None
    means_over: int | None = None
    scatter: Callable[..., Pending] = Communicator.reduce_scatter


class Shards(GradientBuffer):
    """This rank's chunk of some parameters, and all chunks while they are gathered.

    Making one changes what the parameters show: stubs or, where they are resident, views of ``at_rest``.

    Args:
        name: in the tags of the messages.
        params: full parameters by name, of which it takes those of the layout.
        layout: which rank has which elements.
        comm: the ranks of the layout.
        placements: how they are stored and moved.
        at: of these and of others, by the address of the storage. None where nobody looks that up.

    Attributes:
        is_undivided: whether every rank has everything, also of what is stepped.
        is_resident: whether parameters show their values all the time: all of them are at rest on every rank.
        is_split: whether what is stepped is a part of what is at rest, or lies beside it.
        has_masters: whether it lies beside, unrounded.
        division: how the parameters are divided.
        compute_dtype: of the parameters in forward and backward.
        sum_dtype: in which gradients are summed over the ranks.
        at_rest: what this rank keeps of the parameters between passes: [chunk], or [padded_numel] where they are
            resident; in ``compute_dtype`` with master weights beside it, else in the module's dtype.
        stepped: [chunk] of what this rank steps, in the module's dtype: ``at_rest``, a view of a part of it, or master
            weights, which lie beside it.
        pieces: the views of ``stepped`` that the optimizer gets, by name: whole rows in their shape, anything else
            flat, empty where this rank steps nothing of a parameter.
        gathered: full parameters in their shapes, by name, while they are gathered.
        storages: the memory of these: one buffer, [padded_numel], under "", or by name where each is a copy.
        watchers: told when the parameters show what is gathered (True), and what they show at rest (False).
    """

    means: Tensor | None = None
    """[chunk], in the dtype of ``stepped``; the ``.grad`` of the pieces are views of it."""
    version = 0
    """Of the values, which a graph may have saved."""
    is_stepped = False
    """Just now: what is gathered meanwhile is not kept for later."""
    _seen = 0  # of the pieces' versions, their sum
    _gathering: tuple[Tensor, Pending] | None = None  # the buffer that is being filled
    _reducing: tuple[Tensor, Tensor, Pending] | None = None  # what is sent, and where the sums will be
    _sums: Iterator[bool] = iter(())  # the rest of the reduction under way
    _partial: Tensor | None = None  # sums over the first axis alone, of earlier backwards

    def __init__(
        self, name: str, params: Mapping[str, nn.Parameter], layout: Layout, comm: Communicator, placements: Placements,
        at: ByAddress | None = None,
    ) -> None:  # fmt: skip
        self.name, self.layout, self.comm = name, layout, comm
        self._placements, self._at = placements, {} if at is None else at
        self.is_undivided = layout.num_ranks == 1
        self.is_resident, self.keeps_buffer = placements.rests_over == 0, placements.means_over == 0
        super().__init__(params, layout, self._divide(placements))
        self.is_split = self.is_resident or self._depth_at_rest < len(self._axes)
        self._store(placements.precision)
        self.division = Division(layout, comm, self.stepped.element_size(), self._chunk_of)
        self.gathered: dict[str, Tensor] = {}
        self.storages: dict[str, Tensor] = {}
        self._addresses: dict[int, str] = {}  # of these
        self.watchers: list[Callable[[bool], None]] = []
        self._stubs = {} if self.is_resident else {key: self._stub(param) for key, param in self.params.items()}
        self._at.update({stub.untyped_storage().data_ptr(): (self, key) for key, stub in self._stubs.items()})
        self.show_at_rest()

    def _divide(self, placements: Placements) -> int:
        """Find this rank's chunks, one inside the other, axis by axis; the last, whose number this is, it steps."""
        self._axes = () if self.is_undivided else tuple(placements.axes) or (self.comm,)
        # Of each rank of the communicator, which is in the order of the mesh, and not in that of the chunks.
        steps = [(self._step_of(axis), axis.num_ranks) for axis in self._axes]
        ranks = range(self.layout.num_ranks)
        self._chunk_of = [chunk_in((one // step % num, num) for step, num in steps) for one in ranks]
        rank = self._chunk_of[self.comm.rank] if self._axes else 0
        self._chunks = nested(self.layout, rank, [axis.num_ranks for axis in self._axes])
        # How many axes divide what is at rest.
        self._depth_at_rest = len(self._axes[: placements.rests_over])
        return rank

    def _store(self, precision: Precision) -> None:
        """Copy what this rank keeps out of the full parameters."""
        chunk = self.tensors.cut(self.params, self._chunks[self._depth_at_rest].ranks)
        self.compute_dtype, self.sum_dtype = precision.compute_dtype_of(chunk), precision.reduce_dtype_of(chunk)
        self.adds_up = self.is_resident and self.sum_dtype.itemsize > self.compute_dtype.itemsize
        self.at_rest, self.stepped = self._stored(chunk)
        self.has_masters = self.stepped.dtype != self.at_rest.dtype
        # By ``.data``, so that a piece has a version of its own.
        self.pieces = {
            key: self.tensors.piece_of(key, self.stepped).data.requires_grad_(param.requires_grad)
            for key, param in self.params.items()
        }

    def _stub(self, param: Tensor) -> Tensor:
        value = nan if self.compute_dtype.is_floating_point else 0
        return torch.full((), value, dtype=self.compute_dtype, device=self.device).expand(param.shape)

    def note_writes(self) -> None:
        """Find out whether pieces were written to; once for each pass, and not for each tensor that is saved."""
        if self._seen != self._num_writes():
            self.outdate()

    def outdate(self) -> None:
        """What a graph has saved of the values by reference is not this any more; this rank's business alone."""
        self.version += 1
        self._seen = self._num_writes()

    def changed(self) -> None:
        """The values are others now; called on all ranks, whatever of them a rank holds."""
        self.outdate()

    def _num_writes(self) -> int:
        return sum([piece._version for piece in self.pieces.values()])

    def _stored(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """``at_rest`` and ``stepped``: the same; that and a part of it; or a rounded copy, and master weights."""
        if not self.is_split:
            return chunk, chunk
        own = self._chunks[-1].within(self._chunks[self._depth_at_rest])
        if self.compute_dtype == chunk.dtype:
            return chunk, chunk[own]
        return chunk.to(self.compute_dtype), chunk[own].clone()

    def _step_of(self, axis: Communicator) -> int:
        """From one rank of an axis to the next, among all ranks of the layout."""
        places = [self.comm.ranks.index(rank) for rank in axis.ranks[:2]]
        return max(1, places[-1] - places[0])

    # Parameters.

    @in_plain_mode
    def start(self, *, as_stored: bool = False) -> None:
        """Begin to gather into a new buffer, [padded_numel] in ``compute_dtype``; ``as_stored``: in ``stepped``'s."""
        dtype = self.stepped.dtype if as_stored else self.compute_dtype
        if self.is_undivided and not as_stored and dtype == self.stepped.dtype and self.stepped.device == self.device:
            # No copy, also inside a step; what the user holds as stored is one, or writes would stay.
            self._gathering = self.stepped, Pending()
            return
        buffer = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        of_masters = as_stored and self.has_masters
        own, depth = (self.stepped, len(self._axes)) if of_masters else (self.at_rest, self._depth_at_rest)
        chunk = self.on_device(own)
        if not depth:
            buffer.copy_(chunk)
        self._gathering = buffer, self._gather(buffer, chunk, depth, 0)

    def on_device(self, chunk: Tensor) -> Tensor:
        """What is at rest, on the device that it is computed with on."""
        return chunk

    def _gather(self, buffer: Tensor, chunk: Tensor | None, depth: int, to: int) -> Pending:
        """Begin to gather a chunk that is divided over the first ``depth`` axes into one that is over ``to``."""
        pending = Pending()
        for number in reversed(range(to, depth)):
            pending.wait()
            filled = buffer if number == to else buffer[self._chunks[number].within(self._chunks[to])]
            tag, bounds = f"parameters of {self.name}", self._chunks[number].cut
            pending, chunk = self._axes[number].all_gather(filled, chunk, bounds=bounds, tag=tag), None
        return pending

    @in_plain_mode
    def gather_stepped(self) -> Pending:
        """All-gather the stepped chunks into ``at_rest``, over the axes that divide what is stepped alone."""
        chunk = self.stepped if self.has_masters else None  # else it is in its place
        if not self._axes and chunk is not None:
            self.at_rest.copy_(chunk)
        return self._gather(self.at_rest, chunk, len(self._axes), self._depth_at_rest)

    @in_plain_mode
    def show_gathered(self) -> None:
        """Wait for the gather, and let the parameters show what it has brought."""
        assert self._gathering is not None
        buffer, pending = self._gathering
        pending.wait()  # and only then dropped: after an error a transport may still write into the buffer
        self._gathering = None
        self.gathered = {name: self.tensors.full(name, buffer) for name in self.params}
        self.storages = dict(self.gathered) if self.tensors.are_copied else {"": buffer}
        self._addresses = {tensor.untyped_storage().data_ptr(): key for key, tensor in self.storages.items()}
        self._at.update({address: (self, key) for address, key in self._addresses.items()})
        for name, full in self.gathered.items():
            self.params[name].data = full
        for tell in self.watchers:
            tell(True)

    @in_plain_mode
    def show_at_rest(self) -> None:
        """Free what is gathered, and let the parameters show stubs or, where they are resident, what is at rest.

        A gather that nobody used is waited for first.
        """
        if self._gathering is not None:
            self._gathering[1].wait()  # a transport may still write into the buffer
            self._gathering = None
        for address in self._addresses:  # as they were: share_memory() moves a storage
            self._at.pop(address, None)
        self._addresses = {}
        for tell in self.watchers:
            tell(False)
        self.gathered, self.storages = {}, {}
        shown = self.tensors.slots(self.at_rest) if self.is_resident else self._stubs
        for name, param in self.params.items():
            param.data = shown[name]

    def check_replaced(self) -> None:
        """Raise RuntimeError if a full parameter was replaced by what ``write_back`` could not take."""
        for name, view in (self.gathered or self.tensors.slots(self.at_rest)).items():
            check_replaced(self.params[name], view, name)

    @in_plain_mode
    def write_back(self) -> None:
        """Copy into what is at rest, and stepped, what was written into full parameters or put there by ``.data =``."""
        values = {name: param.data for name, param in self.params.items()}
        if self.is_resident and not self.gathered:
            views = ((values[name], view) for name, view in self.tensors.slots(self.at_rest).items())
            if any((one.data_ptr(), one.stride()) != (view.data_ptr(), view.stride()) for one, view in views):
                # Into other memory: what the user has taken out may be where the values were.
                self.at_rest = self.tensors.cut(values, self._chunks[0].ranks)
                self.stepped = self.at_rest[self._chunks[-1].within(self._chunks[0])]
                self.point_pieces_at(self.stepped)
            return
        # Inside a step what is stepped may be a copy of what is at rest, elsewhere, and is written back from there.
        written = [(self.at_rest, self._depth_at_rest)] if self.is_split else [(self.stepped, -1)]
        for tensor, depth in [*written, *([(self.stepped, -1)] if self.has_masters else [])]:
            new = self.tensors.cut(values, self._chunks[depth].ranks).to(tensor)
            if not torch.equal(new, tensor):  # where nothing was, a graph may still use what it saved
                self.outdate()
            tensor.copy_(new)

    # Gradients.

    @unrefused
    def reduce(self, *, first_axis_only: bool = False) -> None:
        """Begin to sum this rank's gradients over the ranks; ``advance`` ends it, and makes means of the sums.

        Gradients are moved, unscaled, into one buffer, [padded_numel] in ``sum_dtype``: no parameter has one
        afterwards, and what this rank did not use is 0. Beside the buffer, until the sums are there, a chunk is in
        memory into which they come, unless their place is in the buffer (``Placements.means_over``).

        Args:
            first_axis_only: over the first axis only; later sums are added to it.
        """
        self._sums = self._sum(self.fill_all(), first_axis_only=first_axis_only)
        next(self._sums, False)

    def advance(self) -> bool:
        """Wait for the sum under way, and begin that over the next axis; False where none is under way any more."""
        return next(self._sums, False)

    def _sum(self, sums: Tensor, *, first_axis_only: bool) -> Iterator[bool]:
        """Sum over the axes that divide, then over replicas; pause behind the beginning of each sum.

        The sums of the last axis, [chunk] in ``sum_dtype``, are cast to the dtype of what is stepped and divided by
        the number of ranks: here, and nowhere else on the way of a gradient (of ``bucketed``, which has no ``Shards``,
        ``Bucket`` multiplies). With one dtype that is done in place.
        """
        tag, replicas = f"gradients of {self.name}", self._placements.replicas
        for number, axis in enumerate((*self._axes, *replicas) or (self.comm,)):  # of one rank: partial sums rest too
            if number < len(self._axes):
                bounds, means_over = self._chunks[number].cut, self._placements.means_over
                start, stop = bounds[axis.rank : axis.rank + 2]
                is_in_place = means_over is not None and number >= means_over
                chunk = sums[start:stop] if is_in_place else sums.new_empty(stop - start)
                pending = self._placements.scatter(axis, sums, chunk, bounds=bounds, tag=tag)
            else:
                chunk, pending = sums, axis.all_reduce(sums, tag=tag)
            self._reducing = sums, chunk, pending
            yield True
            pending.wait()
            sums, self._reducing = chunk, None
            if self._partial is not None:
                sums, self._partial = sums.add_(self._partial), None
            if first_axis_only:
                self._partial = sums
                return
        ranks = self.layout.num_ranks * prod(axis.num_ranks for axis in replicas)
        self.accept(sums.to(self.stepped.dtype).div_(ranks))

    def accept(self, means: Tensor) -> None:
        """Let the pieces' ``.grad`` be views of ``means``, [chunk] in their dtype, after adding earlier ones to it."""
        self.means = means
        for name in self.tensors.own:
            gradient, earlier = self.tensors.piece_of(name, means), self.pieces[name].grad
            if earlier is not None:
                gradient.add_(earlier)
            self.pieces[name].grad = gradient

    def drop(self) -> None:
        """The gradients are cleared: forget the means; also those on their way."""
        super().drop()
        if self._reducing is not None:
            self._reducing[2].wait()
        self._reducing = self.means = self._partial = None
        self._sums = iter(())

    def point_pieces_at(self, chunk: Tensor, before: Tensor | None = None) -> None:
        """Let pieces be views of another chunk; those that lie elsewhere than in ``before`` stay there."""
        for name, piece in self.pieces.items():
            # One that an optimizer has put elsewhere by ``.data =`` stays there, for guards to find.
            if before is None or piece.data_ptr() in (0, self.tensors.piece_of(name, before).data_ptr()):
                # By ``.data``: the optimizer finds its state by these very tensor objects.
                piece.data = self.tensors.piece_of(name, chunk)

    def gathered_tensors(self) -> list[Tensor]:
        """What is gathered, or is being gathered."""
        gathering = [] if self._gathering is None else [self._gathering[0]]
        return [tensor for tensor in (*self.storages.values(), *gathering) if tensor is not self.stepped]

    def holdings(self) -> Iterator[Holding]:
        """What this rank holds of parameters and gradients; each element of a role under one name."""
        spans = {name: (piece.param_start, piece.param_stop) for name, piece in self.tensors.own.items()}
        yield from (Holding(Role.GATHERED_PARAMETER, tensor) for tensor in self.gathered_tensors())
        yield Holding(Role.PARAMETER, self.at_rest)
        if self.is_resident:
            for name, param in self.params.items():
                yield Holding(Role.PARAMETER, param, name, (0, param.numel()))
        if self.has_masters or not self.is_resident:
            stepped = Role.MASTER_WEIGHT if self.has_masters else Role.PARAMETER
            yield Holding(stepped, self.stepped)
            yield from (Holding(stepped, self.pieces[name], name, span) for name, span in spans.items())
        whole, means, buffer = [param.grad for param in self.params.values()], self.means, self.buffer
        sent = () if self._reducing is None else self._reducing[:2]
        gradients = (one for one in (means, *whole, self._partial, buffer, *sent) if one is not None)
        yield from (Holding(Role.GRADIENT, gradient) for gradient in gradients)
        if buffer is not None:
            for name, slot in self.slots.items():
                yield Holding(Role.GRADIENT, slot, name, (0, slot.numel()))
        if buffer is None or means is None or means.untyped_storage()._cdata != buffer.untyped_storage()._cdata:
            for name, span in spans.items():
                if (gradient := self.pieces[name].grad) is not None:
                    yield Holding(Role.GRADIENT, gradient, name, span)
