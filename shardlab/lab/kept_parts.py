"""Parts of a calibration that are measured, in a file beside its own until all of them are."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.planner.machine import Line, RankCosts


class Part(NamedTuple):
    """What is measured at once: of how many ranks, 'single' for one with the threads of all, a field, a name in it."""

    ranks: str
    field: str
    name: str

    def __str__(self) -> str:
        """For a bar."""
        ranks = "one rank" if self.ranks == "single" else f"{self.ranks} ranks"
        return f"{ranks}: {', '.join(filter(None, (self.field, self.name)))}"


class KeptParts:
    """Values by part.

    Args:
        path: of the file; None to keep them in memory alone.
        head: what they were measured on and with: those of a file with another head are not taken.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self.path, self.head = path, head
        self.values: dict[str, Any] = self._read()

    def __contains__(self, part: Part) -> bool:
        """Whether it is measured."""
        return "/".join(part) in self.values

    def keep(self, part: Part, value: Any) -> None:
        """Add a part: a ``Line``, numbers, or a number."""
        self.values["/".join(part)] = asdict(value) if isinstance(value, Line) else value
        if self.path is not None:
            # Whole or not at all: an interrupt may come at any time.
            written = self.path.with_name(f"{self.path.name}.new")
            written.write_text(json.dumps({"head": self.head, "values": self.values}))
            written.replace(self.path)

    def drop(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def costs(self, ranks: str) -> RankCosts:
        """What is measured of so many ranks; what is not costs nothing."""
        found: dict[str, Any] = {name: {} for name in ("floors", "products", "operations", "messages", "host", "pace")}
        found |= {"meeting": 0.0, "slows_compute": 0.0, "slowed_by_compute": 0.0}
        for key, value in self.values.items():
            of, field, name = key.split("/")
            if of == ranks and field == "contention":
                found["slows_compute"], found["slowed_by_compute"] = value
            elif of == ranks and name:
                found[field][name] = value
            elif of == ranks:
                found[field] = value
        return RankCosts.read(found)

    def _read(self) -> dict[str, Any]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text())
            return dict(found["values"]) if found["head"] == self.head else {}
        except (ValueError, KeyError, TypeError):
            return {}
