"""The seconds of a training step of a transformer by what they are spent on: units, messages, and their replay.

    seconds = the replay (``replay``) of the layers' compute (``transformer``) and messages (``hardware``)

=======================  ==============================================================================================
part                     what is counted
=======================  ==============================================================================================
matrix products, ...     compute alone on the GPU, see ``transformer``
recomputation            the forward of recomputed layers again, up to its last product, where torch's checkpoint stops
                         (since 2.1); 'selective' of scores that are stored means the scores (2205.05198, section 5),
                         else half of the forward, which is what selective checkpointing in torchtitan (every second
                         product) and fms-fsdp comes to
copies of units          fully sharded: gathered parameters into place, gradients together and scaled: 4 bytes a
                         parameter in forward, 12 in backward, in 16 bits
tensor-parallel          4 all-reduces of b s h elements a layer and micro-batch, 2 more where it is recomputed; nothing
messages                 hides them
optimizer step           40 bytes a parameter that this rank steps: Adam in 32 bits, norm and clipping; less where
                         less is kept of one
slowed by messages       compute beside a collective, see ``replay``
waiting for messages     nothing computes
=======================  ==============================================================================================

A step with more than three micro-batches is replayed with two and three, and goes on as from the second to the third.

Sources: Rajbhandari et al., arXiv 1910.02054, sections 5 and 7; Zhao et al., arXiv 2304.11277, section 3; Korthikanti
et al., arXiv 2205.05198, table 2 and section 5; Narayanan et al., arXiv 2104.04473, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from shardlab.forecast.job import Job
from shardlab.forecast.replay import Replay, Schedule, Unit, replay
from shardlab.forecast.transformer import Costs, Parts
from shardlab.vocabulary import Collective, MeshAxis

RECOMPUTED, COPIES, TENSOR = "recomputation", "copies of units", "tensor-parallel messages"
OPTIMIZER, SLOWED, WAITED = "optimizer step", "slowed by messages", "waiting for messages"
# For each byte that is kept of a parameter: of Adam's 16 in 32 bits 40 are moved, to read parameter, gradient, momentum
# and variance, to write all but the gradient, and for norm and clipping.
MOVED = 2.5
REPLAYED_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Factors:
    """By how much compute, the links between hosts and attention are faster than the presets say."""

    compute: float = 1.0
    between: float = 1.0
    attention: float = 1.0


def step_parts(job: Job, factors: Factors) -> Parts:
    """Seconds of a step by what they are spent on."""
    step = Step(job, factors)
    if job.accumulation <= REPLAYED_MICRO_BATCHES:
        return step.parts(job.accumulation)
    second, third = step.parts(REPLAYED_MICRO_BATCHES - 1), step.parts(REPLAYED_MICRO_BATCHES)
    more = job.accumulation - REPLAYED_MICRO_BATCHES
    return Parts(third).add(third, more).add(second, -more)


class Step:
    """Units, messages and parts of a job."""

    def __init__(self, job: Job, factors: Factors) -> None:
        self.job = job
        self.card = job.card.faster(factors.compute, factors.attention)
        self.network = replace(job.links, factor=factors.between)
        costs = Costs(job, self.card)
        self.bandwidth = costs.bandwidth
        self.layer = [self.whole_layer(costs, backward) for backward in (False, True)]
        self.head = [self.with_copies(costs.head(backward=back), self.job.root_params, back) for back in (False, True)]

    def whole_layer(self, costs: Costs, backward: bool) -> Parts:
        """A layer with its messages over the tensor axis, and forward again where it is recomputed."""
        job = self.job
        found = costs.layer(backward=backward)
        share = job.recomputed / job.layers if backward else 0.0
        if share:
            again = costs.layer().total() if job.recompute == "selective" else costs.recomputed()
            found.add({RECOMPUTED: share * again})
        elif backward and job.recompute == "selective" and job.kernel == "unfused":
            found.add({RECOMPUTED: costs.attention(backward=False).total()})
        sums = job.tokens * job.hidden * job.itemsize
        of_one = self.network.seconds(Collective.ALL_REDUCE, sums, job.tensor, min(job.tensor, self.network.per_host))
        found.add({TENSOR: (2 + 2 * share) * of_one})
        return self.with_copies(found, job.layer_params, backward)

    def with_copies(self, found: Parts, num_params: float, backward: bool) -> Parts:
        """With the copies of a fully sharded unit."""
        if self.job.row.by_unit and self.job.data > 1:
            moved = (6 if backward else 2) * self.job.itemsize * num_params / self.job.tensor
            found.add({COPIES: moved / self.bandwidth})
        return found

    def unit(self, name: str, costs: Sequence[Parts], num_params: float, messages: int) -> Unit:
        """A unit of the replay."""
        elements = num_params / self.job.tensor
        gathered, reduced = elements * self.job.itemsize, elements * max(self.job.itemsize, self.job.kept.gradient)
        return Unit(name, costs[0].total(), costs[1].total(), gathered, reduced, messages)

    def replayed(self, micro_batches: int) -> Replay:
        """The step with so many micro-batches."""
        job = self.job
        matrices = 5 if job.is_gated else 4  # query, key and value together
        units = [self.unit(f"layer {n}", self.layer, job.layer_params, matrices) for n in range(job.layers)]
        root = self.unit("root", self.head, job.root_params, 2 if job.is_gated else 1)
        schedule = Schedule(
            job.row, job.sizes, micro_batches=micro_batches, reduces_each=not job.no_sync,
            optimizer_seconds=self.optimizer_seconds, contention=self.card.contention,
        )  # fmt: skip
        return replay(units, schedule, cache(self.message_seconds), root)

    @property
    def optimizer_seconds(self) -> float:
        """Of the optimizer's step."""
        return self.job.num_params / self.job.tensor / self.job.shards * self.job.kept.total * MOVED / self.bandwidth

    def message_seconds(self, op: Collective, axis: MeshAxis, num_bytes: float) -> float:
        """Of a message over an axis."""
        # As many replicas' rings between two hosts as there are shards, each with the link of one GPU.
        per_host = 1 if axis == MeshAxis.REPLICA else self.job.per_host
        return self.network.seconds(op, num_bytes, self.job.sizes[axis], per_host)

    def parts(self, micro_batches: int) -> Parts:
        """Seconds of the step by what they are spent on."""
        done, found = self.replayed(micro_batches), Parts()
        for layer, head in zip(self.layer, self.head, strict=True):
            found.add(layer, self.job.layers * micro_batches).add(head, micro_batches)
        waits = {SLOWED: done.slowed_seconds, WAITED: done.exposed_seconds}
        return found.add({OPTIMIZER: self.optimizer_seconds, **waits})
