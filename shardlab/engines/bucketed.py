"""Data parallel in buckets: gradients travel while backward still computes.

What differs from ``ddp``: parameters are grouped in reverse order into flat buckets (25 MiB by default), a bucket is
all-reduced as soon as its last gradient is there, and each ``param.grad`` is a view of its bucket, so no gradient is
copied back. Bytes per rank and elements on the wire are those of ``ddp``; the messages are few, large and early.
Source: Li et al., arXiv 2006.15704, section 3.2.

Buckets are sent in the same order on every rank, whatever order their gradients arrive in: a bucket waits for the ones
before it. A parameter that this rank did not use is sent as unused when backward has ended (``unused_params.py``).
"""

from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.events import Pending
from shardlab.engines.base import Engine
from shardlab.engines.buckets import Bucket, build_buckets
from shardlab.engines.checks import second_gradient
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.reduction_queue import ReductionQueue
from shardlab.engines.step_tensors import OptimizerFn, StepTensors
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
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
        mesh: BaseMesh | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        super().__init__(model, optimizer_fn, mesh)

    @override
    def _prepare(self) -> StepTensors:
        self.buckets = self._build_buckets()
        self._place = {
            param: (bucket, slot) for bucket in self.buckets for slot, param in enumerate(bucket.params)
        }  # fmt: skip
        self._scale = 1 / self.comm.num_ranks
        self._queue = ReductionQueue(self.buckets, self._is_due, self._send)
        return super()._prepare()

    def _build_buckets(self) -> list[Bucket]:
        return build_buckets(self.params, num_ranks=1, capacity_bytes=self.bucket_bytes)

    @override
    def _begin_backward(self) -> None:
        super()._begin_backward()
        for bucket in self.buckets:
            bucket.begin()
        self._queue.begin()

    @override
    def _on_gradient(self, param: nn.Parameter) -> None:
        super()._on_gradient(param)
        bucket, slot = self._place[param]
        gradient = param.grad
        if gradient is None:
            return  # a hook of the user's has dropped it: sent as unused when backward has ended
        if not self._sync:
            bucket.take(slot, gradient)
            return
        # Checked before sealing, which would write into a buffer that is being sent.
        if self._queue.is_sent(bucket):
            raise second_gradient(self._name_of(param))
        bucket.seal(slot, gradient, self._scale)
        self._queue.note(bucket, param, in_part=self._backward_watch.brings_parts)
        self._queue.send_complete()

    def _send(self, bucket: Bucket) -> None:
        bucket.fill(self._scale)
        bucket.pending = self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> Pending:
        """The strategy's verb."""
        assert bucket.buffer is not None
        return self.comm.all_reduce(bucket.buffer, tag=f"gradients of bucket {bucket.index}")

    @override
    def _reduce_gradients(self) -> None:
        # Send all before waiting for the first, so that their transfers overlap.
        self._queue.send_rest()
        for bucket in self.buckets:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Wait for a bucket that is being reduced, and take its means."""
        if bucket.pending is not None:
            # Waited for, and only then dropped: the handle keeps the buffer that is being written to.
            bucket.pending.wait()
            bucket.pending = None
            bucket.holds_means = True
            self._take_means(bucket)

    def _take_means(self, bucket: Bucket) -> None:
        bucket.hand_out()

    @override
    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        for bucket in self.buckets:
            bucket.forget()
        # Without this, a rank that steps without another backward would take everything for sent, and skip the
        # collectives that the others are in.
        self._queue.reset()

    @override
    def _complete_failed_backward(self) -> None:
        if self._are_means:
            # The backward was refused here before it began, so the queue still counts the one before it as sent; the
            # other ranks send every bucket.
            self._queue.reset()
        super()._complete_failed_backward()

    @override
    def divisions(self) -> list[Division]:
        """Bucket by bucket."""
        return [Division(bucket.layout, self.comm, bucket.params[0].element_size()) for bucket in self.buckets]

    @override
    def _gradient_holdings(self) -> Iterator[Holding]:
        yield from super()._gradient_holdings()
        yield from (Holding(Role.GRADIENT, bucket.buffer) for bucket in self.buckets if bucket.buffer is not None)
