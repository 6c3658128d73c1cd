"""Measures what this machine's ranks take for operations, messages and engines, part by part, in about two minutes."""

import platform
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from shardlab.comm.mesh import Mesh
from shardlab.installed import __version__, num_cores
from shardlab.lab.engine_times import ENGINE_PARTS, engine_time
from shardlab.lab.kept_parts import KeptParts, Part
from shardlab.lab.message_times import MESSAGE_PARTS, message_time
from shardlab.lab.operation_times import FULL, QUICK, Effort, Meet, operation_parts, operation_time
from shardlab.launch import RankPool
from shardlab.planner.machine import Line, Machine

VERSIONS = {"torch": torch.__version__, "shardlab": __version__}


class Calibration:
    """A calibration of this machine, of which some parts may be measured already; nothing else should run meanwhile.

    Args:
        ranks: numbers of ranks that are measured, besides one with the threads of all.
        is_quick: whether everything is read less often.
        path: of a file that keeps the parts until all are measured; None for none.
    """

    def __init__(self, ranks: Sequence[int], *, is_quick: bool = False, path: Path | None = None) -> None:
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
            # A part without messages may be silent for long on a machine with load.
            with RankPool(ranks, device="cpu", notice_s=None) as pool:
                for part in missing:
                    if perf_counter() - began > limit_s:
                        return False
                    self.kept.keep(part, self._measured(pool, part, effort))
                    on_progress(str(part))
        return True

    def machine(self) -> Machine:
        """What was measured, when that is all."""
        keys = dict.fromkeys(part.ranks for part in self.parts)
        costs = {key: self.kept.costs(key) for key in keys}
        return Machine(platform.node(), VERSIONS, num_cores(), costs, is_quick=self.is_quick)

    def _parts(self, ranks: int) -> Iterator[Part]:
        for field, name in (*operation_parts(), *MESSAGE_PARTS, *ENGINE_PARTS):
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


def differs_here(machine: Machine) -> str:
    """How the calibrated machine differs from this one: 'on node-7, with torch 2.11'; empty if it does not."""
    said = (
        []
        if (machine.name, machine.cores) == (platform.node(), num_cores())
        else [f"on {machine.name} with {machine.cores} cores"]
    )
    said += [f"with {name} {version}" for name, version in machine.versions.items() if VERSIONS.get(name) != version]
    return ", ".join(said)


def _total(value: Any) -> float:
    if isinstance(value, Line):
        return sum(value.seconds)
    return float(sum(value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)))


def _together(_: int, part: Part, effort: Effort) -> Any:
    with Mesh({"data": torch.distributed.get_world_size()}) as mesh:
        if (part.field, part.name) in MESSAGE_PARTS:
            return message_time(part.field, part.name, mesh, effort)
        return operation_time(part.field, part.name, Meet(mesh.data), effort)


def _alone(rank: int, part: Part, effort: Effort) -> Any:
    if rank:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(min(before * torch.distributed.get_world_size(), num_cores()))
    try:
        return operation_time(part.field, part.name, Meet(None), effort)
    finally:
        torch.set_num_threads(before)
