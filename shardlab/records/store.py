"""Runs on disk: five tables per rank, appended while training, beside a JSON manifest.

    DIR/manifest.json                 versions, device, configuration, what recording cost
    DIR/rank0.journal                 one entry a step: a killed run keeps every step that has ended
    DIR/collectives.rank0.parquet     one file a table when the run has ended; the entries are then gone

An entry (``entries.py``) is MessagePack in mapped memory (``journal.py``), because that costs least inside a training
run, where all caches are cold: a tenth of a millisecond per step, where a line of JSON takes half a millisecond and an
Arrow batch per table more. Reading needs no torch.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from shardlab.records.entries import Columns, joined, read
from shardlab.records.journal import Journal
from shardlab.records.tables import TABLES

FORMAT = 3  # 1 knew less of the CUDA allocator; 2 had lines of JSON for entries
STEPS_AT_ONCE = 256  # entries turned into Parquet together: a long run is not held in memory to be finished
_ARROW = {"string": pa.string(), "Int64": pa.int64(), "float64": pa.float64(), "boolean": pa.bool_()}


@dataclass(frozen=True, repr=False)
class Records:
    """The five tables of one run or of several, and the manifests by run name."""

    collectives: pd.DataFrame
    spans: pd.DataFrame
    memory: pd.DataFrame
    shards: pd.DataFrame
    steps: pd.DataFrame
    manifests: Mapping[str, Mapping[str, Any]]

    def __repr__(self) -> str:
        """A line for each table: whole tables would fill pages."""
        lines = [f"Records of {', '.join(self.manifests) or 'no run'}"]
        for name in TABLES:
            table = getattr(self, name)
            ranks, steps = table["rank"].nunique(), table["step"].nunique()
            lines.append(f"  {name:<12}{len(table):>9,} rows, {ranks} ranks, {steps} steps")
        return "\n".join(lines)


class RunWriter:
    """Appends rows of one rank.

    Args:
        directory: of the run; made if it is not there.
        rank: of this process.
        run: name of the run; a column of every row, like ``source`` and ``rank``.
        source: measured, emulated or predicted.
    """

    def __init__(self, directory: Path, rank: int, run: str, source: str) -> None:
        self.directory, self.rank = directory, rank
        self._keys = {"run": run, "source": source, "rank": rank}
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rank{rank}.journal"
        self._journal: Journal | None = Journal(self._path)
        self.before_close: Callable[[], None] = lambda: None
        """Appends what whoever writes still holds."""
        self._pack = msgpack.Packer().pack  # one buffer for all: a new one a call would cost more than packing does

    def append(self, step: int, tables: Mapping[str, Columns]) -> None:
        """Write one step through to the operating system: it survives a kill of this process.

        Args:
            step: its number.
            tables: columns by name of the table, as an entry has them; none for an empty table.
        """
        assert self._journal is not None, "the writer is closed"
        self._journal.append(self._pack({**self._keys, "step": step, **tables}))

    def close(self) -> None:
        """Turn the entries into Parquet files."""
        if self._journal is None:
            return
        self.before_close()
        self._journal.close()
        self._journal = None  # closed for good, even if writing the Parquet files fails
        with ExitStack() as stack:
            paths = {name: self.directory / f"{name}.rank{self.rank}.parquet" for name in TABLES}
            writers = {name: stack.enter_context(pq.ParquetWriter(paths[name], _SCHEMAS[name])) for name in TABLES}
            for batch in _batches(self._path):
                for name, table in batch.items():
                    writers[name].write_table(table)
        # Last: until the Parquet files are complete the journal is the only whole copy.
        self._path.unlink()


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json``, with the format's number; a reader sees the old file or the new one, never a part."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "manifest.json.part"
    part.write_text(json.dumps({"format": FORMAT, **manifest}, indent=2, default=str, allow_nan=False) + "\n")
    part.replace(directory / "manifest.json")  # atomic, and in the same directory, so on the same file system


def load_run(directory: Path | str) -> Records:
    """The records of one run, also of one that was killed.

    Raises:
        ValueError: the directory is no run, its manifest or a file is damaged, or its format is not the one
            this version reads.
    """
    directory = Path(directory)
    manifest = _manifest(directory)
    tables = _load_tables(directory)
    name = manifest.get("run", directory.name)
    if "run" in manifest and (others := {run for table in tables.values() for run in table["run"].unique()} - {name}):
        raise ValueError(
            f"run: {directory} holds tables of {', '.join(sorted(others))}, and the manifest of {name}; copy all files "
            "of a run together"
        )
    return Records(**tables, manifests={name: manifest})


def load_runs(directories: Iterable[Path | str]) -> Records:
    """The records of several runs in one set of tables.

    Raises:
        ValueError: there are none, or one of them cannot be loaded; see ``load_run``.
    """
    runs = [load_run(directory) for directory in directories]
    if not runs:
        raise ValueError("run: there are no runs to load")
    joined = {name: pd.concat([getattr(run, name) for run in runs], ignore_index=True) for name in TABLES}
    return Records(**joined, manifests={name: known for run in runs for name, known in run.manifests.items()})


def run_directories(directory: Path | str) -> list[Path]:
    """The directories of runs in ``directory``: itself, or those under ``records`` where it is a comparison.

    Raises:
        ValueError: it is neither.
    """
    directory = Path(directory)
    if (directory / "manifest.json").is_file():
        return [directory]
    found = sorted(path.parent for path in directory.glob("records/*/manifest.json"))
    if not found:
        raise ValueError(
            f"directory: {directory} holds no manifest.json and no records/*/manifest.json, so it is neither a run nor "
            "a comparison; give the directory that compare or record has written"
        )
    return found


def whole_steps(records: Records) -> Records:
    """The records without steps that only some ranks have finished."""
    steps = records.steps
    ranks = steps.groupby("run")["rank"].transform("nunique")
    whole = steps[steps.groupby(["run", "step"])["rank"].transform("nunique") == ranks]
    last = whole.groupby("run")["step"].max()
    tables = {}
    for name in TABLES:
        table = getattr(records, name)
        tables[name] = table[table["step"] <= table["run"].map(last)]  # a run without whole steps keeps no rows
    return Records(**tables, manifests=records.manifests)


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.is_file():
        runs = sorted(found.parent.name for found in directory.glob("records/*/manifest.json"))
        hint = f" but a comparison: load_comparison reads it, load_run one of its records/: {', '.join(runs)}"
        raise ValueError(f"directory: {directory} holds no manifest.json, so it is no run{hint if runs else ''}")
    try:
        manifest = json.loads(path.read_text())
        version = int(manifest["format"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"run: {path} is damaged, or not a manifest of shardlab ({error!r})") from error
    if version != FORMAT:
        age = "a newer" if version > FORMAT else "an older"
        raise ValueError(
            f"directory: {directory} was written in format {version} by {age} shardlab; this one reads format {FORMAT}"
        )
    return dict(manifest)


def _load_tables(directory: Path) -> dict[str, pd.DataFrame]:
    # A rank that was killed while it wrote its Parquet files has both. Its journal is whole, the files may not be.
    cut_off = {path.stem: path for path in sorted(directory.glob("rank*.journal"))}
    # A rank writes a file for each table, also for an empty one: without one of them every sum would be too small.
    ranks = {path.name.split(".")[1] for path in directory.glob("*.rank*.parquet")} - cut_off.keys()
    parts = {
        name: [_read_parquet(directory / f"{name}.{rank}.parquet", name) for rank in sorted(ranks)] for name in TABLES
    }
    for path in cut_off.values():
        for batch in _batches(path):
            for name, table in batch.items():
                parts[name].append(table)
    return {
        name: table.frame(pa.concat_tables(parts[name]).to_pandas() if parts[name] else [])
        for name, table in TABLES.items()
    }


def _read_parquet(path: Path, name: str) -> pa.Table:
    try:
        # Before it is read by the schema, which would fill up the columns that another table lacks.
        TABLES[name].check(pd.DataFrame(columns=pq.read_schema(path).names))
        table = pq.read_table(path, schema=_SCHEMAS[name])
    except (ValueError, pa.ArrowException, OSError) as error:
        raise ValueError(f"run: {path} cannot be read: {error}; copy all files of a run together") from error
    if ranks := {f"rank{rank}" for rank in table["rank"].unique().to_pylist()} - {path.name.split(".")[1]}:
        raise ValueError(f"run: {path} holds rows of {', '.join(sorted(ranks))}; copy all files of a run together")
    return table


def _batches(path: Path) -> Iterator[dict[str, pa.Table]]:
    """All tables of a stream, some steps at a time."""
    entries = read(path)
    while some := list(islice(entries, STEPS_AT_ONCE)):
        yield {name: pa.table(joined(some, table), _SCHEMAS[name]) for name, table in TABLES.items()}


_SCHEMAS = {
    name: pa.schema([(column.name, _ARROW[column.dtype]) for column in table.columns]) for name, table in TABLES.items()
}
