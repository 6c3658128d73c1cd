"""Memory of this process as torch's CUDA allocator, malloc and the operating system report it.

Every byte of the allocator has a reason:

    allocated = the roles of tensors + workspace            (rounding to whole blocks is part of the workspace)
    reserved  = allocated + fragmented + cached             (free parts of segments in use; whole free segments)

What lies outside of the allocator (the CUDA context, NCCL's channels) is not in these figures. And on a CPU, where the
kernel says which pages are anonymous, of files and shared, and GNU's malloc what of it is in use and what is free:

    resident  = the roles of tensors + heap + free heap + interpreter + libraries + shared segments
"""

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from shardlab.trace.memory_by_role import ByRole
from shardlab.vocabulary import ProcessPart, Role


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


class _Malloc(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later (``man mallinfo``)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class ProcessMemory:
    """Splits the resident set of this process, on Linux with GNU's malloc; on other systems it knows no parts."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._malloc: Callable[[], _Malloc] | None = None
        if sys.platform == "linux" and (found := getattr(ctypes.CDLL(None), "mallinfo2", None)) is not None:
            found.restype = _Malloc
            self._malloc = found
            self._status = os.open("/proc/self/status", os.O_RDONLY)
            weakref.finalize(self, os.close, self._status)

    def parts(self, held: ByRole) -> dict[ProcessPart, int]:
        """Bytes of each part now; with the tensors that are ``held`` they add up to the resident set."""
        if self._malloc is None or self._status is None:
            return {}
        malloc, in_tensors = self._malloc(), sum(held.values())
        lines = (line.split() for line in os.pread(self._status, 8192, 0).decode().splitlines())
        kib = {words[0]: int(words[1]) for words in lines if words and words[0].startswith("Rss")}
        anonymous, files, shared = (1024 * kib[f"Rss{name}:"] for name in ("Anon", "File", "Shmem"))
        in_use = malloc.uordblks + malloc.hblkhd
        if in_use < in_tensors:  # another malloc was loaded in front of GNU's
            return {}
        return {
            ProcessPart.HEAP: in_use - in_tensors,
            ProcessPart.FREE_HEAP: malloc.fordblks,
            ProcessPart.INTERPRETER: anonymous - in_use - malloc.fordblks,
            ProcessPart.LIBRARIES: files,
            ProcessPart.SHARED_SEGMENTS: shared,
        }
