"""The five tables that every run leaves: their columns, dtypes and units. Nothing else describes a record.

=============  ==========================================================================
collectives    one row per collective and rank: what moved, how much, when
spans          one row per stretch of time and rank: which unit, forward or backward or off the CPU
memory         one row per role and sample: live bytes
shards         one row per piece of a tensor a rank holds
steps          one row per step and rank: loss, times, peaks
=============  ==========================================================================

Times are microseconds on one axis for all ranks of a host (``time.perf_counter_ns``, which is CLOCK_MONOTONIC and
therefore shared), counted from the start of the run. Bytes are exact integers; ``wire_bytes`` is what the algorithm
needs this rank to send, ``moved_bytes`` what its transport sends.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import nan

import pandas as pd

STREAM_TRANSPORTS = ("nccl", "staged", "device")
"""How the names of transports on a GPU begin, where a stream waits for what the host has issued ahead of it.

``device`` is whatever else moved data in an imported trace: symmetric memory, DeepEP, a copy between two devices.
"""


class ProcessPart(StrEnum):
    """What a process holds of the host's memory beside its tensors; with them it adds up to the resident set."""

    HEAP = "heap"  # in use by malloc and in no known tensor: buffers of gloo, weights that oneDNN packed, C++'s own
    FREE_HEAP = "free_heap"  # freed, and kept by malloc for what comes next
    INTERPRETER = "interpreter"  # Python's small objects, stacks, and data of libraries; less what was never written
    LIBRARIES = "libraries"  # code and other mapped files
    SHARED_SEGMENTS = "shared_segments"  # memory that ranks share to send through it


@dataclass(frozen=True)
class Column:
    """One column: ``dtype`` is pandas' name for it, ``meaning`` says the unit."""

    name: str
    dtype: str
    meaning: str
    optional: bool = False
    """Whether a table may lack it, as older records do: then it is missing in every row."""


@dataclass(frozen=True)
class Table:
    """A named list of columns."""

    name: str
    columns: tuple[Column, ...]

    @property
    def column_names(self) -> list[str]:
        """Names of all columns, in order."""
        return [column.name for column in self.columns]

    def frame(self, rows: list[dict[str, object]] | pd.DataFrame) -> pd.DataFrame:
        """Rows as a DataFrame with exactly this table's columns and dtypes.

        Raises:
            ValueError: a column is missing or unknown; the message names it.
        """
        frame = pd.DataFrame(rows, columns=None if len(rows) else self.column_names)
        self.check(frame)
        frame = frame.assign(**{name: nan for name in self.column_names if name not in frame.columns})
        return frame[self.column_names].astype({column.name: column.dtype for column in self.columns})

    def check(self, frame: pd.DataFrame) -> None:
        """Raise ValueError, naming the columns, unless ``frame`` has exactly the columns of this table."""
        missing = [known.name for known in self.columns if not known.optional and known.name not in frame.columns]
        unknown = [name for name in frame.columns if name not in self.column_names]
        if missing or unknown:
            raise ValueError(
                f"table {self.name!r}: missing columns {missing}, unknown columns {unknown}; "
                f"it has {', '.join(self.column_names)}"
            )


KEYS = (
    Column("run", "string", "name of the run, for example the strategy"),
    Column("source", "string", "measured, emulated (a link was emulated) or predicted"),
    Column("rank", "Int64", "rank in the whole group"),
    Column("step", "Int64", "training step, from 0; -1 before the first"),
)

COLLECTIVES = Table("collectives", (
    *KEYS,
    Column("seq", "Int64", "position among this rank's collectives of the run, from 0"),
    Column("axis", "string", "axis of the mesh (vocabulary.MeshAxis)"),
    Column("op", "string", "vocabulary.Collective"),
    Column("tag", "string", "what it was for, for example 'gradients of bucket 2'"),
    Column("phase", "string", "phase in which it was issued (vocabulary.Phase)"),
    Column("dtype", "string", "element type, for example float32"),
    Column("numel", "Int64", "elements of the whole (unsharded) buffer"),
    Column("bytes", "Int64", "bytes of the whole (unsharded) buffer"),
    Column("wire_bytes", "float64", "bytes that the algorithm needs this rank to send, by the ring formula"),
    Column("moved_bytes", "float64", "bytes that this rank's transport sends for it; NaN if not known", optional=True),
    Column("group_size", "Int64", "ranks that take part"),
    Column("transport", "string", "shared_memory, gloo, nccl, staged, device, or one with an emulated link"),
    Column("issue_us", "float64", "the caller issued it"),
    Column("start_us", "float64", "the transport began it"),
    Column("end_us", "float64", "its result was there"),
    Column("wait_start_us", "float64", "the caller began to wait; NaN if it never waited"),
    Column("wait_end_us", "float64", "the caller went on; NaN if it never waited"),
))  # fmt: skip

