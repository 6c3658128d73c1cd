"""The seconds of a training step of a transformer by what they are spent on: units, messages, and their replay.

    seconds = the replay (``replay``) of the layers' compute (``transformer``) and messages (``hardware``)

=======================  ==============================================================================================
part                     what is counted
=======================  ==============================================================================================
matrix products, ...     compute alone on the GPU, see ``transformer``
recomputation            the forward of recomputed layers, again, before their backward; 'selective' of scores
                         that are stored means the scores (2205.05198, section 5), else half of the forward, which is
                         what selective checkpointing in torchtitan (every second product) and fms-fsdp comes to
copies of units          fully sharded: gathered parameters into place, gradients together and scaled: 4 bytes a
                         parameter in forward, 12 in backward, in 16 bits
tensor-parallel          4 all-reduces of b s h elements a layer and micro-batch, 2 more where it is recomputed; nothing
messages                 hides them
optimizer step           40 bytes a parameter that this rank steps: Adam in 32 bits, norm and clipping
slowed by messages       compute beside a collective, see ``replay``
waiting for messages     nothing computes
=======================  ==============================================================================================

A step with more than three micro-batches is replayed with two and three, and goes on as from the second to the third.

Sources: Rajbhandari et al., arXiv 1910.02054, sections 5 and 7; Zhao et al., arXiv 2304.11277, section 3; Korthikanti
et al., arXiv 2205.05198, table 2 and section 5; Narayanan et al., arXiv 2104.04473, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral

from shardlab.planner.hardware import COMPUTE_PRECISIONS, Hardware, Network, hardware_named, network_of
from shardlab.planner.replay import FULLY_SHARDED, REPLAYED, Replay, Schedule, Unit, replay
from shardlab.planner.transformer import ATTENTIONS, Costs, Parts, Shape
from shardlab.vocabulary import Collective, MeshAxis

RECOMPUTED, COPIES, TENSOR = "recomputation", "copies of units", "tensor-parallel messages"
OPTIMIZER, SLOWED, WAITED = "optimizer step", "slowed by messages", "waiting for messages"
STEPPED_BYTES = 40  # read parameter, gradient, momentum, variance; write all but the gradient; norm and clipping
REPLAYED_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Job:
    """The arguments of ``predict_step``, checked; see there."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    micro_batch: int
    data: int
    accumulation: int = 1
    tensor: int = 1
    strategy: str = "fsdp"
    precision: str = "bf16"
    recompute: int | str = 0
    hardware: str = "a100-80gb"
    network: str | None = None
    gated: bool | None = None
    compiled: bool = False
    attention: str | None = None

    def __post_init__(self) -> None:
        """Check what a user can get wrong."""
        counts = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len", "micro_batch", "data")
        for field in (*counts, "accumulation", "tensor"):
            _require_whole(field, getattr(self, field), 1)
        for field, allowed in {
            "strategy": REPLAYED, "precision": COMPUTE_PRECISIONS, "attention": (None, *ATTENTIONS)
        }.items():  # fmt: skip
            if (value := getattr(self, field)) not in allowed:
                raise ValueError(f"{field}: {value!r} is not one of {', '.join(filter(None, allowed))}")
        for divisor, field in (("heads", "hidden"), ("kv_heads", "heads"), ("tensor", "heads"), ("tensor", "ffn")):
            if (value := getattr(self, field)) % (by := getattr(self, divisor)):
                raise ValueError(f"{divisor}: {by} is given; it must divide {field}, {value}")
        if self.strategy == "single" and self.data > 1:
            raise ValueError(f"data: {self.data} is given; 'single' trains on 1")
        if self.recompute not in ("full", "selective") and self.recompute not in range(self.layers + 1):
            raise ValueError(f"recompute: {self.recompute!r} is not 0 to {self.layers} layers, 'full' or 'selective'")
        if self.strategy == "hybrid_shard" and self.data % self.shards:
            raise ValueError(f"data: {self.data} is given; hosts of {self.shards} data ranks must divide it")

    @cached_property
    def card(self) -> Hardware:
        """The GPU."""
        return hardware_named(self.hardware)

    @cached_property
    def links(self) -> Network:
        """The network."""
        return network_of(self.network, self.card)

    @property
    def is_gated(self) -> bool:
        """Whether layers have the form of Llama; by default unless the MLP is four times as wide as the residual."""
        return self.ffn != 4 * self.hidden if self.gated is None else self.gated

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations in compute, and of what messages carry."""
        return 4 if self.precision == "tf32" else 2

    @cached_property
    def recomputed(self) -> float:
        """Layers that are recomputed, or what is as much work: 'selective' is half of all, or the scores alone."""
        if not isinstance(self.recompute, str):
            return self.recompute
        return self.layers if self.recompute == "full" else 0 if self.shape.attention == "unfused" else self.layers / 2

    @cached_property
    def per_host(self) -> int:
        """Ranks of the data axis on a host."""
        return max(1, self.links.per_host // self.tensor)

    @cached_property
    def shards(self) -> int:
        """Ranks that share parameters, gradients or state."""
        if self.strategy == "hybrid_shard":
            return min(self.data, self.per_host)
        return 1 if self.strategy in ("single", "ddp", "bucketed") else self.data

    @cached_property
    def shape(self) -> Shape:
        """What a rank computes."""
        sizes = (self.hidden, self.layers, self.heads, self.kv_heads, self.ffn, self.vocab, self.seq_len)
        kernel = self.attention or ("flash-2" if self.is_gated else "flash-1")
        return Shape(*sizes, self.micro_batch, self.tensor, self.is_gated, self.compiled, kernel)

    @property
    def tokens_per_step(self) -> int:
        """Of a step, over all ranks."""
        return self.micro_batch * self.accumulation * self.data * self.seq_len

    @property
    def seconds_at_peak(self) -> float:
        """Of a step whose GPUs did nothing but what the model needs, without recomputation, at their peak.

        A token needs 6 FLOPs a parameter and 12 h s L of attention: Chowdhery et al., arXiv 2204.02311, appendix B.
        """
        token = 6 * num_params(self.shape) + 12 * self.hidden * self.seq_len * self.layers
        return token * self.tokens_per_step / (self.card.peaks[self.precision] * self.data * self.tensor)

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the model's FLOPs reach in a step of so many seconds."""
        return self.seconds_at_peak / seconds


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
        self.job, self.shape = job, job.shape
        self.card = job.card.faster(factors.compute, factors.attention)
        self.network = replace(job.links, factor=factors.between)
        costs = Costs(self.shape, self.card, job.precision, job.itemsize)
        self.bandwidth = costs.bandwidth
        self.layer = [self.whole_layer(costs, backward) for backward in (False, True)]
        self.head = [
            self.with_copies(costs.head(backward=back), self.shape.root_params, back) for back in (False, True)
        ]

    def whole_layer(self, costs: Costs, backward: bool) -> Parts:
        """A layer with its messages over the tensor axis, and forward again where it is recomputed."""
        job, shape = self.job, self.shape
        found = costs.layer(backward=backward)
        share = job.recomputed / job.layers if backward else 0.0
        if share:
            found.add({RECOMPUTED: share * costs.layer().total()})
        elif backward and job.recompute == "selective" and shape.attention == "unfused":
            found.add({RECOMPUTED: costs.attention(backward=False).total()})
        sums = shape.tokens * shape.hidden * job.itemsize
        of_one = self.network.seconds(Collective.ALL_REDUCE, sums, job.tensor, min(job.tensor, self.network.per_host))
        found.add({TENSOR: (2 + 2 * share) * of_one})
        return self.with_copies(found, shape.layer_params, backward)

    def with_copies(self, found: Parts, num_params: float, backward: bool) -> Parts:
        """With the copies of a fully sharded unit."""
        if self.job.strategy in FULLY_SHARDED and self.job.data > 1:
            moved = (6 if backward else 2) * self.job.itemsize * num_params / self.job.tensor
            found.add({COPIES: moved / self.bandwidth})
        return found

    def unit(self, name: str, costs: Sequence[Parts], num_params: float, messages: int) -> Unit:
        """A unit of the replay."""
        num_bytes = num_params / self.job.tensor * self.job.itemsize
        return Unit(name, costs[0].total(), costs[1].total(), num_bytes, num_bytes, messages)

    def replayed(self, micro_batches: int) -> Replay:
        """The step with so many micro-batches."""
        job, shape = self.job, self.shape
        matrices = 5 if shape.gated else 4  # query, key and value together
        units = [self.unit(f"layer {n}", self.layer, shape.layer_params, matrices) for n in range(job.layers)]
        root = self.unit("root", self.head, shape.root_params, 2 if shape.gated else 1)
        each = job.strategy in (*FULLY_SHARDED, "zero3")
        schedule = Schedule(
            job.strategy, micro_batches=micro_batches, reduces_each=each, shard_group_size=job.shards,
            optimizer_seconds=self.optimizer_seconds, contention=self.card.contention,
        )  # fmt: skip
        return replay(units, schedule, self.message_seconds, root)

    @property
    def optimizer_seconds(self) -> float:
        """Of the optimizer's step."""
        return num_params(self.shape) / self.job.tensor / self.job.shards * STEPPED_BYTES / self.bandwidth

    def message_seconds(self, op: Collective, axis: MeshAxis, num_bytes: float) -> float:
        """Of a message over an axis."""
        job = self.job
        size, per_host = job.data, job.per_host
        if axis == MeshAxis.SHARD:
            size = job.shards
        elif axis == MeshAxis.REPLICA:
            # As many replicas' rings between two hosts as there are shards, each with the link of one GPU.
            size, per_host = job.data // job.shards, 1
        return self.network.seconds(op, num_bytes, size, per_host)

    def parts(self, micro_batches: int) -> Parts:
        """Seconds of the step by what they are spent on."""
        done, found = self.replayed(micro_batches), Parts()
        for layer, head in zip(self.layer, self.head, strict=True):
            found.add(layer, self.job.layers * micro_batches).add(head, micro_batches)
        waits = {SLOWED: done.slowed_seconds, WAITED: done.exposed_seconds}
        return found.add({OPTIMIZER: self.optimizer_seconds, **waits})


def num_params(shape: Shape) -> float:
    """Parameters of the whole model."""
    return shape.layers * shape.layer_params + shape.root_params


def _require_whole(field: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{field}: {value!r} is given; it must be a whole number from {minimum} on")
