"""Measures what this machine's ranks take for operations, messages and engines, part by part, in a minute or two.

Parts that are measured are kept in a file beside the calibration's own until all of them are.
"""

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from shardlab.bench.engine_times import ENGINE_PARTS, FEW_PARTS, engine_time
from shardlab.bench.message_times import MESSAGE_PARTS, message_time
from shardlab.bench.operation_times import FULL, QUICK, Effort, operation_parts, operation_time
from shardlab.comm.mesh import Mesh
from shardlab.experiment.comparison import PRELOAD
from shardlab.forecast.machine import Line, Machine, RankCosts
from shardlab.installed import __version__, num_cores
from shardlab.launch import RankPool

PROBE, PROBE_S = 256, 0.5  # width of its matrices; for how long it is read
CHANGED = 1.15  # by which factor a machine's pace may change before it is said
UNSTEADY = 1.3  # likewise while it was calibrated
VERSIONS = {"torch": torch.__version__, "shardlab": __version__}


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
        path: of the file.
        head: what they were measured on and with: those of a file with another head are not taken.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path, self.head = path, head
        self.values, self.probes = self._read()

    def __contains__(self, part: Part) -> bool:
        """Whether it is measured."""
        return "/".join(part) in self.values

    def keep(self, part: Part, value: Any) -> None:
        """Add a part: a ``Line``, numbers, or a number."""
        self.values["/".join(part)] = asdict(value) if isinstance(value, Line) else value
        # Whole or not at all: an interrupt may come at any time.
        written = self.path.with_name(f"{self.path.name}.new")
        written.write_text(json.dumps({"head": self.head, "values": self.values, "probes": self.probes}))
        written.replace(self.path)

    def probe(self) -> None:
        """Read the machine's pace, between parts: a calibration may be resumed when it is another."""
        self.probes.append(probe_seconds())

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
        for field, name in ENGINE_PARTS:
            if "bucketed" in found[field]:  # of a quick one others are not measured
                found[field].setdefault(name, found[field]["bucketed"])
        return RankCosts.read(found)

    def _read(self) -> tuple[dict[str, Any], list[float]]:
        if self.path.exists():
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(self.path.read_text())
                if found["head"] == self.head:
                    return dict(found["values"]), list(found["probes"])
        return {}, []


class Calibration:
    """A calibration of this machine, of which some parts may be measured already; nothing else should run meanwhile.

    Args:
        ranks: numbers of ranks that are measured, besides one with the threads of all.
        is_quick: whether everything is read less often.
        path: of a file that keeps the parts until all are measured.
    """

    def __init__(self, ranks: Sequence[int], *, is_quick: bool = False, path: Path) -> None:
        self.ranks, self.is_quick = ranks, is_quick
        head = {"name": platform.node(), "versions": VERSIONS, "cores": num_cores(), "is_quick": is_quick}
        self.kept = KeptParts(path, head)
        self.parts = [part for ranks in self.ranks for part in self._parts(ranks)]

    @property
    def missing(self) -> list[Part]:
        """What is not measured yet."""
        return [part for part in self.parts if part not in self.kept]

    def measure(self, on_progress: Callable[[str], None] = lambda _: None, limit_s: float = inf) -> bool:
        """Measure what is missing, and say whether that is all; after ``limit_s`` no further part begins."""
        began, effort = perf_counter(), QUICK if self.is_quick else FULL
        for ranks in self.ranks:
            missing = [part for part in self._parts(ranks) if part not in self.kept]
            if not missing:
                continue
            self.kept.probe()
            # A part without messages may be silent for long on a machine with load.
            with RankPool(ranks, device="cpu", notice_s=None, preload=PRELOAD) as pool:
                for part in missing:
                    if perf_counter() - began > limit_s:
                        return False
                    self.kept.keep(part, self._measured(pool, part, effort))
                    on_progress(str(part))
        self.kept.probe()
        return True

    def machine(self) -> Machine:
        """What was measured, when that is all."""
        keys = dict.fromkeys(part.ranks for part in self.parts)
        costs = {key: self.kept.costs(key) for key in keys}
        probes = min(self.kept.probes), max(self.kept.probes)
        return Machine(platform.node(), VERSIONS, num_cores(), costs, is_quick=self.is_quick, probes=probes)

    def _parts(self, ranks: int) -> Iterator[Part]:
        for field, name in (*operation_parts(), *MESSAGE_PARTS, *(FEW_PARTS if self.is_quick else ENGINE_PARTS)):
            yield Part(str(ranks), field, name)
        if ranks == self.ranks[0]:
            yield from (Part("single", field, name) for field, name in operation_parts())

    def _measured(self, pool: RankPool, part: Part, effort: Effort) -> Any:
        if (part.field, part.name) in ENGINE_PARTS:
            return engine_time(part.field, part.name, pool, self.kept.costs(part.ranks), effort)
        if part.ranks == "single":
            return pool.run(_alone, part, effort)[0]
        # Messages take what the slowest takes, and so does a step.
        return max(pool.run(_together, part, effort), key=_total)


def probe_seconds() -> float:
    """Median seconds of a little forward and backward in this process, read for half a second."""
    x, weights = torch.ones(PROBE, PROBE), [torch.full((PROBE, PROBE), 1 / PROBE, requires_grad=True) for _ in range(4)]
    readings, until = list[float](), perf_counter() + PROBE_S
    while perf_counter() < until:
        began, y = perf_counter(), x
        for weight in weights:
            y = y @ weight
        y.sum().backward()
        readings.append(perf_counter() - began)
    return median(readings)


def differs_here(machine: Machine) -> str:
    """How the calibrated machine differs from this one now: 'on node-7, with torch 2.11'; empty if it does not.

    A machine that has become slower or faster since, for example by what else runs on it, differs too.
    """
    is_this = (machine.name, machine.cores) == (platform.node(), num_cores())
    said = [] if is_this else [f"on {machine.name} with {machine.cores} cores"]
    said += [f"with {name} {version}" for name, version in machine.versions.items() if VERSIONS.get(name) != version]
    return ", ".join([*said, *_other_pace(machine.probes)])


def _other_pace(probes: Sequence[float]) -> Iterator[str]:
    """Whether little work took longer or shorter when a machine was calibrated, or did not always take as long."""
    if not probes:
        return
    now, least, most = probe_seconds(), min(probes), max(probes)
    if not least / CHANGED < now < most * CHANGED:
        yield f"when little work took {(most if now > most else least) / now:.2f} times as long as now"
    if most > UNSTEADY * least:
        yield f"while its pace changed by a factor of {most / least:.1f}"


def _total(value: Any) -> float:
    if isinstance(value, Line):
        return sum(value.seconds)
    return float(sum(value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)))


def _together(_: int, part: Part, effort: Effort) -> Any:
    with Mesh({"data": torch.distributed.get_world_size()}) as mesh:
        if (part.field, part.name) in MESSAGE_PARTS:
            return message_time(part.field, part.name, mesh, effort)
        return operation_time(part.field, part.name, mesh.data, effort)


def _alone(rank: int, part: Part, effort: Effort) -> Any:
    if rank:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(min(before * torch.distributed.get_world_size(), num_cores()))
    try:
        return operation_time(part.field, part.name, Mesh.alone("cpu").data, effort)
    finally:
        torch.set_num_threads(before)
