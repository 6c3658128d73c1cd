"""A GPU: its memory, the link over which its rank sends, and, where steps can be forecast for it, how fast it is.

Cards by name are lines of ``data/cards.csv``, each with the source of its numbers. All have memory and the link to the
other cards of a host, in one direction: NVLink where the card has it, else PCIe. Those that steps can be forecast
for also have the maker's peaks, and what of them a training step reaches at best: one large matrix product, flash
attention of long rows, and reading and writing of memory. ``transformer`` says by how much smaller work reaches less.

Sources: meta-pytorch/autoparallel, PR #146, for what memory reaches on H100, and for the floor of a launch. arXiv
2507.03114, abstract, for contention: 18.9 % on average, 40 % at most. The latter is taken from H100 on, where a product
was seen to fall from 80 to 47 % of the peak beside an all-gather (NVIDIA's forum, t/337991).
"""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from shardlab.installed import data_path
from shardlab.partition.ring_cost import Link

# Of what one kind of product reaches in a benchmark, a step sustains less: clocks fall under load, and kernels follow
# each other with gaps. Chosen on H100 rows of data/published_steps.csv; so was which of two published values of
# contention is an H100's. Nothing else here was fitted to a step.
SUSTAINED = 0.89
COMPUTE_PRECISIONS = ("bf16", "fp16", "tf32", "fp8")
FORMAT = 1  # of a card that was measured
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
MEMORY = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgtKMGT])(i?)B")  # a small b would be bits


def why_unread(error: Exception) -> str:
    """Why a file that calibrate should have written cannot be read: without what it holds instead."""
    if isinstance(error, OSError):
        return str(error.strerror)
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    return str(error) if isinstance(error, ValueError) else "it holds something else"


@dataclass(frozen=True)
class Gpu:
    """What is known of a GPU. Without ``peaks`` no step can be forecast for it, and what follows them is not known.

    Attributes:
        memory_bytes: of its memory.
        link: between any two ranks of a host; None where that is not known.
        name: of the card; empty where its memory alone is known.
        source: of its numbers.
        peaks: dense FLOP a second by precision.
        memory_bandwidth: bytes a second, as the maker says.
        multiprocessors: that share the tiles of a matrix product.
        product_fraction: of the peak that the main loop of a large matrix product reaches.
        attention_fraction: of the peak that flash attention 2 reaches for long rows, before the factors of its shape.
        inside: of its host: name of a link in ``network.INSIDE``.
        between_gigabits: of its share of the links between hosts, where none is given: what is usual beside it.
        contention: by how much of its time compute is slower beside a collective.
        memory_fraction: of the memory bandwidth that work bound by it reaches.
        launch_seconds: the least time from one kernel to the next, run without a graph.
        product_fractions: by precision, where they were measured one by one: instead of ``product_fraction``.
        host_seconds: that the host takes to launch a kernel, by how it is run (eager, compiled, graph), if measured.
    """

    memory_bytes: float
    link: Link | None = None
    name: str = ""
    source: str = ""
    peaks: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    multiprocessors: float = 0.0
    product_fraction: float = 0.0
    attention_fraction: float = 0.0
    inside: str = ""
    between_gigabits: float = 0.0
    contention: float = 0.0
    memory_fraction: float = 0.8
    launch_seconds: float = 7e-6
    product_fractions: Mapping[str, float] = field(default_factory=dict)
    host_seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Memory must be above 0."""
        if not (isfinite(self.memory_bytes) and self.memory_bytes > 0):
            raise ValueError(f"memory: {self.memory_bytes} is given; it must be a finite number of bytes above 0")

    @classmethod
    def parse(cls, text: str) -> "Gpu":
        """A GPU from the name of a card (``cards``), or from its memory, with bandwidth and latency of its link or not.

        For example ``h100``, ``24GB``, ``24GB,32GB/s,10us`` or ``card.json``, of one that was measured. Of a name case
        does not matter, nor whether its parts are joined by ``-``, ``_``, a space or nothing.

        Raises:
            ValueError: a part is not understood; the message names it.
        """
        if card := named(text):
            return card
        memory, comma, link = text.partition(",")
        if not comma and not MEMORY.fullmatch(memory.strip()):
            raise ValueError(
                f"gpu: {text!r} is not understood; write a card ({', '.join(cards())}), a memory such as 24GB, or "
                "memory, bandwidth and latency such as 24GB,32GB/s,10us"
            )
        return cls(memory_bytes(memory), Link.parse(link) if comma else None)

    @classmethod
    def preset(cls, name: str) -> "Gpu":
        """The card of this name, if steps can be forecast for it.

        Raises:
            ValueError: they cannot; the message lists the cards.
        """
        card = named(name)
        if card is None or not card.peaks:
            known = ", ".join(name for name, one in cards().items() if one.peaks)
            raise ValueError(
                f"hardware: {name!r} is not one of {known}, nor a file of shardlab calibrate --device cuda"
            )
        return card

    @classmethod
    def read(cls, path: Path | str) -> "Gpu":
        """One that was measured and written.

        Raises:
            ValueError: the file is not there, or holds none.
        """
        try:
            found = json.loads(Path(path).read_text())
            if found.pop("format") != FORMAT:
                raise ValueError("it is of another version of shardlab")
            return cls(**{**found, "link": Link.parse(found["link"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"gpu: {path} cannot be read ({why_unread(error)}); make one by: "
            raise ValueError(f"{why}shardlab calibrate --device cuda --out {path}") from None

    def write(self, path: Path) -> None:
        """Write it as JSON, which reads as text."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self), "link": str(self.link)}, indent=1) + "\n")

    @property
    def usual_gigabits(self) -> tuple[float, float]:
        """Least and most that is usual for a GPU's share of the links between hosts.

        A100: 50 (AWS p4d, 400 Gb/s a host) to 200 (Azure ND A100 v4); H100: 100 (Google a3-highgpu, 800 Gb/s a host)
        to 400 (DGX H100, AWS p5). So a fourth is taken for other cards, too.
        """
        return self.between_gigabits / 4, self.between_gigabits

    def faster(self, compute: float, attention: float = 1.0) -> "Gpu":
        """The same with all compute, and attention besides, faster by these factors."""
        return replace(
            self, product_fraction=self.product_fraction * compute,
            product_fractions={name: share * compute for name, share in self.product_fractions.items()},
            memory_fraction=self.memory_fraction * compute,
            attention_fraction=self.attention_fraction * compute * attention,
        )  # fmt: skip


