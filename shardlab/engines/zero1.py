"""ZeRO-1: the optimizer state is sharded; parameters and gradients are whole on every rank.

What changes against ``bucketed``: the verb. A bucket is reduce-scattered instead of all-reduced, so each rank receives
the mean of its own chunk only; it steps that chunk, keeps optimizer state for it alone, and all-gathers the parameters
after the step. An all-reduce is a reduce-scatter and an all-gather, so the wire carries the same 2P(N-1)/N elements.

Per rank for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P/N state (P with the padding of each bucket to
a multiple of N). The chunk is reduced inside the bucket, where it is a slice; the rest of the bucket then holds this
rank's own, stale gradients, so the means are the ``.grad`` of ``step_tensors()``, and what stands at ``param.grad``
after backward refuses to be used. With a 16-bit ``precision`` parameters are 2P, beside 4P/N master weights, and both
messages have fewer bytes; the table is in ``precision.py``.
Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh, Pending
from shardlab.engines.agreement import all_or_none
from shardlab.engines.base import OptimizerFn
from shardlab.engines.bucketed import Bucketed
from shardlab.engines.buckets import DEFAULT_BUCKET_BYTES, Bucket, build_buckets
from shardlab.engines.holdings import ShardRow, held, in_whole_parameters
from shardlab.engines.optimizer_fit import check_partition, refused_by_partition
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.rounded_parameters import RoundedParameters
from shardlab.engines.sharded_optimizer import parse_partition
from shardlab.engines.stand_in_gradients import StandInGradient, StandInGradients
from shardlab.engines.step_tensors import StepTensors
from shardlab.engines.unused import nobody_used
from shardlab.vocabulary import Partition, Role


class ZeRO1(RoundedParameters, Bucketed):
    """Replicated parameters and gradients, sharded optimizer state.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        bucket_bytes: capacity of a bucket in bytes.
        partition: how a bucket is divided over the ranks, see ``ShardedOptimizer``.
        precision: 'full', 'bf16', 'fp16' or a ``Precision``. The optimizer steps master weights; gradients add up in
            the dtype they are reduced in, inside ``no_sync()`` too, unless they are computed in one of more bits.
    """

    name = "zero1"
    shards_gradients = True

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

    def step(self) -> None:
        """Step this rank's pieces, then gather the parameters."""
        self._stand_ins.check()
        self._update_masters()
        super().step()
        self.shards.gather(self._is_due)

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        for tensor in self.step_tensors():
            tensor.grad = None
        self._stand_ins.take_away()

    def close(self) -> None:
        """As the base."""
        self._stand_ins.close()
        super().close()

    def step_tensors(self) -> StepTensors:
        """This rank's pieces, by name, in the module's order."""
        return self.shards.tensors

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The ranks that step a piece of each parameter, in the module's order."""
        return self.shards.owners()

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) of each flattened parameter that this rank steps; only what it does step."""
        return self.shards.owned()

    @property
    def padding_bytes(self) -> int:
        """Bytes of one copy of the parameters that are padding, over all buckets."""
        return sum(bucket.padding_bytes for bucket in self.buckets)

    def shard_map(self) -> list[ShardRow]:
        """Whole parameters and gradients, and the pieces of the optimizer state."""
        return in_whole_parameters(self._rows(), self.slices)

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """As ``Bucketed``, with the padding of the flat parameters."""
        live = super().live_tensors()
        live[Role.PARAMETER] += self.shards.flat
        live[Role.GRADIENT] = [held for held in live[Role.GRADIENT] if not isinstance(held, StandInGradient)]
        live[Role.GRADIENT] += [tensor.grad for tensor in self.step_tensors() if tensor.grad is not None]
        return live

    def _prepare(self) -> None:
        super()._prepare()
        for bucket in self.buckets:
            bucket.gradient_dtype = self.precision.reduce_dtype_of(bucket.params[0])
        if self.precision.reduce_dtype is not None:
            self._scale = 1.0  # sums are divided when they have the master weights' dtype
        self.shards = self._shards_of_parameters(self.buckets)
        self._cast_buffers()
        self.shards.tensors.are_parts |= bool(self.slices)
        self._stand_ins = StandInGradients(self.params)

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        try:
            if self.comm.num_ranks == 1:
                return super()._make_optimizer(optimizer_fn)
            # Pieces differ by rank, so one rank's may be refused and another's not: then all refuse.
            return all_or_none(self.comms, self.mesh.device, lambda: self._make_of_pieces(optimizer_fn))
        except Exception:
            self._give_back()  # all ranks have raised, so all come to the gathers
            raise

    def _make_of_pieces(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        stepped, num_ranks = self._stepped(), self.comm.num_ranks
        with refused_by_partition(optimizer_fn, stepped, self.partition, num_ranks):
            optimizer = super()._make_optimizer(optimizer_fn)
        check_partition(optimizer, stepped, self.partition, num_ranks)
        return optimizer

    def _build_buckets(self) -> list[Bucket]:
        return build_buckets(self.params, self.comm.num_ranks, self.bucket_bytes, self.partition)

    def _reduce(self, bucket: Bucket) -> Pending:
        assert bucket.buffer is not None
        return self.comm.reduce_scatter(
            bucket.buffer, bounds=bucket.layout.bounds, tag=f"gradients of bucket {bucket.index}"
        )

    def _take_means(self, bucket: Bucket) -> None:
        sums, offset = self._chunk(bucket), bucket.layout.chunk(self.comm.rank)[0]
        unused_here = {bucket.names[slot] for slot in bucket.unused}
        places = {
            piece.name: slice(piece.flat_start - offset, piece.flat_stop - offset)
            for piece in bucket.layout.pieces(self.comm.rank)
        }
        # Before the sums become means: a tiny one may be -0 then.
        unused = {name for name, place in places.items() if name in unused_here and nobody_used(sums[place])}
        means = self._means_of(bucket)
        for name, place in places.items():
            tensor = self.shards.tensors.by_name(name)
            gradient = means[place].view(tensor.shape)
            if tensor.grad is not None:  # means of an earlier backward
                gradient.add_(tensor.grad)
            elif name in unused:
                continue
            tensor.grad = gradient

    def _begin_backward(self) -> None:
        self._stand_ins.check()
        self._stand_ins.take_away()
        super()._begin_backward()

    def _finish_gradients(self) -> None:
        super()._finish_gradients()
        self._stand_ins.place()

    def _keep_means(self, bucket: Bucket) -> None:
        # They lie in the bucket, which will be filled with this rank's new gradients.
        for piece in bucket.layout.pieces(self.comm.rank):
            tensor = self.shards.tensors.by_name(piece.name)
            tensor.grad = None if tensor.grad is None else tensor.grad.clone()

    def _means_of(self, bucket: Bucket) -> Tensor:
        """This rank's chunk of the means, in the dtype that the optimizer steps, [chunk]."""
        if self.precision.reduce_dtype is None:
            return self._chunk(bucket)
        dtype = self.shards.tensors.by_name(bucket.names[0]).dtype
        return self._chunk(bucket).to(dtype).div_(self.comm.num_ranks)

    def _chunk(self, bucket: Bucket) -> Tensor:
        """This rank's chunk of the reduced gradients, [chunk]."""
        assert bucket.buffer is not None
        start, stop = bucket.layout.chunk(self.comm.rank)
        return bucket.buffer[start:stop]

    def _rows(self) -> Iterator[ShardRow]:
        owned = self.owned()
        for bucket in self.buckets:
            for name, param in zip(bucket.names, bucket.params, strict=True):
                shape, piece = tuple(param.shape), self.shards.tensors.by_name(name)
                yield ShardRow(name, shape, Role.PARAMETER, bucket.index, 0, param.numel(), param.nbytes)
                yield from self._gradient_rows(bucket, name, param)
                for role, num_bytes in held(piece, self.optimizer.state.get(piece, {}), None):
                    if role is Role.OPTIMIZER_STATE:
                        yield ShardRow(name, shape, role, bucket.index, *owned[name], num_bytes)
                    elif piece.dtype != param.dtype and name in owned:
                        yield ShardRow(name, shape, Role.MASTER_WEIGHT, bucket.index, *owned[name], num_bytes)

    def _gradient_rows(self, bucket: Bucket, name: str, param: nn.Parameter) -> Iterator[ShardRow]:
        if bucket.buffer is not None:
            shape = tuple(param.shape)
            num_bytes = param.numel() * bucket.buffer.element_size()
            yield ShardRow(name, shape, Role.GRADIENT, bucket.index, 0, param.numel(), num_bytes)
