"""ZeRO-3, explicit: parameters, gradients and optimizer state are sharded; at rest nothing is whole.

What differs from ``zero2``: the parameters are sharded too, from construction on. All buckets are gathered, one after
another, before forward computes, and resharded after it; the same again around backward. (The paper gathers layer by
layer and frees each after use: the same bytes at rest and on the wire, but a lower peak. Gathering in parts is what
``fsdp`` adds.) Since the gathered weights are freed after forward, autograd must not save them: it saves where in which
bucket they lie (``saved_tensors.py``). The step works on shards and needs no gather after it. Nothing overlaps:
gradients are reduce-scattered when backward has ended.

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
from dataclasses import replace

from shardlab.engines.sharded_strategy import ModuleHook, Sharded
from shardlab.engines.strategy import Given, LaidOut
from shardlab.engines.unit import Unit
from shardlab.engines.zero import ZeRO


class ZeRO3(ZeRO, Sharded):
    """Sharded parameters, gradients and optimizer state; synchronous. The shards are the master weights.

    Options as ``ZeRO``.
    """

    name = "zero3"

    def lay_out(self, given: Given) -> LaidOut:
        """The parameters are sharded, bucket by bucket; an output that is one of them is copied."""
        laid_out = super().lay_out(given)
        # An output that is a parameter is copied while its values are there.
        hook = ModuleHook(lambda _, __, output: self.without_parameters(output))
        return replace(laid_out, hooks=[given.module.register_forward_hook(hook)])

    def make_units(self, given: Given) -> list[Unit]:
        """Bucket by bucket."""
        comm, placements = self.divide(given)
        return [Unit(one.name, [one]) for one in self.make_shards(comm, placements, self.at)]

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Inside, all buckets are gathered."""
        with self.kept_gathered(), self.saving_by_reference():
            yield

    @contextlib.contextmanager
    def in_backward(self, *, sends: bool) -> Iterator[None]:
        """Inside, all buckets are gathered again."""
        self.note_writes()
        with self.kept_gathered():
            yield

    def make_means(self) -> None:
        """Reduce-scatter bucket by bucket: all is sent here, and nothing before."""
        # One after another, so that only one buffer of a reduction is in memory at a time.
        for unit in self.units:
            unit.reduce(self.is_due)
            unit.finish()
        super().make_means()