_NUMBERS = (
    "memory_bandwidth", "multiprocessors", "product_fraction", "attention_fraction", "between_gigabits", "contention",
)  # fmt: skip


@cache
def _by_any_name() -> dict[str, Gpu]:
    with data_path("cards.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {_joined(name): _card(line) for line in lines for name in (line["name"], *line["other_names"].split())}


def cards() -> dict[str, Gpu]:
    """The cards by name."""
    return {card.name: card for card in _by_any_name().values()}


def _card(line: Mapping[str, str]) -> Gpu:
    known = Gpu(memory_bytes(line["memory"]), Link.parse(line["link"]), line["name"], line["source"])
    if not line["bf16_tflops"]:
        return known
    peaks = {
        name: 1e12 * float(line[f"{like}_tflops"])
        for name, like in {"bf16": "bf16", "fp16": "bf16", "tf32": "tf32", "fp8": "fp8"}.items()
        if line[f"{like}_tflops"]
    }
    numbers: dict[str, Any] = {name: float(line[name]) for name in _NUMBERS}
    return replace(known, peaks=peaks, inside=line["inside"], **numbers)


def named(name: str) -> Gpu | None:
    """The card of this name, or that a file ending in .json holds; None for any other text.

    Raises:
        ValueError: the file cannot be read.
    """
    if name.endswith(".json"):
        return Gpu.read(name)
    return _by_any_name().get(_joined(name))


def _joined(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower())


def memory_bytes(text: str) -> float:
    """Bytes of a text such as '24GB' (powers of ten) or '24GiB' (powers of 1024).

    Raises:
        ValueError: the text is no positive number with a unit.
    """
    found = MEMORY.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"memory: {text!r} is not understood; write a number above 0 and kB, MB, GB or TB, or KiB, MiB, GiB or "
            "TiB, such as 24GB"
        )
    return float(found[1]) * float((1024 if found[3] else 1000) ** POWERS[found[2].lower()])
