"""What a forecast knows of a GPU and of a network: presets, each with its sources, and text that is parsed.

A preset has the maker's peaks, and what of them a training step reaches at best: one large matrix product, flash
attention of long rows, and reading and writing of memory. ``transformer`` says by how much smaller work reaches less.

A network is hierarchical: ranks of a host are joined inside it, and each GPU has its share of the links between hosts.

    seconds of a ring over N ranks      rounds (N - 1) hop + bytes that a rank sends / bandwidth
    bandwidth inside a host             0.79 x what the maker says of one direction
    between hosts                       ranks of the group on a host x link of a GPU x efficiency of the chunk

A ring enters a host through one GPU and leaves it through another, as many rings as there are GPUs: so between hosts a
group has the links of all its GPUs on a host together, at most what is inside. An all-reduce takes a ring or, where
that is faster, a tree, whose hops grow with the logarithm of N.

Sources: of each preset in ``data/cards.csv``. stas00/ml-engineering (network page) for rings of H200 and B200.
meta-pytorch/autoparallel: cost_models/nccl_cost_model.py (PR #365) for hops and efficiency by chunk, measured on H100;
PR #146 for what memory reaches on H100, and for the floor of a launch. voipmonitor/rtx6kpro for a ring over PCIe 5.
arXiv 2507.03114, abstract, for contention: 18.9 % on average, 40 % at most. The latter is taken from H100 on, where a
product was seen to fall from 80 to 47 % of the peak beside an all-gather (NVIDIA's forum, t/337991).
"""

import re
from dataclasses import dataclass, field, replace
from math import ceil, log2

from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.planner.cards import card_named, cards, memory_bytes
from shardlab.vocabulary import Collective

# Of what one kind of product reaches in a benchmark, a step sustains less: clocks fall under load, and kernels follow
# each other with gaps. Chosen on H100 rows of data/published_steps.csv; so was which of two published values of
# contention is an H100's. Nothing else here was fitted to a step.
SUSTAINED = 0.89
COMPUTE_PRECISIONS = ("bf16", "fp16", "tf32")
GIGABIT = 1e9 / 8
INSIDE_EFFICIENCY = 0.79  # 345 to 366 of 450 GB/s a direction: H100 and H200, all-gather and ring all-reduce
HOP_SECONDS = 4.7e-6  # 30 us over 8 H100 inside a host, 70 us over 16 and 1204 us over 256 between hosts
# Share of a link between hosts that a ring reaches, by bytes of a rank's chunk; between them by the logarithm.
CHUNKS = ((8e6, 0.68), (16e6, 0.79), (32e6, 0.87))
# Links inside a host, by name: bytes a second that a ring reaches on them, in one direction.
INSIDE = {
    "nvlink3": 300e9 * INSIDE_EFFICIENCY,  # data sheet of A100: 600 GB/s in both directions
    "nvlink4": 450e9 * INSIDE_EFFICIENCY,  # data sheet of H100: 900 GB/s
    "nvlink5": 900e9 * INSIDE_EFFICIENCY,  # data sheet of B200: 1800 GB/s
    "pcie4": 20e9,  # half of PCIe 5, since its lanes have half the rate
    "pcie5": 40e9,  # 37.6 to 41.1 GB/s of bus bandwidth over 8 RTX PRO 6000 (voipmonitor/rtx6kpro)
}


@dataclass(frozen=True)
class Hardware:
    """A GPU.

    Attributes:
        name: of the preset.
        peaks: dense FLOP a second by precision.
        memory_bytes: of its memory.
        memory_bandwidth: bytes a second, as the maker says.
        multiprocessors: that share the tiles of a matrix product.
        product_fraction: of the peak that the main loop of a large matrix product reaches.
        attention_fraction: of the peak that flash attention 2 reaches for long rows, before the factors of its shape.
        inside: of its host: name of a link in ``INSIDE``.
        between_gigabits: of its share of the links between hosts, where none is given: what is usual beside it.
        contention: by how much of its time compute is slower beside a collective.
        memory_fraction: of the memory bandwidth that work bound by it reaches.
        launch_seconds: the least time from one kernel to the next, run without a graph.
    """

    name: str
    peaks: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    multiprocessors: float
    product_fraction: float
    attention_fraction: float
    inside: str
    between_gigabits: float
    contention: float
    memory_fraction: float = 0.8
    launch_seconds: float = 7e-6

    @property
    def usual_gigabits(self) -> tuple[float, float]:
        """Least and most that is usual for a GPU's share of the links between hosts.

        A100: 50 (AWS p4d, 400 Gb/s a host) to 200 (Azure ND A100 v4); H100: 100 (Google a3-highgpu, 800 Gb/s a host)
        to 400 (DGX H100, AWS p5). So a fourth is taken for other cards, too.
        """
        return self.between_gigabits / 4, self.between_gigabits

    def faster(self, compute: float, attention: float = 1.0) -> "Hardware":
        """The same with all compute, and attention besides, faster by these factors."""
        return replace(
            self, product_fraction=self.product_fraction * compute, memory_fraction=self.memory_fraction * compute,
            attention_fraction=self.attention_fraction * compute * attention,
        )  # fmt: skip


