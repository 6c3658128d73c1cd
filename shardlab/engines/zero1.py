"""ZeRO-1: each rank steps 1/N of every bucket, and holds optimizer state for that part alone.

What differs from ``bucketed``: parameters lie in flat buffers of the same layout, a bucket is reduce-scattered instead
of all-reduced, the optimizer steps this rank's pieces of it, and after the step the buffers are all-gathered, in place
and without a copy. Per rank for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P/N state; P includes what
pads each bucket to a multiple of N. On the wire 2P(N-1)/N elements a step, as in an all-reduce, of which they are the
two halves. With a ``precision`` the buffers are rounded, and a rank steps its chunk of each unrounded: its master
weights. Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import increment_version

from shardlab.comm.events import Pending, wait_all
from shardlab.engines.bucket import Bucket
from shardlab.engines.bucketed import Bucketed
from shardlab.engines.holdings import Holding
from shardlab.engines.module_hooks import in_plain_mode
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.strategy import Given, LaidOut, check_replaced
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.partition.chunks import parse_partition
from shardlab.vocabulary import Partition, Role


class ZeRO1(Bucketed):
    """Replicated parameters; each rank steps its pieces of them.

    Args:
        bucket_bytes: capacity of a bucket in bytes.
        partition: 'elements', or whole parameters by 'round_robin', 'contiguous', 'balanced'.
        precision: 'full', 'bf16', 'fp16' or a ``Precision``. The optimizer steps master weights; gradients add up in
            the dtype they are reduced in, also inside ``no_sync()``, unless they are computed in one with more bits.
    """

    name = "zero1"
    steps_pieces = True

    def __init__(
        self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, partition: Partition | str = Partition.ELEMENTS, precision:
        Precision | str = "full",
    ) -> None:  # fmt: skip
        super().__init__(bucket_bytes=bucket_bytes)
        self.partition, self.precision = parse_partition(partition), parse_precision(precision)

    def lay_out(self, given: Given) -> LaidOut:
        """As the base; the parameters become views of flat buffers."""
        self.num_chunks = given.comms[-1].num_ranks
        laid_out = super().lay_out(given)
        self._pieces: dict[str, Tensor] = {}
        self._num_open = 0  # full_params() blocks
        for bucket in self.buckets:
            self._flatten(bucket)
        self.keeps_pieces = any(bucket.master is not None for bucket in self.buckets)
        return LaidOut({name: self._pieces[name] for name in self.params}, laid_out.divisions)

    def _flatten(self, bucket: Bucket) -> None:
        stored = bucket.flat(bucket.params[0].dtype)
        for view, param in zip(bucket.slots(stored), bucket.params, strict=True):
            view.copy_(param.detach())
        dtype = self.precision.compute_dtype_of(stored)
        is_rounded = dtype != stored.dtype
        bucket.master = stored[bucket.chunk].clone() if is_rounded else None
        bucket.values = stored.to(dtype) if is_rounded else stored
        self._show(bucket, bucket.values)
        for name, param in zip(bucket.layout.names, bucket.params, strict=True):
            # By ``.data``, so that a piece has a version of its own.
            self._pieces[name] = self._piece(bucket, name).data.requires_grad_(param.requires_grad)

    def _piece(self, bucket: Bucket, name: str) -> Tensor:
        """What this rank steps of a parameter: a view of the buffer, so that a step needs no copy, or of the master."""
        chunk = bucket.values[bucket.chunk] if bucket.master is None else bucket.master
        return bucket.tensors.piece_of(name, chunk)

    @staticmethod
    def _show(bucket: Bucket, flat: Tensor) -> None:
        # By ``.data``: the same parameter objects stay in the module, with their hooks and versions.
        for view, param in zip(bucket.slots(flat), bucket.params, strict=True):
            param.data = view

    def reduce(self, bucket: Bucket) -> Pending:
        """As the base."""
        assert bucket.buffer is not None
        bucket.means = self.new_chunk(bucket.buffer[bucket.chunk])
        tag = f"gradients of bucket {bucket.index}"
        return self.comm.reduce_scatter(bucket.buffer, bucket.means, bounds=bucket.layout.bounds, tag=tag)

    def new_chunk(self, place: Tensor) -> Tensor:
        """Where this rank's chunk of the reduced gradients goes, [chunk]: to its ``place`` in the buffer."""
        return place

    def take_means(self, bucket: Bucket) -> None:
        """Make the means, or parts of them, the ``.grad`` of the pieces."""
        assert bucket.means is not None
        if self.precision.reduce_dtype is not None:
            master = self._pieces[bucket.layout.names[0]].dtype
            bucket.means = bucket.means.to(master).div_(self.num_ranks)
        for name, part in bucket.tensors.parts_of(bucket.means, bucket.tensors.own).items():
            piece = self._pieces[name]
            mean, earlier = part.view(piece.shape), piece.grad
            piece.grad = mean if earlier is None else mean.add_(earlier)

    @contextlib.contextmanager
    def backward(self, *, sends: bool) -> Iterator[None]:
        """As the base."""
        for bucket in self.buckets:
            # Means of an earlier backward, to which this one adds, may lie in the buffer that it fills.
            if bucket.buffer is not None and not bucket.filled:
                for name in bucket.tensors.own:
                    gradient = self._pieces[name].grad
                    if gradient is not None and _share(gradient, bucket.buffer):
                        self._pieces[name].grad = gradient.clone()
                bucket.means = None
        with super().backward(sends=sends):
            yield

    @contextlib.contextmanager
    def stepping(self, *, loads: bool = False) -> Iterator[None]:
        """As the base; at the end the pieces of all ranks are gathered."""
        try:
            yield
        finally:  # an optimizer that raised may have stepped first, and those of other ranks have
            # By what is due, which all ranks know: one that stepped nothing of a bucket must join its gather too.
            self._gather([bucket for bucket in self.buckets if loads or any(map(self.is_due, bucket.params))])

    def _gather(self, buckets: list[Bucket]) -> None:
        # All are issued, in the order of the buckets on every rank, before the first is waited for.
        bounds = [bucket.layout.bounds for bucket in buckets]
        wait_all([
            self.comm.all_gather(one.values, one.master, bounds=some, tag=f"parameters of bucket {one.index}")
            for one, some in zip(buckets, bounds, strict=True)
        ])  # fmt: skip
        # The parameters were written through the buffers, unseen by autograd: with a new version it refuses a backward
        # that saved the old values, and without one it would compute with the new ones.
        for bucket in buckets:
            increment_version(bucket.params)

    @contextlib.contextmanager
    def full(self, *, keep_changes: bool) -> Iterator[None]:
        """As the base; where parameters are rounded, the master weights of all ranks are shown in their place."""
        shown = [bucket for bucket in self.buckets if bucket.master is not None and bucket.whole is None]
        self._num_open += 1
        try:
            for bucket in shown:
                self._show_masters(bucket)
            yield
            if keep_changes:
                self._keep()
        finally:
            self._num_open -= 1
            for bucket in shown:
                bucket.whole = None
            if not self._num_open:  # by then another block may not keep what was put there by ``.data =``
                for bucket in self.buckets:
                    self._show(bucket, bucket.values)

    @in_plain_mode
    def _keep(self) -> None:
        """Take over what was written, or put there by ``.data =``; every rank wrote the same, so nothing is sent."""
        shown = [(one, one.values if one.whole is None else one.whole) for one in self.buckets]
        for bucket, flat in shown:  # of all, before anything is kept
            for name, param, view in zip(bucket.layout.names, bucket.params, bucket.slots(flat), strict=True):
                check_replaced(param, view, name)
        for bucket, flat in shown:
            if any(map(_is_elsewhere, bucket.params, bucket.slots(flat))):
                # Into other memory: what the user has taken out may be where the values were.
                flat = bucket.flat(flat.dtype)
                for view, param in zip(bucket.slots(flat), bucket.params, strict=True):
                    view.copy_(param.detach())
            self._store(bucket, flat)

    def _store(self, bucket: Bucket, flat: Tensor) -> None:
        if bucket.master is not None:
            bucket.master.copy_(flat[bucket.chunk])
            bucket.values.copy_(flat)
        elif flat is not bucket.values:
            bucket.values = flat
            for name in bucket.layout.names:
                self._pieces[name].data = self._piece(bucket, name).data

    @in_plain_mode
    def _show_masters(self, bucket: Bucket) -> None:
        assert bucket.master is not None
        bucket.whole = bucket.master.new_empty(bucket.layout.padded_numel)
        tag = f"master weights of bucket {bucket.index}"
        self.comm.all_gather(bucket.whole, bucket.master, bounds=bucket.layout.bounds, tag=tag).wait()
        self._show(bucket, bucket.whole)

    def drop(self) -> None:
        """As the base."""
        super().drop()
        for bucket in self.buckets:
            bucket.means = None

    def holdings(self) -> Iterator[Holding]:
        """As the base."""
        wholes = (bucket.whole for bucket in self.buckets)
        yield from (Holding(Role.GATHERED_PARAMETER, whole) for whole in wholes if whole is not None)
        yield from (Holding(Role.PARAMETER, bucket.values) for bucket in self.buckets)
        for name, param in self.params.items():
            yield Holding(Role.PARAMETER, param, name, (0, param.numel()))
        for bucket in self.buckets:
            if bucket.master is not None:
                yield Holding(Role.MASTER_WEIGHT, bucket.master)
                for name, piece in bucket.tensors.own.items():
                    span = (piece.param_start, piece.param_stop)
                    yield Holding(Role.MASTER_WEIGHT, self._pieces[name], name, span)
        for bucket in self.buckets:
            yield from self.gradients_of(bucket)
        others = (tensor.grad for tensor in (*self.params.values(), *self._pieces.values()))
        yield from (Holding(Role.GRADIENT, gradient) for gradient in others if gradient is not None)

    def gradients_of(self, bucket: Bucket) -> Iterator[Holding]:
        """What this rank holds of the gradients of a bucket: the buffer, whole."""
        if bucket.buffer is not None:
            yield Holding(Role.GRADIENT, bucket.buffer)
            for name, view in zip(bucket.layout.names, bucket.slots(bucket.buffer), strict=True):
                yield Holding(Role.GRADIENT, view, name, (0, view.numel()))
        if bucket.means is not None:
            yield Holding(Role.GRADIENT, bucket.means)


def _is_elsewhere(param: Tensor, view: Tensor) -> bool:
    return param.data_ptr() != view.data_ptr() or param.stride() != view.stride()


def _share(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
