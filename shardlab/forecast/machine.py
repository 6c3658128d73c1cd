"""What this machine's ranks take for operations and messages: tables that ``shardlab calibrate`` measures.

Each table has sizes and seconds; between two sizes the logarithm is a line, and beyond the last one seconds grow as
sizes do. All was measured with as many ranks at work as the table says, so that cores which are shared count as shared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.planner.gpu import why_unread

FORMAT = 2
REACH = 2.0  # by which factor the seconds of a step may differ from those of one that was run, to be like it


@dataclass(frozen=True)
class Line:
    """Seconds by size, both ascending in the size."""

    sizes: Sequence[float]
    seconds: Sequence[float]

    def at(self, size: float) -> float:
        """Seconds for a size; below the first one those of the first."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        return exp(float(np.interp(log(size), np.log(self.sizes), np.log(self.seconds))))


@dataclass(frozen=True)
class RankCosts:
    """What one of some ranks takes while the others do the same.

    Attributes:
        floors: the least seconds of an operation with what autograd and Python do around it, by phase: forward,
            backward, optimizer.
        products: seconds by FLOPs, of matrix products and attention by their form.
        operations: by name, seconds by bytes read and written; 'add' is that of all that have no name.
        messages: by verb, seconds by bytes of the whole buffer.
        meeting: seconds that a message after compute takes longer, since ranks come to it at different moments.
        host: by strategy, seconds of the engine's own code a step and parameter, of FSDP a step and unit.
        slows_compute: by how much of its time compute takes longer beside a message.
        slowed_by_compute: by how much of its time a message takes longer beside compute.
        pace: by strategy, how many times as long operations take in a step as one by one; 1 if not measured.
    """

    floors: Mapping[str, float]
    products: Mapping[str, Line]
    operations: Mapping[str, Line]
    messages: Mapping[str, Line]
    meeting: float
    host: Mapping[str, float]
    slows_compute: float
    slowed_by_compute: float
    pace: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "RankCosts":
        """From what ``asdict`` wrote."""
        tables = {
            name: {key: Line(**line) for key, line in found[name].items()}
            for name in ("products", "operations", "messages")
        }
        return cls(**{**found, **tables})

    def product(self, form: str, flops: float) -> float:
        """Seconds of a matrix product: forward, input or weight; of attention, or attention_backward."""
        line = self.products[form]
        # Below the smallest that was measured, seconds fall with the size: the floor is added by phase.
        return line.at(flops) * min(1.0, flops / line.sizes[0])

    @property
    def largest(self) -> tuple[float, float, float]:
        """Of what was measured: FLOPs of a product, bytes of another operation, bytes of a message."""
        tables = self.products, self.operations, self.messages
        flops, num_bytes, sent = (max((line.sizes[-1] for line in table.values()), default=0.0) for table in tables)
        return flops, num_bytes, sent

    def operation(self, name: str, num_bytes: float) -> float:
        """Seconds of any other operation."""
        return (self.operations.get(name) or self.operations["add"]).at(num_bytes)

    def message(self, verb: str, num_bytes: float) -> float:
        """Seconds of a message of so many bytes."""
        return (self.messages.get(verb) or self.messages["all_reduce"]).at(num_bytes)


@dataclass(frozen=True)
class Machine:
    """A calibration.

    Attributes:
        name: of the machine.
        versions: of what it was measured with.
        cores: that ranks may use.
        ranks: what a rank takes, by how many are at work; 'single' for one with the threads of all.
        validated: steps that were forecast and then run here: strategy, ranks, predicted and measured seconds.
        is_quick: whether everything was read less often.
        probes: least and most seconds of a little work, which is read again before a forecast; empty if not read.
    """

    name: str
    versions: Mapping[str, str]
    cores: int
    ranks: Mapping[str, RankCosts]
    validated: Sequence[tuple[str, int, float, float]] = ()
    is_quick: bool = False
    probes: Sequence[float] = ()

    def write(self, path: Path) -> None:
        """Write it as JSON, which reads as text."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> "Machine":
        """One that was written.

        Raises:
            ValueError: the file is not there, or is no calibration.
        """
        try:
            found = json.loads(Path(path).read_text())
            if found.pop("format") != FORMAT:
                raise ValueError("it is of another version of shardlab")
            ranks = {key: RankCosts.read(costs) for key, costs in found.pop("ranks").items()}
            validated, probes = tuple(tuple(row) for row in found.pop("validated")), tuple(found.pop("probes"))
            return cls(ranks=ranks, validated=validated, probes=probes, **found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"calibration: {path} cannot be read ({why_unread(error)}); make one by: shardlab calibrate"
            raise ValueError(why) from None

    def misses(self, strategy: str, ranks: int, seconds: float) -> str:
        """How far forecasts missed, and the validated step that is nearest to one, in a sentence."""
        if not self.validated:
            return "how far forecasts miss here was not measured: shardlab validate"
        errors = {row: row[2] / row[3] - 1 for row in self.validated}
        alike = [row for row in errors if row[:2] == (strategy, ranks)]
        if not alike:
            return f"how far this misses is not known; no step of {strategy} on {ranks} ranks was run"
        nearest = min(alike, key=lambda row: abs(log(row[2] / seconds)))
        said = f"the nearest step that was run, {strategy} on {ranks} ranks in {1e3 * nearest[3]:.3g} ms"
        if abs(log(nearest[2] / seconds)) > log(REACH):
            return f"how far this misses is not known; {said}, is not like it"
        sizes = sorted(map(abs, errors.values()))
        middle, worst = sizes[len(sizes) // 2], sizes[-1]
        return (
            f"{len(sizes)} steps here were missed by {middle:.0%} in the median, {worst:.0%} at most; {said}, by "
            f"{errors[nearest]:+.0%}"
        )

    def costs(self, ranks: int, *, single: bool = False) -> RankCosts:
        """What a rank takes beside so many.

        Raises:
            ValueError: that was not measured.
        """
        key = "single" if single else str(ranks)
        if key not in self.ranks:
            known = ", ".join(self.ranks)
            raise ValueError(f"ranks: {ranks} is given; {self.name} was calibrated for {known}")
        return self.ranks[key]
