"""The seconds of a training step of a transformer by what they are spent on: units, messages, and their replay.

    seconds = the replay (``replay``) of the layers' compute (``transformer``) and messages (``hardware``)

=======================  ==============================================================================================
part                     what is counted
=======================  ==============================================================================================
matrix products, ...     compute alone on the GPU, see ``transformer``
recomputation            the forward of recomputed layers again, up to its last product, where torch's checkpoint stops
                         (since 2.1); 'selective' of scores that are stored means the scores (2205.05198, section 5),
                         else every second product and all memory-bound work, as torchtitan does: results of the
                         other products and of attention are kept
copies of units          fully sharded: gathered parameters into place, gradients together and scaled: 4 bytes a
                         parameter in forward, 12 in backward, in 16 bits
tensor-parallel          4 all-reduces of b s h elements a layer and micro-batch, 2 more where it is recomputed; with
messages                 sequence parallelism each is a gather and a reduce-scatter. Nothing hides them, unless they are
                         sent in parts beside the products that need or make them: then the first part, what is
                         longer than products, and by how much these are slower beside the rest
optimizer step           40 bytes a parameter that this rank steps: Adam in 32 bits, norm and clipping; less where
                         less is kept of one
slowed by messages       compute beside a collective, see ``replay``
waiting for messages     nothing computes
waiting for the host     nothing computes, and no message is waited for: the next kernel is not launched yet
=======================  ==============================================================================================

The host launches, for a layer of GPT, of Llama, of either compiled: 14, 40, 14 kernels in forward, twice as many in
backward, those of forward again where it is recomputed; as long as 2 for a tensor-parallel message, and as 30 for the
hooks of a fully sharded unit in forward, 60 in backward, which nobody compiles. A kernel takes ``LAUNCH_SECONDS``.

A step with more than three micro-batches is replayed with two and three, and goes on as from the second to the third.

Sources: Rajbhandari et al., arXiv 1910.02054, sections 5 and 7; Zhao et al., arXiv 2304.11277, section 3; Korthikanti
et al., arXiv 2205.05198, table 2 and section 5; Narayanan et al., arXiv 2104.04473, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from shardlab.forecast.job import Job
from shardlab.forecast.replay import Replay, Schedule, Unit, host_is_behind, replay
from shardlab.forecast.transformer import ATTENTION, KERNELS, MEMORY, PRODUCTS, Costs, Parts
from shardlab.planner.rows import BEFORE_A_PASS
from shardlab.vocabulary import Collective, MeshAxis

RECOMPUTED, COPIES, TENSOR = "recomputation", "copies of units", "tensor-parallel messages"
OPTIMIZER, SLOWED, WAITED = "optimizer step", "slowed by messages", "waiting for messages"
HOST_BOUND = "waiting for the host"
# Of the host, Python and autograd included. Eager: 3.5 to 4.6 ms for the 120 kernels and 8 messages of a layer, chosen
# on steps of nanotron on one host; others measured 5 to 25 us an operation (jiahuanglin.xyz, lesson 18) and 45
# (facebookresearch/sam2, issue 768). A compiled wrapper and a graph launch next to no Python.
LAUNCH_SECONDS = {"eager": 30e-6, "compiled": 10e-6, "graph": 2e-6}
# Kernels that take as long; of a unit measured on an H200 with 100 small ones, whose host took 316 to 413 ms a step.
OF_MESSAGE, OF_UNIT = 2, 30
# For each byte that is kept of a parameter: of Adam's 16 in 32 bits 40 are moved, to read parameter, gradient, momentum
# and variance, to write all but the gradient, and for norm and clipping.
MOVED = 2.5
REPLAYED_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Factors:
    """By how much compute, the host, the links between hosts and attention are faster than the presets say."""

    compute: float = 1.0
    host: float = 1.0
    between: float = 1.0
    attention: float = 1.0


@lru_cache(maxsize=4096)  # who says how far forecasts miss asks for the same ones again and again
def step_parts(job: Job, factors: Factors) -> Parts:
    """Seconds of a step by what they are spent on; nobody changes them."""
    step = Step(job, factors)
    if factors.host < 1 and not step.waits_for_host:  # nor for a faster one
        return step_parts(job, replace(factors, host=1.0))
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
        self.host_factor = factors.host
        costs = Costs(job, self.card)
        self.bandwidth = costs.bandwidth
        self.layer = [self.whole_layer(costs, backward) for backward in (False, True)]
        self.head = [self.with_copies(costs.head(backward=back), self.job.root_params, back) for back in (False, True)]

    def whole_layer(self, costs: Costs, backward: bool) -> Parts:
        """A layer with its messages over the tensor axis, and forward again where it is recomputed."""
        job = self.job
        found = costs.layer(backward=backward)
        share = job.recomputed / job.layers if backward else 0.0
        if backward:
            found.add({RECOMPUTED: self.again_seconds(costs)})
        found.add({TENSOR: self.tensor_seconds(2 + 2 * share, found[PRODUCTS])})
        return self.with_copies(found, job.held_layer_params, backward)

    def again_seconds(self, costs: Costs) -> float:
        """Of what runs forward again in the backward of a layer."""
        job, forward = self.job, costs.layer()
        if job.recompute != "selective":
            return job.recomputed / job.layers * costs.recomputed()
        return forward[ATTENTION] if job.stores_scores else forward[PRODUCTS] / 2 + forward[MEMORY]

    def tensor_seconds(self, count: float, products: float) -> float:
        """Of so many sums over the tensor axis in a pass of a layer, as far as products do not hide them."""
        job, one = self.job, Collective.ALL_REDUCE
        verbs = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if job.sequence_parallel else (one,)
        num_bytes, per_host = job.tokens * job.hidden * job.itemsize, min(job.tensor, self.network.per_host)
        seconds = count * sum(self.network.seconds(verb, num_bytes, job.tensor, per_host) for verb in verbs)
        if not job.async_tensor:
            return seconds
        first = seconds / job.tensor
        beside = min(seconds - first, products)
        return seconds - (1 - self.card.contention) * beside

    def host_seconds(self, backward: bool) -> float:
        """That the host takes for a layer in a pass."""
        job = self.job
        share = job.recomputed / job.layers if backward else 0.0
        again = 1 + backward + share  # a forward's, as many times
        messages = OF_MESSAGE * (2 if job.sequence_parallel else 1) * 2 * (1 + share) if job.tensor > 1 else 0
        kind = "graph" if job.cuda_graph else "compiled" if job.compiled else "eager"
        found = (KERNELS[job.written] * again + messages) * self.launch_seconds(kind)
        return (found + self.hooks_seconds(backward)) / self.host_factor

    def launch_seconds(self, kind: str) -> float:
        """That the host takes to launch a kernel, if nobody measured it on this card."""
        return self.card.host_seconds.get(kind, LAUNCH_SECONDS[kind])

    def hooks_seconds(self, backward: bool) -> float:
        """That the host takes to gather and reduce a unit."""
        is_sharded = self.job.row.by_unit and self.job.data > 1 and not self.job.cuda_graph
        return OF_UNIT * (1 + backward) * self.launch_seconds("eager") if is_sharded else 0.0

    def with_copies(self, found: Parts, num_params: float, backward: bool) -> Parts:
        """With the copies of a fully sharded unit."""
        if self.job.row.by_unit and self.job.data > 1:
            moved = (6 if backward else 2) * self.job.itemsize * num_params / self.job.tensor
            found.add({COPIES: moved / self.bandwidth})
        return found

    def unit(self, name: str, costs: Sequence[Parts], num_params: float, messages: int, host: Sequence[float]) -> Unit:
        """A unit of the replay; costs and seconds of the host of forward and of backward."""
        elements = num_params / self.job.tensor
        gathered, reduced = elements * self.job.itemsize, elements * max(self.job.itemsize, self.job.kept.gradient)
        return Unit(name, costs[0].total(), costs[1].total(), gathered, reduced, messages, *host)

    @property
    def units(self) -> tuple[list[Unit], Unit]:
        """The layers, and the root."""
        job = self.job
        matrices = 5 if job.is_gated else 4  # query, key and value together
        host = [self.host_seconds(backward) for backward in (False, True)]
        units = [self.unit(f"layer {n}", self.layer, job.held_layer_params, matrices, host) for n in range(job.layers)]
        hooks = [self.hooks_seconds(backward) / self.host_factor for backward in (False, True)]
        return units, self.unit("root", self.head, job.root_params, 2 if job.is_gated else 1, hooks)

    @property
    def waits_for_host(self) -> bool:
        """Whether the device may: False needs no replay."""
        layers, root = self.units
        return host_is_behind([*layers[:1], root])

    @property
    def sent_share(self) -> float:
        """Seconds of a layer's messages in a micro-batch, one by one, over those of its compute alone, on average."""
        row, sizes, layer = self.job.row, self.job.sizes, self.units[0][0]
        passes = self.job.accumulation if self.job.keeps_whole_gradients else 1  # for one reduction
        sent = [(one, layer.gathered_bytes, 1.0 + row.regathers) for one in row.gathered(BEFORE_A_PASS, sizes)]
        sent += [(one, layer.reduced_bytes, 1 / passes) for one in row.reduced(sizes)]
        seconds = sum(times * self.message_seconds(op, at, whole * part) for (op, at, part), whole, times in sent)
        return seconds / (layer.forward_seconds + layer.backward_seconds)

    def replayed(self, micro_batches: int) -> Replay:
        """The step with so many micro-batches."""
        job, (units, root) = self.job, self.units
        schedule = Schedule(
            job.row, job.sizes, micro_batches=micro_batches, reduces_each=not job.no_sync,
            optimizer_seconds=self.optimizer_seconds, contention=self.card.contention,
        )  # fmt: skip
        return replay(units, schedule, cache(self.message_seconds), root)

    @property
    def optimizer_seconds(self) -> float:
        """Of the optimizer's step."""
        return self.job.held_params / self.job.tensor / self.job.shards * self.job.kept.total * MOVED / self.bandwidth

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
        waits = {SLOWED: done.slowed_seconds, WAITED: done.exposed_seconds, HOST_BOUND: done.host_seconds}
        return found.add({OPTIMIZER: self.optimizer_seconds, **waits})
