"""Which lines of code made what is alive at the peak: the stacks of all allocations in a ``with`` block, on demand.

    with allocation_stacks("cpu") as made:
        step()
    made.at_peak()                     # bytes alive at the highest moment, by the line that made them
    made.save("peak.pickle")           # for https://pytorch.org/memory_viz

On CUDA it is torch's own recording, of every block of the caching allocator. On the CPU torch has none: a
``MemoryLedger`` sees the storages that operations of this thread make, and when they are freed, and writes the same
form. Neither lists what was allocated before the block. Recording makes a step several times slower: do not time it.
"""

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pandas as pd
import torch

from shardlab.comm.callers import callers
from shardlab.comm.trees import tensors_in
from shardlab.trace import memory_by_role
from shardlab.trace.memory_by_role import PLAIN, MemoryLedger
from shardlab.vocabulary import Role

MAX_ENTRIES = 1_000_000  # of CUDA: then the oldest are lost
MAX_FRAMES = 40
ALLOC, FREE = "alloc", "free_completed"
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Of a dispatch mode, which stand in every stack.
_WRAPPERS = ("_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py")
_OWN = (__file__, memory_by_role.__file__, *(_TORCH + name for name in _WRAPPERS))

Entry = dict[str, Any]
"""As in torch's snapshots: action, addr, size, stream, time_us, and frames, innermost first."""


@dataclass(frozen=True)
class Allocations:
    """All that was allocated and freed, in order.

    Attributes:
        entries: in the form of torch's snapshots.
        segments: of CUDA's allocator at the end; none on the CPU.
    """

    entries: list[Entry] = field(default_factory=list)
    segments: list[Any] = field(default_factory=list)

    def at_peak(self) -> pd.DataFrame:
        """What was alive at the highest moment, by the stack that made it, most bytes first.

        Returns:
            ``bytes``, ``blocks`` (storages on the CPU), ``where`` (file:line of the innermost frame outside torch) and
            ``stack`` (all frames, innermost first, one a line). Bytes add up to the peak above what was there before.
        """
        rows = []
        for entry in _alive_at_peak(self.entries):
            frames = entry.get("frames", [])
            stack = "\n".join(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames)
            rows.append((entry["size"], _where(frames), stack))
        alive = pd.DataFrame(rows, columns=["size", "where", "stack"]).groupby(["where", "stack"], sort=False)["size"]
        found = alive.agg(bytes="sum", blocks="count").reset_index()[["bytes", "blocks", "where", "stack"]]
        return found.sort_values("bytes", ascending=False, kind="stable", ignore_index=True)

    def save(self, path: Path | str) -> Path:
        """Write a snapshot that https://pytorch.org/memory_viz shows, and return its path.

        Raises:
            ValueError: the file cannot be written.
        """
        path = Path(path)
        snapshot = {"segments": self.segments, "device_traces": [self.entries], "allocator_settings": {}}
        try:
            path.write_bytes(pickle.dumps(snapshot))
        except OSError as error:
            raise ValueError(f"path: {path} cannot be written: {error.strerror}") from error
        return path


@contextlib.contextmanager
def allocation_stacks(device: torch.device | str = "cpu") -> Iterator[Allocations]:
    """Inside, every allocation on the device is recorded with its stack; the result is complete after the block."""
    device, made = torch.device(device), Allocations()
    if device.type != "cuda":
        with _HostAllocations(made.entries):
            yield made
        return
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")  # torch documents it under this name
    try:
        yield made
        snapshot = memory._snapshot(device)
    finally:
        memory._record_memory_history(enabled=None)
    made.entries.extend(snapshot["device_traces"][device.index or torch.cuda.current_device()])
    made.segments.extend(snapshot["segments"])


def _alive_at_peak(entries: Sequence[Entry]) -> list[Entry]:
    """The allocations that are alive at the first of the highest moments."""
    alive: dict[int, int] = {}  # where it was allocated, by address
    freed_at: dict[int, int] = {}  # by where it was allocated
    held = highest = 0
    peak = -1
    for place, entry in enumerate(entries):
        if entry["action"] == ALLOC:
            alive[entry["addr"]] = place
            held += entry["size"]
        elif entry["action"] == FREE and entry["addr"] in alive:  # else it was there before
            born = alive.pop(entry["addr"])
            freed_at[born] = place
            held -= entries[born]["size"]
        if held > highest:
            highest, peak = held, place
    made = (place for place in range(peak + 1) if entries[place]["action"] == ALLOC)
    return [entries[place] for place in made if freed_at.get(place, inf) > peak]


def _where(frames: Sequence[dict[str, Any]]) -> str:
    outside = (frame for frame in frames if frame["line"] and not str(frame["filename"]).startswith(_TORCH))
    frame = next(outside, None)
    return "" if frame is None else f"{frame['filename']}:{frame['line']}"


class _HostAllocations(MemoryLedger):
    """Writes an entry for every storage on the CPU that an operation of this thread makes, and two when it goes."""

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__({})
        self._entries, self._operation, self._is_on_cpu = entries, "", True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; a view of what it was given is no allocation."""
        given = [one for one in tensors_in((args, kwargs)) if type(one) in PLAIN]
        self._operation = ""  # which these were not made by
        self.hold({Role.OTHER: given})
        self._operation = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _enter_storage(self, storage: torch.UntypedStorage) -> int:
        self._is_on_cpu = storage.device.type == "cpu"
        return super()._enter_storage(storage)

    def _note(self, serial: int, num_bytes: int) -> None:
        if num_bytes < 0:
            self._entries += [_entry(action, serial, -num_bytes, []) for action in ("free_requested", FREE)]
        elif num_bytes and self._operation and self._is_on_cpu:
            self._entries.append(_entry(ALLOC, serial, num_bytes, [_frame("", 0, self._operation), *_stack()]))


def _entry(action: str, serial: int, num_bytes: int, frames: list[dict[str, Any]]) -> Entry:
    return {
        "action": action, "addr": serial, "size": num_bytes, "stream": 0, "time_us": perf_counter_ns() // 1000,
        "frames": frames,
    }  # fmt: skip


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _stack() -> list[dict[str, Any]]:
    """The frames of the caller, innermost first, without those of the recorder."""
    frames = (frame for frame in callers(sys._getframe().f_back) if frame.f_code.co_filename not in _OWN)
    return [
        _frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in islice(frames, MAX_FRAMES)
    ]