_NUMBERS = (
    "memory_bandwidth", "multiprocessors", "product_fraction", "attention_fraction", "between_gigabits", "contention",
)  # fmt: skip


def hardware_named(name: str) -> Hardware:
    """The preset of this name, see ``card_named``.

    Raises:
        ValueError: there is none; the message lists the presets.
    """
    found = card_named(name)
    if found is None or "bf16_tflops" not in found:
        known = ", ".join(card for card, row in cards().items() if "bf16_tflops" in row)
        raise ValueError(f"hardware: {name!r} is not one of {known}")
    numbers = {field: float(found[field]) for field in _NUMBERS}
    dense, tf32 = float(found["bf16_tflops"]) * 1e12, float(found["tf32_tflops"]) * 1e12
    peaks = {"bf16": dense, "fp16": dense, "tf32": tf32}
    return Hardware(found["name"], peaks, memory_bytes(found["memory"]), inside=found["inside"], **numbers)


@dataclass(frozen=True)
class Network:
    """Links of a cluster; bandwidths in bytes a second and in one direction.

    ``inside`` is what a ring inside a host reaches, ``between`` what the maker says of a GPU's link between hosts, and
    ``factor`` by how much everything between hosts is faster than the constants above say. Whether the link between
    hosts ``is_assumed``, since nobody said it, changes no time.
    """

    per_host: int
    inside: float
    between: float
    factor: float = 1.0
    is_assumed: bool = field(default=False, compare=False)

    def seconds(self, op: Collective, num_bytes: float, ranks: int, per_host: int) -> float:
        """Seconds of a collective of ``num_bytes``, the whole buffer, over ranks, of which so many share a host."""
        if ranks == 1:
            return 0.0
        spans_hosts = ranks > per_host
        bandwidth, factor = self.inside, self.factor if spans_hosts else 1.0
        if spans_hosts:
            bandwidth = min(bandwidth, per_host * self.between * _efficiency(num_bytes / ranks) * factor)
        hops = float(ranks - 1)
        if op == Collective.ALL_REDUCE:
            hops = 2 * min(hops, ceil(log2(ranks)))
        return hops * HOP_SECONDS / factor + ring_wire_bytes(op, 1, ranks) * num_bytes / bandwidth


def _efficiency(chunk_bytes: float) -> float:
    (low, value), *_ = CHUNKS
    for high, above in CHUNKS[1:]:
        if low < chunk_bytes:
            value += (above - value) * min(1.0, log2(chunk_bytes / low) / log2(high / low))
        low = high
    return value


_FORM = (
    f"parts separated by commas, each at most once: '8 per host'; inside a host {', '.join(INSIDE)}, or what its maker "
    "says of both directions together, such as 600GB/s; between hosts such as 200Gb/s per GPU or 1600Gb/s per host "
    "(GB/s for bytes)"
)
_PER_HOST = re.compile(r"(\d+) per host", re.IGNORECASE)
_RATE = re.compile(r"(\d*\.?\d+)\s*G(b|B)/s(?:\s+per\s+(?i:(gpu|host)))?")  # a small b is bits


def network_of(text: str | None, hardware: Hardware) -> Network:
    """The network that a text says; what it leaves out, and all of it for None, is what is usual for the GPU.

    For example ``8 per host, 600GB/s, 200Gb/s per GPU`` or ``nvlink4, 3200Gb/s per host``.

    Raises:
        ValueError: a part is not understood, comes twice or is not above 0; the message says what is allowed.
    """
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text is not None else ():
        name, value = _part(part.strip(), hardware)
        if name in found or not value > 0:
            raise ValueError(f"network: {part.strip()!r} comes twice or is 0; write {_FORM}")
        found[name] = value
    per_host = int(found.get("per host", 8))
    between = found.get("per GPU", hardware.between_gigabits * GIGABIT)
    if "of host" in found:
        if "per GPU" in found:
            raise ValueError(f"network: {text!r} has two links between hosts; write {_FORM}")
        between = found["of host"] / per_host
    is_assumed = not {"per GPU", "of host"} & set(found)
    return Network(per_host, found.get("inside", INSIDE[hardware.inside]), between, is_assumed=is_assumed)


def _part(part: str, hardware: Hardware) -> tuple[str, float]:
    """What a part of the text speaks of, and its value; rates in bytes a second."""
    lower = part.lower()
    if lower in INSIDE or (lower == "nvlink" and hardware.inside.startswith(lower)):
        return "inside", INSIDE[lower if lower in INSIDE else hardware.inside]
    if count := _PER_HOST.fullmatch(part):
        return "per host", int(count[1])
    rate = _RATE.fullmatch(part)
    if rate is None or (rate[2] == "b" and rate[3] is None):
        raise ValueError(f"network: {part!r} is not understood; write {_FORM}")
    value = float(rate[1]) * (1e9 if rate[2] == "B" else GIGABIT)
    if rate[3] is None:
        return "inside", value / 2 * INSIDE_EFFICIENCY
    return ("per GPU" if rate[3].lower() == "gpu" else "of host"), value
