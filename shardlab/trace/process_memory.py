"""Memory of this process as torch's CUDA allocator and the operating system report it.

Every byte of the allocator has a reason:

    allocated = the roles of tensors + workspace            (rounding to whole blocks is part of the workspace)
    reserved  = allocated + fragmented + cached             (free parts of segments in use; whole free segments)

What lies outside of the allocator (the CUDA context, NCCL's channels) is not in these figures.
"""

import os
import sys
import weakref
from dataclasses import dataclass

import psutil
import torch

from shardlab.trace.memory import ByRole
from shardlab.vocabulary import Role


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

    def complete(self, held: ByRole) -> ByRole:
        """The roles, with ``Role.WORKSPACE`` for what is in no tensor: on the device they add up to allocated."""
        if self.allocated_bytes is None:
            return held
        in_tensors = sum(num_bytes for role, num_bytes in held.items() if role is not Role.OFFLOADED)
        return {**held, Role.WORKSPACE: self.allocated_bytes - in_tensors}


class ResidentBytes:
    """Reads the resident set from a file that stays open, in a quarter of the time in which psutil opens it again."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm: int | None = None
        if sys.platform == "linux":
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
            weakref.finalize(self, os.close, self._statm)

    def __call__(self) -> int:
        """Bytes now."""
        if self._statm is None:
            return int(self._process.memory_info().rss)
        return int(os.pread(self._statm, 128, 0).split()[1]) * self._page_bytes
