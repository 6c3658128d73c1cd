"""ZeRO-1: the optimizer state is sharded; parameters and gradients are whole on every rank.

What differs from ``bucketed``: the verb. A bucket is reduce-scattered instead of all-reduced, so each rank receives the
mean of its own chunk only. It steps that chunk, keeps optimizer state for it alone, and all-gathers the parameters
after the step (``flat_parameters.py``). An all-reduce is a reduce-scatter and an all-gather, so the wire carries the
same 2P(N-1)/N elements.

Per rank for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P/N state; P includes what pads each bucket to
a multiple of N. The chunk is reduced inside the bucket, where it is a slice; the rest of the bucket then holds this
rank's own, stale gradients. So the means are the ``.grad`` of ``step_tensors()``, and ``param.grad`` after backward is
a placeholder that refuses to be used (``stepped_in_pieces.py``). With a 16-bit ``precision`` parameters are 2P, with
4P/N master weights, and the gather has fewer bytes; ``precision.py`` has the table.
Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.events import Pending
from shardlab.engines.bucketed import Bucketed
from shardlab.engines.buckets import Bucket, build_buckets
from shardlab.engines.optimizer_fit import parse_partition
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.engines.stepped_in_pieces import SteppedInPieces
from shardlab.engines.unused_params import nobody_used
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.vocabulary import Partition


class ZeRO1(SteppedInPieces, Bucketed):
    """Replicated parameters and gradients, sharded optimizer state.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        bucket_bytes: capacity of a bucket in bytes.
        partition: 'elements', or whole parameters by 'round_robin', 'contiguous', 'balanced'.
        precision: 'full', 'bf16', 'fp16' or a ``Precision``. The optimizer steps master weights; gradients add up in
            the dtype they are reduced in, also inside ``no_sync()``, unless they are computed in one with more bits.
    """

    name = "zero1"

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: OptimizerFn,
        mesh: BaseMesh | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        partition: Partition | str = Partition.ELEMENTS,
        precision: Precision | str = "full",
    ) -> None:
        self.partition, self.precision = parse_partition(partition), parse_precision(precision)
        super().__init__(model, optimizer_fn, mesh, bucket_bytes=bucket_bytes)

    @override
    def _build_buckets(self) -> list[Bucket]:
        comm = self.comm
        return build_buckets(self.params, comm.num_ranks, self.bucket_bytes, self.partition, comm.rank)

    @override
    def _reduce(self, bucket: Bucket) -> Pending:
        assert bucket.buffer is not None
        bucket.chunk = self._new_chunk(bucket.buffer[bucket.own_chunk])
        tag = f"gradients of bucket {bucket.index}"
        return self.comm.reduce_scatter(bucket.buffer, bucket.chunk, bounds=bucket.layout.bounds, tag=tag)

    def _new_chunk(self, place: Tensor) -> Tensor:
        """Where this rank's chunk of the reduced gradients goes, [chunk]: to its ``place`` in the buffer."""
        return place

    @override
    def _take_means(self, bucket: Bucket) -> None:
        assert bucket.chunk is not None
        unused_here = {bucket.names[slot] for slot in bucket.unused}
        # With a precision these are sums, read before they become means: dividing a tiny one may give -0.
        unused = nobody_used({
            name: bucket.chunk[place] for name, place in bucket.places_in_chunk.items() if name in unused_here
        })  # fmt: skip
        if self.precision.reduce_dtype is not None:
            # The dtype that the optimizer steps; from here on this is what the rank holds of the gradients.
            bucket.chunk = bucket.chunk.to(bucket.pieces[bucket.names[0]].dtype).div_(self.comm.num_ranks)
        for name, place in bucket.places_in_chunk.items():
            piece = bucket.pieces[name]
            gradient = bucket.chunk[place].view(piece.shape)
            if piece.grad is not None:  # means of an earlier backward
                gradient.add_(piece.grad)
            elif name in unused:
                continue
            # In full precision a view of the bucket, whose buffer stays for it; the other chunks are stale.
            piece.grad = gradient

    @override
    def after_optimizer_step(self) -> None:
        """Put together what all ranks have stepped."""
        self._take_assigned()
        # Decided by what is due, which all ranks know: one that stepped nothing of a bucket must join its gather too.
        # What another optimizer has stepped may be in any bucket.
        self.flat_params.gather_step((lambda _: True) if self._ungathered_by else self._is_due)
        self._ungathered_by = ""