SPANS = Table("spans", (
    *KEYS,
    Column("unit", "string", "module name, or optimizer, data"),
    Column("kind", "string", "vocabulary.SpanKind"),
    Column("start_us", "float64", "begin"),
    Column("end_us", "float64", "end"),
))  # fmt: skip

MEMORY = Table("memory", (
    *KEYS,
    Column("time_us", "float64", "when the sample was taken"),
    Column("phase", "string", "phase (vocabulary.Phase)"),
    Column("where", "string", "'rest' after a step, 'process' beside that, 'peak' of the step, or a unit"),
    Column("role", "string", "vocabulary.Role; where 'process', vocabulary.ProcessPart"),
    Column("bytes", "Int64", "live bytes of this role, each storage counted once"),
    Column("allocated_bytes", "Int64", "CUDA allocator: blocks in use, the sum of the roles; NA on CPU"),
    Column("rounding_bytes", "Int64", "CUDA allocator: what blocks are larger than was asked for; NA on CPU"),
    Column("fragmented_bytes", "Int64", "CUDA allocator: free parts of segments that are in use; NA on CPU"),
    Column("reserved_bytes", "Int64", "CUDA allocator: all that it holds of the device; NA on CPU"),
    Column("resident_bytes", "Int64", "resident set of the process (it keeps what is freed); NA where not read"),
))  # fmt: skip

SHARDS = Table("shards", (
    *KEYS,
    Column("parameter", "string", "name in the user's module"),
    Column("shape", "string", "shape of the whole parameter, for example 128x64"),
    Column("role", "string", "parameter, gradient or optimizer_state"),
    Column("bucket", "Int64", "bucket of the layout; -1 where there is none"),
    Column("start", "Int64", "first element this rank holds, in the flattened parameter"),
    Column("stop", "Int64", "one past the last element"),
    Column("bytes", "Int64", "bytes of this piece"),
))  # fmt: skip

STEPS = Table("steps", (
    *KEYS,
    Column("loss", "float64", "mean over ranks and micro-batches"),
    Column("grad_norm", "float64", "global norm before clipping; NaN where it was not computed"),
    Column("learning_rate", "float64", "of the first parameter group"),
    Column(
        "start_us", "float64", "when the step began on this rank, before its first batch; NaN in older records",
        optional=True,
    ),
    Column("step_us", "float64", "time from there until its parameters are stepped, before the loss is reported"),
    Column(
        "queued_us", "float64", "the computing thread could run and had no core; NaN where the system does not say",
        optional=True,
    ),
    Column(
        "dispatch_us", "float64",
        "what Python and torch take at least to call the operations of forward and backward: their number times the "
        "CPU time of one on a single number; NaN where memory was not traced, or on a device",
        optional=True,
    ),
    Column("exposed_comm_us", "float64", "communication with no compute at the same time; NaN without any"),
    Column("overlap", "float64", "share of communication hidden by compute, 0 to 1; NaN without any"),
    Column("peak_bytes", "Int64", "highest live bytes in the step; NA where it was not traced"),
    Column("wire_bytes", "float64", "sum of those of the step's collectives; NaN where these were not watched"),
    Column("num_tokens", "Int64", "tokens or samples this rank trained on"),
    Column("traced_memory", "boolean", "memory was traced in this step, which slows it: leave it out of timings"),
    Column("unlike_step", "Int64", "until here the last step with larger inputs or other calls than every "
                                   "traced one, so that its peak is not known; NA: none", optional=True),
))  # fmt: skip

TABLES = {table.name: table for table in (COLLECTIVES, SPANS, MEMORY, SHARDS, STEPS)}
