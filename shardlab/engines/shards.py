"""Replicated parameters with a sharded optimizer: which piece each rank steps, and how the pieces are gathered again.

Each bucket's parameters are moved into one flat buffer (the module's tensors become views of it), so that the piece a
rank steps is a slice of that buffer, and one all-gather per bucket puts all pieces back in place without a copy.

With a 16-bit precision the flat buffers are rounded, and this rank keeps its chunk of each unrounded: the master
weights, which are stepped. After the step the chunk is rounded into its place and the chunks of all ranks are gathered,
so that the wire carries 16 bits too.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from typing_extensions import override

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending, wait_all
from shardlab.engines.buckets import Bucket
from shardlab.engines.holdings import Held
from shardlab.engines.hooks import outside_inference
from shardlab.engines.placeholder import check_replaced
from shardlab.engines.precision import Precision
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.chunks import Piece
from shardlab.vocabulary import Role


class ParameterShards:
    """The pieces of every parameter over the ranks of one communicator.

    Args:
        params: parameters by name, in the module's order.
        buckets: their layout, with one chunk per rank.
        comm: the ranks.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], comm: Communicator) -> None:
        self.params = dict(params)
        self.buckets = buckets
        self.comm = comm
        self.flat = [self._flatten(bucket) for bucket in buckets]
        self.pieces: dict[str, tuple[Bucket, Piece]] = {
            piece.name: (bucket, piece) for bucket in buckets for piece in bucket.layout.pieces(comm.rank)
        }
        pieces = {name: self._piece_tensor(name) for name in self.params}
        self._tensors = StepTensors(pieces, are_parts=comm.num_ranks > 1)

    @property
    def tensors(self) -> StepTensors:
        """What this rank steps: slices of the flat buffers, empty for parameters it holds nothing of."""
        return self._tensors

    def slice_of(self, name: str, full: Tensor) -> Tensor:
        """This rank's piece of a tensor that has the parameter's shape, in the shape of ``tensors``."""
        _, piece = self.pieces[name]
        return full if piece.whole else full.reshape(-1)[piece.param_start : piece.param_stop]

    def gather(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Put the pieces of all ranks back into the parameters; blocking.

        Args:
            is_due: whether any rank may have stepped a parameter; a bucket without such a parameter is not sent.
        """
        # All are issued, in the order of the buckets on every rank, before the first is waited for.
        pending: list[Pending] = []
        for bucket, flat in zip(self.buckets, self.flat, strict=True):
            if any(is_due(param) for param in bucket.params):
                tag = f"parameters of bucket {bucket.index}"
                pending.append(self.comm.all_gather(flat, self._own_part(bucket), bounds=bucket.layout.bounds, tag=tag))
        wait_all(pending)
        # The parameters were written through the buffers, unseen by autograd. With a new version it refuses a backward
        # that saved the old values; without one it would compute with the new ones.
        for bucket in self.buckets:
            if any(is_due(param) for param in bucket.params):
                increment_version(bucket.params)

    def take_replaced(self) -> None:
        """Take over what the user has put in the place of a parameter's data, as ``module.to()`` does too.

        Raises:
            RuntimeError: it has another shape, dtype or device, or the parameter is a rounded copy.
        """
        replaced = [(bucket, *found) for bucket in self.buckets for found in self._replaced(bucket)]
        for bucket, place, view in replaced:
            self._check_replaceable(bucket, place)
            check_replaced(bucket.params[place], view, bucket.names[place])
        for bucket in dict.fromkeys(bucket for bucket, _, _ in replaced):
            self._renew(bucket)

    def show(self) -> None:
        """Give every parameter its place in the buffers again, whatever the user has put there by ``.data =``."""
        for bucket in self.buckets:
            if self._replaced(bucket):
                bucket.show(self._shown(bucket.index))

    def take_assigned(self) -> None:
        """Take over what an optimizer has put in the place of a piece's data."""
        buffers = map(self._stepped, self.buckets)
        starts = [buffer.data_ptr() - first * buffer.element_size() for buffer, first in buffers]
        moved = [
            bucket for name, (bucket, piece) in self.pieces.items()
            if piece.flat_stop > piece.flat_start and (tensor := self.tensors.by_name(name)).data_ptr()
            != starts[bucket.index] + piece.flat_start * tensor.element_size()
        ]  # fmt: skip
        for bucket in dict.fromkeys(moved):
            values = {name: self.tensors.by_name(name).data for name in bucket.names if name in self.pieces}
            self._renew_stepped(bucket)
            for name, value in values.items():
                self.tensors.by_name(name).detach().copy_(value)

    def _renew_stepped(self, bucket: Bucket) -> None:
        """Move the pieces of a bucket to new memory: the optimizer may have kept the old, as its previous weights."""
        self._renew(bucket)

    @outside_inference
    def _renew(self, bucket: Bucket) -> None:
        """Move a bucket to a new buffer, from wherever its parameters' data is now.

        The optimizer steps a slice of the buffer, and the next gather would pass the user's tensors by. The old buffer
        is left as it is: the user may have swapped the data of two parameters, or keep it to put it back later. What
        else the user has kept of it, as another parameter's ``.data``, is the parameter's no more.
        """
        flat = self._shown(bucket.index).clone()
        for view, param in zip(bucket.slots_of(flat), bucket.params, strict=True):
            view.copy_(param.detach())
        bucket.show(flat)
        self._replace_shown(bucket, flat)

    def _replace_shown(self, bucket: Bucket, flat: Tensor) -> None:
        self.flat[bucket.index] = flat
        self._point_pieces(bucket)

    def _point_pieces(self, bucket: Bucket) -> None:
        for name in bucket.names:
            # By ``.data``: the optimizer finds its state by these very tensor objects.
            self.tensors.by_name(name).data = self._piece_tensor(name).data

    def _replaced(self, bucket: Bucket) -> list[tuple[int, Tensor]]:
        """Slots whose parameters have other data than the buffer's, and their views of it."""
        shown = self._shown(bucket.index)
        start, itemsize = shown.data_ptr(), shown.element_size()
        # Views are made only where something differs: there may be thousands of parameters, in each step.
        return [
            (place, bucket.slots_of(shown)[place])
            for place, (slot, param) in enumerate(zip(bucket.layout.slots, bucket.params, strict=True))
            if param.shape != bucket.shapes[place]
            or not param.is_contiguous()
            or (slot.stop > slot.start and param.data_ptr() != start + slot.start * itemsize)
        ]

    def _check_replaceable(self, bucket: Bucket, place: int) -> None:
        """Refuse data in the place of a rounded copy, where there are any."""

    def _shown(self, index: int) -> Tensor:
        """The buffer that the parameters of a bucket are views of now."""
        return self.flat[index]

    def held(self) -> Iterator[Held]:
        """The whole parameters, and the flat buffers with their padding."""
        yield from (Held(Role.PARAMETER, flat) for flat in self.flat)
        for name, param in self.params.items():
            yield Held(Role.PARAMETER, param, name, (0, param.numel()))

    def _piece_tensor(self, name: str) -> Tensor:
        param = self.params[name]
        if name not in self.pieces:
            # With the parameter's number of dims (at least one), since some optimizers accept only matrices.
            return param.detach().reshape(param.shape or (1,))[:0].requires_grad_(param.requires_grad)
        bucket, piece = self.pieces[name]
        chunk, offset = self._stepped(bucket)
        tensor = chunk[piece.flat_start - offset : piece.flat_stop - offset]
        if piece.whole:
            tensor = tensor.view(param.shape)
        return tensor.detach().requires_grad_(param.requires_grad)

    def _stepped(self, bucket: Bucket) -> tuple[Tensor, int]:
        """What the pieces are slices of, and the place in the layout at which it begins."""
        chunk = self._own_part(bucket)
        # Without masters the piece is a view of the parameter, so that a step needs no copy back.
        return (self.flat[bucket.index], 0) if chunk is None else (chunk, bucket.layout.chunk(self.comm.rank)[0])

    def _flatten(self, bucket: Bucket) -> Tensor:
        """Move a bucket's parameters into one buffer."""
        flat = bucket.new_buffer()
        for view, param in zip(bucket.slots_of(flat), bucket.params, strict=True):
            view.copy_(param.detach())
        # This drops the last references to the parameters' own storages, so no second copy stays.
        bucket.show(flat)
        return flat

    def _own_part(self, bucket: Bucket) -> Tensor | None:  # noqa: ARG002
        """What this rank steps of a bucket, [chunk]; None if it is the slice of the flat buffer itself."""
        return None


class MasterShards(ParameterShards):
    """As ``ParameterShards``, but steps master weights, in the dtype the model came with.

    Args:
        params: parameters by name, in the module's order.
        buckets: their layout, with one chunk per rank.
        comm: the ranks.
        precision: the module's parameters get its ``compute`` dtype.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], comm: Communicator, precision: Precision
    ) -> None:
        # All of these before the base, whose construction rounds each bucket and keeps its master weights.
        self._precision = precision
        self._dtypes = {name: param.dtype for name, param in params.items()}
        self._masters: list[Tensor | None] = []  # [chunk] by bucket; None if nothing is rounded
        self._stored: dict[int, Tensor] = {}  # bucket index -> all master weights, [padded_numel], while held
        self._num_holders = self._num_keeping = 0
        super().__init__(params, buckets, comm)
        self._versions: dict[str, int] = {}
        self._note_versions()

    @property
    def is_held(self) -> bool:
        """Whether the module has all master weights now."""
        return self._num_holders > 0

    @override
    def held(self) -> Iterator[Held]:
        """As the base, with this rank's chunks of the master weights; while all are held, they count as gathered."""
        # Before the base, since the parameters are views of them meanwhile, and a storage counts in its first role.
        yield from (Held(Role.GATHERED_PARAMETER, stored) for stored in self._stored.values())
        yield from super().held()
        for bucket, master in zip(self.buckets, self._masters, strict=True):
            if master is not None:
                yield Held(Role.MASTER_WEIGHT, master)
                for piece in bucket.layout.pieces(self.comm.rank):
                    span = (piece.param_start, piece.param_stop)
                    yield Held(Role.MASTER_WEIGHT, self.tensors.by_name(piece.name), piece.name, span)

    @override
    def gather(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Round what this rank has stepped and gather all chunks; master weights that are held are gathered again."""
        super().gather(is_due)
        # Or the user would read the values from before the step.
        if self.is_held:
            self._gather_masters()
        # Last: the gather raises versions too, and is not a write of the user's.
        self._note_versions()

    @contextlib.contextmanager
    def whole(self, *, keep_changes: bool) -> Iterator[None]:
        """Inside, the module has all master weights; see ``Engine.full_params``."""
        # First: what was written into rounded parameters would disappear behind the master weights.
        self.check_unwritten()
        if not self.is_held:
            self._gather_masters()
        self._num_holders += 1
        self._num_keeping += keep_changes
        try:
            yield
            # Not after an error: half of a change must not reach the master weights.
            if keep_changes:
                self.take_replaced()
                self.keep_changes()
        finally:
            self._num_holders -= 1
            self._num_keeping -= keep_changes
            # These contexts may be nested: only the outermost frees what the others still use.
            if not self.is_held:
                self._show_rounded()

    def keep_changes(self) -> None:
        """Take over what was written into the master weights, if they are held with ``keep_changes``."""
        if not self._num_keeping:
            return
        for index, stored in self._stored.items():
            start, stop = self.buckets[index].layout.chunk(self.comm.rank)
            self._master(index).copy_(stored[start:stop])
            # The whole buffer and not only the chunk: every rank wrote the same, so there is nothing to gather.
            self.flat[index].copy_(stored)

    def give_back(self) -> None:
        """Leave the module with all master weights; collective."""
        if not self.is_held:
            self._gather_masters()
        # Held for good, since the module keeps them.
        self._num_holders = 1

    def check_unwritten(self) -> None:
        """Find out whether rounded parameters were written to, which would never reach the master weights.

        Raises:
            RuntimeError: they were.
        """
        if self.is_held:
            return
        for name, version in self._versions.items():
            if self.params[name]._version != version:
                raise _written(name)
        for bucket in self.buckets:
            for place, _ in self._replaced(bucket):
                self._check_replaceable(bucket, place)

    def forget_writes(self) -> None:
        """Accept what was written into parameters, which are about to be replaced."""
        self.show()
        self._note_versions()

    @outside_inference
    def _gather_masters(self) -> None:
        pending = []
        for index, master in enumerate(self._masters):
            if master is None:
                continue
            bucket = self.buckets[index]
            # While held, the same buffers are filled again: the user's parameters are views of them.
            if index not in self._stored:
                self._stored[index] = torch.empty(bucket.layout.padded_numel, dtype=master.dtype, device=master.device)
            tag, bounds = f"parameters of bucket {index}", bucket.layout.bounds
            pending.append(self.comm.all_gather(self._stored[index], master, bounds=bounds, tag=tag))
        wait_all(pending)
        # Only when all have arrived: a gather that raises leaves the module what it has.
        for index, stored in self._stored.items():
            self.buckets[index].show(stored)

    def _show_rounded(self) -> None:
        for index in self._stored:
            self.buckets[index].show(self.flat[index])
        # Last: now no parameter is a view of them, and their memory is free.
        self._stored = {}
        self._note_versions()

    def _note_versions(self) -> None:
        rounded = (
            name for bucket, master in zip(self.buckets, self._masters, strict=True) if master is not None
            for name in bucket.names
        )  # fmt: skip
        self._versions = {name: self.params[name]._version for name in rounded}

    @override
    def _shown(self, index: int) -> Tensor:
        return self._stored.get(index, self.flat[index])

    @override
    def _replace_shown(self, bucket: Bucket, flat: Tensor) -> None:
        if bucket.index in self._stored:
            self._stored[bucket.index] = flat
        else:
            super()._replace_shown(bucket, flat)

    @override
    def _renew_stepped(self, bucket: Bucket) -> None:
        if self._masters[bucket.index] is None:
            super()._renew_stepped(bucket)
        else:
            self._masters[bucket.index] = self._master(bucket.index).clone()
            self._point_pieces(bucket)

    @override
    def _check_replaceable(self, bucket: Bucket, place: int) -> None:
        if self._masters[bucket.index] is not None and not self.is_held:
            raise _written(bucket.names[place])

    @override
    def _flatten(self, bucket: Bucket) -> Tensor:
        stored = super()._flatten(bucket)
        dtype = self._precision.compute_dtype_of(stored)
        if dtype == stored.dtype:
            self._masters.append(None)
            return stored
        start, stop = bucket.layout.chunk(self.comm.rank)
        # A clone: a view would keep the unrounded chunks of all ranks in memory.
        self._masters.append(stored[start:stop].clone())
        rounded = stored.to(dtype)
        # Takes the parameters off the unrounded buffer, which is free when this returns.
        bucket.show(rounded)
        return rounded

    @override
    def _own_part(self, bucket: Bucket) -> Tensor | None:
        return self._masters[bucket.index]

    def _master(self, index: int) -> Tensor:
        master = self._masters[index]
        assert master is not None
        return master

    @override
    def _piece_tensor(self, name: str) -> Tensor:
        piece = super()._piece_tensor(name)
        # An empty piece is cut from the rounded parameter, but the optimizer must see one dtype on all ranks.
        return piece.detach().to(self._dtypes[name]).requires_grad_(piece.requires_grad)


def _written(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r}: it was written into in place or replaced, but with precision it is a rounded copy, and "
        "the master weights do not change with it; write inside 'with engine.full_params(keep_changes=True):', or use "
        "engine.load_full_state_dict(state)"
    )
