"""A step of a transformer that is forecast: how large it is, how it is trained, on what, and what follows from that."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardlab.field_types import check_types
from shardlab.forecast.network import Network, network_of
from shardlab.forecast.replay import REPLAYED
from shardlab.partition.chunks import require_count
from shardlab.planner.formulas import Precision, precision_named
from shardlab.planner.gpu import COMPUTE_PRECISIONS, Gpu
from shardlab.planner.rows import ROWS, STATE, Row
from shardlab.vocabulary import MeshAxis

COUNTS = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len", "micro_batch", "data", "accumulation", "tensor",
    "head_dim", "window", "layer_numel", "root_numel",
)  # fmt: skip
ATTENTIONS = ("flash-1", "flash-2", "unfused", "op-by-op")


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
    cuda_graph: bool = False
    attention: str | None = None
    head_dim: int | None = None
    window: int | None = None
    windowed_layers: int = 0
    layer_numel: int | None = None
    root_numel: int | None = None
    no_sync: bool = False
    sequence_parallel: bool = True
    async_tensor: bool = False
    states: str = "mixed"

    def __post_init__(self) -> None:
        """Check what a user can get wrong."""
        check_types(self, besides=("recompute",))
        for field in COUNTS:
            if (value := getattr(self, field)) is not None:
                require_count(field, value, 1)
        for field, allowed in {
            "strategy": REPLAYED, "precision": COMPUTE_PRECISIONS, "attention": (None, *ATTENTIONS)
        }.items():  # fmt: skip
            if (value := getattr(self, field)) not in allowed:
                raise ValueError(f"{field}: {value!r} is not one of {', '.join(filter(None, allowed))}")
        if self.precision not in self.card.peaks:
            raise ValueError(f"precision: {self.precision} is given; {self.card.name} has {', '.join(self.card.peaks)}")
        divided = [("kv_heads", "heads"), ("tensor", "heads"), ("tensor", "ffn")]
        for divisor, field in divided if self.head_dim else [("heads", "hidden"), *divided]:
            if (value := getattr(self, field)) % (by := getattr(self, divisor)):
                raise ValueError(f"{divisor}: {by} is given; it must divide {field}, {value}")
        if self.row.alone and self.data > 1:
            raise ValueError(f"data: {self.data} is given; 'single' trains on 1")
        if self.recompute not in ("full", "selective") and self.recompute not in range(self.layers + 1):
            raise ValueError(f"recompute: {self.recompute!r} is not 0 to {self.layers} layers, 'full' or 'selective'")
        _ = self.kept  # raises
        if self.windowed_layers not in range(self.layers + 1):
            raise ValueError(f"windowed_layers: {self.windowed_layers!r} is not 0 to {self.layers} layers")
        if self.data % self.shards:
            raise ValueError(f"data: {self.data} is given; hosts of {self.shards} data ranks must divide it")
        if (ranks := self.data * self.tensor) > (host := self.links.per_host) and ranks % host:
            raise ValueError(f"network: {host} per host do not divide {ranks} ranks; give hosts with equally many")

    @property
    def row(self) -> Row:
        """What lives where."""
        return ROWS[self.strategy]

    @cached_property
    def card(self) -> Gpu:
        """The GPU."""
        return Gpu.preset(self.hardware)

    @cached_property
    def links(self) -> Network:
        """The network."""
        return network_of(self.network, self.card)

    @cached_property
    def assumed_gigabits(self) -> tuple[float, float] | None:
        """Least and most that is usual for a GPU's link between hosts, if the job needs one and no network says it."""
        is_needed = self.data * self.tensor > self.links.per_host
        return self.card.usual_gigabits if is_needed and self.links.is_assumed else None

    @cached_property
    def slowest(self) -> "Job":
        """The same over the least that is usual between hosts, where nobody said what is there."""
        least = f"{self.assumed_gigabits[0]:g}Gb/s per GPU" if self.assumed_gigabits else None
        return replace(self, network=", ".join(filter(None, (self.network, least)))) if least else self

    @property
    def way(self) -> str:
        """How it is trained, in a few words."""
        parts = [self.strategy, f"tp {self.tensor}" if self.tensor > 1 else "", f"micro-batch {self.micro_batch}"]
        once = " in no_sync" if self.no_sync else ""
        parts += [f"accumulation {self.accumulation}{once}" if self.accumulation > 1 else ""]
        parts += [f"recompute {self.recompute}" if self.recompute else ""]
        return ", ".join(part for part in parts if part)

    @property
    def is_gated(self) -> bool:
        """Whether layers have the form of Llama; by default unless the MLP is four times as wide as the residual."""
        return self.ffn != 4 * self.hidden if self.gated is None else self.gated

    @property
    def kernel(self) -> str:
        """The attention."""
        return self.attention or ("flash-2" if self.is_gated else "flash-1")

    @property
    def stores_scores(self) -> bool:
        """Whether the whole scores of attention lie in memory."""
        return self.kernel in ("unfused", "op-by-op")

    @property
    def written(self) -> str:
        """How the layers are written, of ``WRITTEN``."""
        return "compiled" if self.compiled else "llama" if self.is_gated else "gpt"

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank."""
        return self.micro_batch * self.seq_len

    @property
    def kv_share(self) -> float:
        """Heads of keys and values against those of queries; each tensor rank has one at least."""
        return max(self.kv_heads, self.tensor) / self.heads

    @property
    def heads_width(self) -> int:
        """Elements of all heads' queries of a token."""
        return self.heads * self.head_dim if self.head_dim else self.hidden

    @property
    def span(self) -> float:
        """Twice what a token attends to, in the mean over tokens and layers, since half of a sequence comes later.

        That is ``seq_len``, s, and with a window w of less than that 2 w - w^2 / s.
        """
        masked = max(0, self.seq_len - (self.window or self.seq_len))
        return self.seq_len - self.windowed_layers / self.layers * masked**2 / self.seq_len

    @property
    def layer_params(self) -> float:
        """Elements of a layer, over all tensor ranks."""
        if self.layer_numel is not None:
            return self.layer_numel
        mlp = (3 if self.is_gated else 2) * self.hidden * self.ffn
        return self.hidden * self.heads_width * (2 + 2 * self.kv_heads / self.heads) + mlp + 2 * self.hidden

    @property
    def held_layer_params(self) -> float:
        """Those of a layer, and the copies that ranks have of keys' and values' weights where these are fewer."""
        copies = self.kv_share - self.kv_heads / self.heads
        return self.layer_params + 2 * self.hidden * self.heads_width * copies

    @property
    def root_params(self) -> float:
        """Elements of all but the layers; by default of embedding and head, in the form of GPT one matrix."""
        if self.root_numel is not None:
            return self.root_numel
        return self.vocab * self.hidden * (2 if self.is_gated else 1)

    @property
    def num_params(self) -> float:
        """Elements of the whole model."""
        return self.layers * self.layer_params + self.root_params

    @property
    def held_params(self) -> float:
        """Elements that all tensor ranks together have of it."""
        return self.layers * self.held_layer_params + self.root_params

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations in compute, and of what messages carry."""
        return 4 if self.precision == "tf32" else 2

    @cached_property
    def recomputed(self) -> float:
        """Layers that are recomputed, or what is as much work: 'selective' is half of all, or the scores alone."""
        if not isinstance(self.recompute, str):
            return self.recompute
        return self.layers if self.recompute == "full" else 0 if self.stores_scores else self.layers / 2

    @cached_property
    def per_host(self) -> int:
        """Ranks of the data axis on a host."""
        return max(1, self.links.per_host // self.tensor)

    @cached_property
    def sizes(self) -> Mapping[MeshAxis, int]:
        """Ranks of each axis over which ranks train on rows of their own."""
        return self.row.sizes(self.data, min(self.data, self.per_host))

    @cached_property
    def shards(self) -> int:
        """Ranks that share parameters, gradients or state."""
        return self.row.parts(STATE, self.sizes)

    @cached_property
    def kept(self) -> Precision:
        """Bytes of what training keeps for a parameter."""
        return precision_named(self.states, "states")

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether gradients that would be sharded add up whole, since not every micro-batch reduces them."""
        return self.no_sync and self.accumulation > 1

    @property
    def residual_ranks(self) -> int:
        """Tensor ranks that share what lies between attention and MLP: norms and residuals."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def sequences(self) -> int:
        """Of a step, over all ranks."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def tokens_per_step(self) -> int:
        """Of a step, over all ranks."""
        return self.sequences * self.seq_len

    @property
    def seconds_at_peak(self) -> float:
        """Of a step whose GPUs did nothing but what the model needs, without recomputation, at their peak.

        A token needs 6 FLOPs a parameter and 12 h s L of attention: Chowdhery et al., arXiv 2204.02311, appendix B,
        where h is the width of all heads, and s the ``span``. Of fp8 the peak is that of bf16, in which part of it is.
        """
        token = 6 * self.num_params + 12 * self.heads_width * self.span * self.layers
        peak = self.card.peaks[self.precision if self.precision != "fp8" else "bf16"]
        return token * self.tokens_per_step / (peak * self.data * self.tensor)

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the model's FLOPs reach in a step of so many seconds."""
        return self.seconds_at_peak / seconds
