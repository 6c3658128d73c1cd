"""Data parallel in buckets: gradients travel while backward still computes.

What changes against ``ddp``: parameters are grouped in reverse order into flat buckets (25 MiB by default), a bucket is
all-reduced as soon as its last gradient is there, and each ``param.grad`` is a view of its bucket, so no gradient is
copied back. Bytes per rank and elements on the wire are those of ``ddp``; the messages are few, large and early.
Source: Li et al., arXiv 2006.15704, section 3.2.

Buckets are sent in the same order on every rank, whatever order their gradients come in: a bucket waits for the ones
before it. A parameter this rank did not use is sent as such when backward has ended (``unused.py``).
"""

from typing import Any

import torch
from torch import nn

from shardlab.comm import Mesh, Pending
from shardlab.engines.base import Engine, OptimizerFn
from shardlab.engines.buckets import DEFAULT_BUCKET_BYTES, Bucket, BucketState, build_buckets
from shardlab.engines.checks import second_backward
from shardlab.engines.holdings import ShardRow
from shardlab.vocabulary import Role


class Bucketed(Engine):
    """Replicated parameters; gradients are all-reduced bucket by bucket during backward.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        bucket_bytes: capacity of a bucket in bytes.
    """

    name = "bucketed"

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: OptimizerFn,
        mesh: Mesh | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is below 1")
        self.bucket_bytes = bucket_bytes
        super().__init__(model, optimizer_fn, mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; which parameters are frozen is looked at now."""
        for bucket in self.buckets:
            if bucket.state is not BucketState.IN_FLIGHT:
                bucket.arm()
        return super().__call__(*args, **kwargs)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
            bucket.state = BucketState.OPEN
            bucket.forget()
            bucket.arm()
        self._sending = False
        super().zero_grad()

    def shard_map(self) -> list[ShardRow]:
        """Every piece this rank holds, with the bucket its gradient travels in."""
        bucket_of = {name: bucket.index for bucket in self.buckets for name in bucket.names}
        return [
            ShardRow(row.parameter, row.shape, row.role, bucket_of[row.parameter], row.start, row.stop, row.num_bytes)
            for row in super().shard_map()
        ]

    def live_tensors(self) -> dict[Role, list[torch.Tensor]]:
        """As the base, and the buckets' buffers, which are the gradients' storage."""
        live = super().live_tensors()
        live[Role.GRADIENT] += [bucket.buffer for bucket in self.buckets if bucket.buffer is not None]
        return live

    def _prepare(self) -> None:
        self.buckets = self._build_buckets()
        self._place = {
            param: (bucket, slot) for bucket in self.buckets for slot, param in enumerate(bucket.params)
        }  # fmt: skip
        for bucket in self.buckets:
            bucket.arm()
        self._scale = 1 / self.comm.num_ranks
        self._sending = False  # some buckets have been sent, and not all have been waited for

    def _build_buckets(self) -> list[Bucket]:
        return build_buckets(self.params, num_ranks=1, capacity_bytes=self.bucket_bytes)

    def _on_gradient(self, param: nn.Parameter) -> None:
        super()._on_gradient(param)
        bucket, slot = self._place[param]
        if bucket.state is not BucketState.OPEN:
            self._come_again(bucket, param)
        gradient = param.grad
        assert gradient is not None
        if not self._sync:
            bucket.take(slot, gradient)
            return
        bucket.seal(slot, gradient, self._scale)
        bucket.waiting.discard(slot)
        if not bucket.waiting:
            self._send_complete()

    def _come_again(self, bucket: Bucket, param: nn.Parameter) -> None:
        """A gradient for a bucket that has been sent."""
        if self._sending:
            raise second_backward(self._name_of(param))
        if bucket.state is BucketState.REDUCED:
            self._reopen()

    def _send_complete(self) -> None:
        """Send the buckets that are complete, in order, up to the first that is not."""
        for bucket in self.buckets:
            if bucket.waiting:
                return
            if bucket.state is BucketState.OPEN and bucket.trainable:
                self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        self._sending = True
        bucket.fill(self._scale)
        bucket.pending = self._reduce(bucket)
        bucket.state = BucketState.IN_FLIGHT

    def _reduce(self, bucket: Bucket) -> Pending:
        """The strategy's verb."""
        assert bucket.buffer is not None
        return self.comm.all_reduce(bucket.buffer, tag=f"gradients of bucket {bucket.index}")

    def _finish_gradients(self) -> None:
        for bucket in self.buckets:
            if bucket.state is BucketState.OPEN and bucket.trainable:
                self._send(bucket)
        for bucket in self.buckets:
            self._complete(bucket)
        self._sending = False

    def _complete(self, bucket: Bucket) -> None:
        """Wait for a bucket that is in flight and take its means."""
        if bucket.pending is not None:
            bucket.pending.wait()
            bucket.pending = None
            bucket.state = BucketState.REDUCED
            self._reduced_bucket(bucket)

    def _reduced_bucket(self, bucket: Bucket) -> None:
        bucket.hand_out()

    def _reopen(self) -> None:
        """Another backward before ``zero_grad()``: its gradients are added to the means."""
        for bucket in self.buckets:
            bucket.state = BucketState.OPEN
            bucket.arm()
