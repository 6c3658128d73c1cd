"""The rows of table ``memory`` of one step: what is held at rest, what the process holds beside it, and the peak.

What it holds beside tensors is what torch's CUDA allocator, malloc and the operating system report.
Every byte of the allocator has a reason:

    allocated = the roles of tensors + workspace            (rounding to whole blocks is part of the workspace)
    reserved  = allocated + fragmented + cached             (free parts of segments in use; whole free segments)

What lies outside of the allocator (the CUDA context, NCCL's channels) is not in these figures. And on a CPU, where the
kernel says which pages are anonymous, of files and shared, and GNU's malloc what of it is in use and what is free:

    resident  = the roles of tensors + heap + free heap + interpreter + libraries + shared segments
"""

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from shardlab.analysis.held_bytes import PEAK, PROCESS, REST, WHOLE_STEP
from shardlab.records.tables import ProcessPart
from shardlab.trace.memory_by_role import ByRole, LiveTensors, MemoryLedger, bytes_by_role, with_unattributed
from shardlab.trace.observed import Row
from shardlab.vocabulary import Phase, Role


@dataclass(frozen=True)
class Allocator:
    """Counters of the allocator in bytes, all NA where no CUDA device is used; see the columns of table ``memory``."""

    allocated_bytes: int | None = None
    rounding_bytes: int | None = None
    fragmented_bytes: int | None = None
    reserved_bytes: int | None = None

    @classmethod
    def now(cls, device: torch.device) -> "Allocator":
        """Its counters at this moment."""
        return cls._read(device, "current")

    @classmethod
    def peak(cls, device: torch.device) -> "Allocator":
        """The highest of each since ``torch.cuda.reset_peak_memory_stats``; torch keeps no peak of the free parts."""
        highest = cls._read(device, "peak")
        return cls(highest.allocated_bytes, highest.rounding_bytes, None, highest.reserved_bytes)

    @classmethod
    def _read(cls, device: torch.device, when: str) -> "Allocator":
        stats = torch.cuda.memory_stats(device)
        allocated, active, requested, fragmented, reserved = (
            int(stats[f"{name}_bytes.all.{when}"])
            for name in ("allocated", "active", "requested", "inactive_split", "reserved")
        )
        return cls(allocated, active - requested, fragmented, reserved)

    def complete(self, held: Mapping[Any, int]) -> Mapping[Any, int]:
        """The roles, with ``Role.WORKSPACE`` for what is in no tensor: on the device they add up to allocated."""
        if self.allocated_bytes is None:
            return held
        in_tensors = sum(num_bytes for role, num_bytes in held.items() if role is not Role.OFFLOADED)
        return {**held, Role.WORKSPACE: self.allocated_bytes - in_tensors}


class _Malloc(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later (``man mallinfo``)."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


class ProcessMemory:
    """Splits the resident set of this process, on Linux with GNU's malloc; on other systems it knows no parts."""

    def __init__(self) -> None:
        self._malloc: Callable[[], _Malloc] | None = None
        if sys.platform == "linux" and (found := getattr(ctypes.CDLL(None), "mallinfo2", None)) is not None:
            found.restype = _Malloc
            self._malloc = found

    def parts(self, held: ByRole) -> dict[ProcessPart, int]:
        """Bytes of each part now; with the tensors that are ``held`` they add up to the resident set."""
        if self._malloc is None:
            return {}
        malloc, in_tensors = self._malloc(), sum(held.values())
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        kib = {words[0]: int(words[1]) for words in lines if words and words[0].startswith("Rss")}
        anonymous, files, shared = (1024 * kib[f"Rss{name}:"] for name in ("Anon", "File", "Shmem"))
        in_use = malloc.uordblks + malloc.hblkhd
        if in_use < in_tensors:  # another malloc was loaded in front of GNU's
            return {}
        return {
            ProcessPart.HEAP: in_use - in_tensors, ProcessPart.FREE_HEAP: malloc.fordblks,
            ProcessPart.INTERPRETER: anonymous - in_use - malloc.fordblks, ProcessPart.LIBRARIES: files,
            ProcessPart.SHARED_SEGMENTS: shared,
        }  # fmt: skip


class MemorySamples:
    """Samples of one rank, as rows of one step after another.

    Args:
        device: of the compute.
        origin_ns: from where times count.
    """

    def __init__(self, device: torch.device, origin_ns: int) -> None:
        self.rows: list[Row] = []
        self._device, self._on_cuda, self._origin_ns = device, device.type == "cuda", origin_ns
        self._process, self._process_memory = psutil.Process(), ProcessMemory()

    def begin_step(self) -> None:
        """Forget the rows of the step before."""
        self.rows = []
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def at_rest(self, named: LiveTensors, time_ns: int, phase: Phase) -> None:
        """Sample what is held now, in place of an earlier sample of this step.

        Args:
            named: the tensors whose role is known; on the CPU all others count too, as unattributed.
            time_ns: now.
            phase: now.
        """
        self.rows.clear()
        held = bytes_by_role(named if self._on_cuda else with_unattributed(named))
        self._sample(REST, held, time_ns, phase, Allocator.now(self._device) if self._on_cuda else Allocator())
        if not self._on_cuda:  # there the allocator's figures say what matters
            parts, resident_bytes = self._process_memory.parts(held), self._process.memory_info().rss
            self.rows += memory_rows(PROCESS, parts, time_ns - self._origin_ns, phase, resident_bytes, Allocator())

    def peak(self, ledger: MemoryLedger | None) -> int | None:
        """Add the rows of a traced step; return the step's peak: the CUDA allocator's, else the ledger's, else None."""
        allocator = Allocator.peak(self._device) if self._on_cuda else Allocator()
        if ledger is None:
            return allocator.allocated_bytes
        moments = ledger.moments()
        highest = max(moments, key=lambda moment: moment.num_bytes)
        self._sample(PEAK, highest.by_role, highest.time_ns, highest.phase, allocator)
        for moment in moments:  # within the step the resident set is not read
            # A module named 'rest' or 'peak' must not be mistaken for those.
            place = f"module {moment.unit}" if moment.unit in WHOLE_STEP else moment.unit
            time_ns = moment.time_ns - self._origin_ns
            self.rows += memory_rows(place, moment.by_role, time_ns, moment.phase, None, Allocator())
        return highest.num_bytes if allocator.allocated_bytes is None else allocator.allocated_bytes

    def _sample(self, where: str, held: ByRole, time_ns: int, phase: Phase, allocator: Allocator) -> None:
        since_ns, resident_bytes = time_ns - self._origin_ns, self._process.memory_info().rss
        self.rows += memory_rows(where, held, since_ns, phase, resident_bytes, allocator)


def memory_rows(
    where: str, held: Mapping[Any, int], time_ns: int, phase: Phase, resident_bytes: int | None, allocator: Allocator
) -> list[Row]:
    """One row per role or part of the process; each also has the figures of the allocator and of the process."""
    common = {
        "time_ns": time_ns, "phase": phase, "where": where, "resident_bytes": resident_bytes, **asdict(allocator),
    }  # fmt: skip
    return [{**common, "role": role, "bytes": num_bytes} for role, num_bytes in allocator.complete(held).items()]
