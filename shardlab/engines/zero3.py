"""ZeRO-3, explicit: parameters, gradients and optimizer state are sharded; at rest nothing is whole.

What differs from ``zero2``: the parameters are sharded too, from construction on. All buckets are gathered, one after
another, before forward computes, and resharded after it; the same again around backward. (The paper gathers layer by
layer and frees each after use: the same bytes at rest and on the wire, but a lower peak. Gathering in parts is what
``fsdp`` adds.) Since the gathered weights are freed after forward, autograd must not save them: it saves which part of
which parameter it needs (``saved_tensors.py``), and between uses the module has a placeholder for each parameter
(``placeholder.py``). The step works on shards and needs no gather after it. A bucket now owns the memory of parameters
(``ShardedBucket``), so this engine shares with ``zero2`` which parameters go together and how they are cut, and nothing
of what buckets do. Nothing overlaps: gradients are reduce-scattered when backward has ended, so plain loops over the
buckets keep the order and no queue is needed. ``zero2`` did overlap, and ``fsdp`` does again: it gathers and reduces
unit by unit, while others compute.

Per rank for P fp32 parameters with Adam: at rest 4P/N parameters, 4P/N gradients, 8P/N state; P includes what
pads each bucket to a multiple of N. In forward and backward another 4P of gathered parameters, and in backward up to
another 4P of whole gradients, which ``no_sync()`` keeps until a backward communicates. On the wire P(N-1)/N for each
gather and for the reduce-scatter: 3P(N-1)/N elements a step. With ``precision='bf16'`` gathered parameters and whole
gradients have 2 bytes an element. At rest nothing changes, since the shards are the master weights: 16P/N, as in the
paper, which counts 2 + 2 for parameters and gradients and 12 for the rest.
Source: Rajbhandari et al., arXiv 1910.02054, section 5.3.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.trees import tensors_in
from shardlab.engines.buckets import bucket_layouts
from shardlab.engines.held_parameters import reshard_all
from shardlab.engines.hooks import untraced
from shardlab.engines.optimizer_fit import parse_partition
from shardlab.engines.placeholder import sites_of, without_parameters
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.saved_tensors import saved_by_reference
from shardlab.engines.sharded_bucket import ShardedBucket
from shardlab.engines.sharded_engine import ShardedEngine
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.partition.flat import FlatLayout
from shardlab.vocabulary import Partition


class ZeRO3(ShardedEngine):
    """Sharded parameters, gradients and optimizer state; synchronous.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        bucket_bytes: parameters gathered in one message, in bytes.
        partition: 'elements', or whole parameters by 'round_robin', 'contiguous', 'balanced'.
        precision: 'full', 'bf16', 'fp16' or a ``Precision``. The shards are the master weights; inside ``no_sync()``
            gradients add up in the compute dtype.
    """

    name = "zero3"
    _in_forward = False

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
        self.bucket_bytes = bucket_bytes
        self.partition, self.precision = parse_partition(partition), parse_precision(precision)
        super().__init__(model, optimizer_fn, mesh)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather, run the module's forward, reshard."""
        # First: what a backward that raised has left is resharded. The base does this too, but only after the gather.
        self._before_forward()
        with self._gathered(in_forward=True), saved_by_reference(self.buckets):
            output = without_parameters(super().__call__(*args, **kwargs), set(self.params.values()))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # For a plain loss.backward(): all ranks gather everything, so it does not matter what each has used.
                # Registered after the watch's hook, so that it runs after it: a backward that is refused gathers
                # nothing. (With a precision this hook is on the output after its cast and so runs first: there a
                # refused backward has gathered.)
                tensor.register_hook(lambda _: self.unshard_params())
        return output

    @override
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gather, run backward, reshard, and reduce-scatter (unless inside ``no_sync()``)."""
        with self._gathered():
            super().backward(loss, retain_graph)

    @untraced
    def unshard_params(self) -> None:
        """Gather the full parameters into the module, bucket after bucket."""
        for bucket in self.buckets:
            bucket.unshard()

    @untraced
    def reshard_params(self) -> None:
        """Reshard them; a computation with one then raises an error that names it."""
        reshard_all(self.buckets)

    @override
    def _make_buckets(self) -> list[ShardedBucket]:
        sites = sites_of(self.module, self.params)
        layouts = bucket_layouts(self.params, self.comm.num_ranks, self.bucket_bytes, self.partition)

        def bucket(index: int, layout: FlatLayout) -> ShardedBucket:
            params = {name: self.params[name] for name in layout.names}
            return ShardedBucket(f"bucket {index}", params, sites, layout, self.comm, self.precision)

        return [bucket(index, layout) for index, layout in enumerate(layouts)]

    @override
    def _reduce_gradients(self) -> None:
        try:
            self._clean_up_backward()  # first, so that no buffer of a reduction comes on top of the full parameters
        finally:  # also if that refuses a parameter that was written to: the other ranks wait for this one's gradients
            # One after another, so that only one such buffer is in memory at a time.
            for bucket in self.buckets:
                if any(self._is_due(param) for param in bucket.params.values()):
                    bucket.start_reduce()
                    bucket.finish_reduce()
            # ``finish_gradients()`` sets this only if nothing is raised here; after a refusal the next call would send
            # everything again, without the other ranks.
            self._are_means = True

    @override
    def _clean_up_backward(self) -> None:
        # For a plain backward inside no_sync() or one that raised; after a reduction they are resharded already. (A
        # forward inside which a backward has run goes on with them.)
        if not self._in_forward:
            self.reshard_params()

    @contextlib.contextmanager
    def _gathered(self, *, in_forward: bool = False) -> Iterator[None]:
        """Inside, the parameters are gathered; at the end they are resharded, unless an outer call still needs them.

        That may be a backward, in which checkpointing computes this forward again, or a forward that runs this backward
        itself.
        """
        was_in_forward = self._in_forward
        is_outermost = not (was_in_forward or self._backward_watch.is_inside)
        self._in_forward = in_forward or was_in_forward
        try:
            self.unshard_params()  # it may refuse after a part of them
            yield
        finally:
            self._in_forward = was_in_forward
            if is_outermost:
                self.reshard_params()
