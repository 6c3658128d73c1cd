"""The network of a cluster: seconds of a collective on it, and the text that says what it is.

A network is hierarchical: ranks of a host are joined inside it, and each GPU has its share of the links between hosts.

    seconds of a ring over N ranks      rounds (N - 1) hop + bytes that a rank sends / bandwidth
    bandwidth inside a host             what the maker says of one direction x efficiency of the number of GPUs; on four
                                        GPUs without a switch x the share of its links that join a GPU to the group
    between hosts                       ranks of the group on a host x link of a GPU x efficiency of the chunk

A ring enters a host through one GPU and leaves it through another, as many rings as there are GPUs: so between hosts a
group has the links of all its GPUs on a host together, at most what is inside. An all-reduce takes a ring or, where
that is faster, a tree, whose hops grow with the logarithm of N.

Sources: stas00/ml-engineering (network page) for rings of H200 and B200.
meta-pytorch/autoparallel: cost_models/nccl_cost_model.py (PR #365) for hops and efficiency by chunk, measured on H100;
voipmonitor/rtx6kpro for a ring over PCIe 5; NVIDIA/nccl-tests issue 331 for hosts of four A100 without a switch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2

import numpy as np

from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.planner.gpu import Gpu
from shardlab.vocabulary import Collective

GIGABIT = 1e9 / 8
# Share of a direction inside a host that a ring reaches, by its GPUs: 268, 325 and 345 of 450 GB/s on H100 for
# all-gather, up to 366 on H200 for all-reduce; a pair has fewer ways than eight. Between them by the logarithm.
INSIDE_EFFICIENCY = ((2, 0.60), (4, 0.72), (8, 0.79))
HOP_SECONDS = 4.7e-6  # 30 us over 8 H100 inside a host, 70 us over 16 and 1204 us over 256 between hosts
# The same of a link between hosts that a ring reaches, by bytes of a rank's chunk; between them by the logarithm.
CHUNKS = ((8e6, 0.68), (16e6, 0.79), (32e6, 0.87))
# Links inside a host, by name: bytes a second in one direction.
INSIDE = {
    "nvlink3": 300e9,  # data sheet of A100: 600 GB/s in both directions
    "nvlink4": 450e9,  # data sheet of H100: 900 GB/s
    "nvlink5": 900e9,  # data sheet of B200: 1800 GB/s
    "pcie4": 25e9,  # half of PCIe 5, since its lanes have half the rate
    "pcie5": 50e9,  # a ring over 8 RTX PRO 6000 reaches 37.6 to 41.1 GB/s (voipmonitor/rtx6kpro)
}
# On boards of so many GPUs with these links no switch joins them: each has a third of its links to each other one. Two
# A100 of such a board have 100 GB/s for each other, and reach 72 (NVIDIA/nccl-tests issue 331), of 300.
UNSWITCHED, WITHOUT_SWITCH = 4, ("nvlink3", "nvlink4")


@dataclass(frozen=True)
class Network:
    """Links of a cluster; bandwidths in bytes a second and in one direction.

    ``inside`` is what the maker says of a GPU's link inside a host, ``between`` of that between hosts, and ``factor``
    by how much everything between hosts is faster than the constants above say. Whether the link between hosts
    ``is_assumed``, since nobody said it, changes no time. Unless it ``is_switched``, a GPU has as many of its links to
    each other one of its host, and a group of some of them has no others.
    """

    per_host: int
    inside: float
    between: float
    factor: float = 1.0
    is_assumed: bool = field(default=False, compare=False)
    is_switched: bool = True

    def seconds(self, op: Collective, num_bytes: float, ranks: int, per_host: int) -> float:
        """Seconds of a collective of ``num_bytes``, the whole buffer, over ranks, of which so many share a host."""
        if ranks == 1:
            return 0.0
        spans_hosts = ranks > per_host
        factor = self.factor if spans_hosts else 1.0
        bandwidth = self.inside * _share(INSIDE_EFFICIENCY, min(ranks, self.per_host))
        if not self.is_switched and (neighbours := min(ranks, per_host) - 1):
            bandwidth *= neighbours / (self.per_host - 1)
        if spans_hosts:
            bandwidth = min(bandwidth, per_host * self.between * _share(CHUNKS, num_bytes / ranks) * factor)
        hops = float(ranks - 1)
        if op == Collective.ALL_REDUCE:
            hops = 2 * min(hops, ceil(log2(ranks)))
        return hops * HOP_SECONDS / factor + ring_wire_bytes(op, 1, ranks) * num_bytes / bandwidth


def _share(points: Sequence[tuple[float, float]], size: float) -> float:
    sizes, shares = zip(*points, strict=True)
    return float(np.interp(log2(size), np.log2(sizes), shares))


_FORM = (
    f"parts separated by commas, each at most once: '8 per host'; inside a host {', '.join(INSIDE)}, or what its maker "
    "says of both directions together, such as 600GB/s; between hosts such as 200Gb/s per GPU or 1600Gb/s per host "
    "(GB/s for bytes)"
)
_PER_HOST = re.compile(r"(\d+) per host", re.IGNORECASE)
_RATE = re.compile(r"(\d*\.?\d+)\s*G(b|B)/s(?:\s+per\s+(?i:(gpu|host)))?")  # a small b is bits


def network_of(text: str | None, gpu: Gpu) -> Network:
    """The network that a text says; what it leaves out, and all of it for None, is what is usual for the GPU.

    For example ``8 per host, 600GB/s, 200Gb/s per GPU`` or ``nvlink4, 3200Gb/s per host``.

    Raises:
        ValueError: a part is not understood, comes twice or is not above 0; the message says what is allowed.
    """
    found: dict[str, float] = {}
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for part in parts:
        name, value = _part(part, gpu)
        if name in found or not value > 0:
            raise ValueError(f"network: {part!r} comes twice or is 0; write {_FORM}")
        found[name] = value
    per_host = int(found.get("per host", 8))
    between = found.get("per GPU", gpu.between_gigabits * GIGABIT)
    if "of host" in found:
        if "per GPU" in found:
            raise ValueError(f"network: {text!r} has two links between hosts; write {_FORM}")
        between = found["of host"] / per_host
    is_assumed = not {"per GPU", "of host"} & set(found)
    inside = found.get("inside", INSIDE[gpu.inside])
    # Inside a host a rate in numbers is that of any two GPUs, whatever joins them.
    by_rate = any((rate := _RATE.fullmatch(part)) and not rate[3] for part in parts)
    is_switched = by_rate or per_host != UNSWITCHED or inside not in map(INSIDE.get, WITHOUT_SWITCH)
    return Network(per_host, inside, between, is_assumed=is_assumed, is_switched=is_switched)


def _part(part: str, gpu: Gpu) -> tuple[str, float]:
    """What a part of the text speaks of, and its value; rates in bytes a second."""
    lower = part.lower()
    if lower in INSIDE or (lower == "nvlink" and gpu.inside.startswith(lower)):
        return "inside", INSIDE[lower if lower in INSIDE else gpu.inside]
    if count := _PER_HOST.fullmatch(part):
        return "per host", int(count[1])
    rate = _RATE.fullmatch(part)
    if rate is None or (rate[2] == "b" and rate[3] is None):
        raise ValueError(f"network: {part!r} is not understood; write {_FORM}")
    value = float(rate[1]) * (1e9 if rate[2] == "B" else GIGABIT)
    if rate[3] is None:
        return "inside", value / 2
    return ("per GPU" if rate[3].lower() == "gpu" else "of host"), value
