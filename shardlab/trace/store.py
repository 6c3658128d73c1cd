"""Runs on disk: five tables per rank, appended while training, beside a JSON manifest.

    DIR/manifest.json                 versions, device, configuration, what recording cost
    DIR/rank0.jsonl                   one line a step: a killed run keeps every step whose line is whole
    DIR/collectives.rank0.parquet     one file a table when the run has ended; the lines are then gone

A line is one write of plain JSON because that is what costs least inside a training run: a tenth of a millisecond
where an Arrow batch per table takes half of one. Reading needs no torch.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from shardlab.tables import KEYS, TABLES, Table

FORMAT = 2  # 1 knew less of the CUDA allocator
STEPS_AT_ONCE = 256  # lines turned into Parquet together: a long run is not held in memory to be finished
_ARROW = {"string": pa.string(), "Int64": pa.int64(), "float64": pa.float64(), "boolean": pa.bool_()}
_NAMES = {name: tuple(column.name for column in table.columns[len(KEYS) :]) for name, table in TABLES.items()}
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
Row = dict[str, Any]


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
        self._path = directory / f"rank{rank}.jsonl"
        self._file: BinaryIO | None = self._path.open("wb", buffering=0)

    def append(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        """Write the rows of one step through to the operating system: they survive a kill of this process.

        Args:
            step: their step.
            tables: rows by name of the table; a row has all its columns but run, source, rank and step.
        """
        assert self._file is not None, "the writer is closed"
        line: dict[str, Any] = {**self._keys, "step": step}
        for table, rows in tables.items():
            if rows:
                line[table] = {name: [row[name] for row in rows] for name in _NAMES[table]}
        self._file.write(_encode(line).encode() + b"\n")

    def close(self) -> None:
        """Make compact files of the lines."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for table in TABLES.values():
            _write_parquet(self._path, table, self.directory / f"{table.name}.rank{self.rank}.parquet")
        self._path.unlink()


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json``, which carries the format's number; whoever reads sees the old one or the new one."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "manifest.json.part"
    part.write_text(json.dumps({"format": FORMAT, **manifest}, indent=2, default=str) + "\n")
    part.replace(directory / "manifest.json")


def load_run(directory: Path | str) -> Records:
    """The records of one run, also of one that was killed.

    Raises:
        ValueError: the directory is no run, its manifest or a file is damaged, or its format is not the one
            this version reads.
    """
    directory = Path(directory)
    manifest = _manifest(directory)
    tables = {name: _load_table(directory, table) for name, table in TABLES.items()}
    return Records(**tables, manifests={manifest.get("run", directory.name): manifest})


def load_runs(directories: Iterable[Path | str]) -> Records:
    """The records of several runs in one set of tables.

    Raises:
        ValueError: there are none, or one of them cannot be loaded; see ``load_run``.
    """
    runs = [load_run(directory) for directory in directories]
    if not runs:
        raise ValueError("run: there are no runs to load")
    names = [field.name for field in fields(Records) if field.name != "manifests"]
    joined = {name: pd.concat([getattr(run, name) for run in runs], ignore_index=True) for name in names}
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
            "a comparison"
        )
    return found


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.is_file():
        runs = sorted(found.parent.name for found in directory.glob("records/*/manifest.json"))
        hint = f" but a comparison: load_comparison reads it, load_run one of its records/: {', '.join(runs)}"
        raise ValueError(f"directory: {directory} holds no manifest.json, so it is no run{hint if runs else ''}")
    try:
        manifest = json.loads(path.read_text())
        version = int(manifest["format"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"run: {path} is damaged, or not a manifest of shardlab ({error!r})") from error
    if version != FORMAT:
        age = "a newer" if version > FORMAT else "an older"
        raise ValueError(
            f"directory: {directory} was written in format {version} by {age} shardlab; this one reads format {FORMAT}"
        )
    return dict(manifest)


def _load_table(directory: Path, table: Table) -> pd.DataFrame:
    finished = {path.name.split(".")[1]: path for path in sorted(directory.glob(f"{table.name}.rank*.parquet"))}
    # A rank killed while it wrote its Parquet files has both; the lines are then whole and the files may not be.
    cut_off = {path.stem: path for path in sorted(directory.glob("rank*.jsonl"))}
    parts = [_read_parquet(path, table) for rank, path in finished.items() if rank not in cut_off]
    parts += [batch for path in cut_off.values() for batch in _batches(path, table)]
    return table.frame(pa.concat_tables(parts).to_pandas()) if parts else table.frame([])


def _read_parquet(path: Path, table: Table) -> pa.Table:
    try:
        return pq.read_table(path, schema=_schema(table))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"run: {path} cannot be read: {error}") from error


def _write_parquet(lines: Path, table: Table, path: Path) -> None:
    with pq.ParquetWriter(path, _schema(table)) as writer:
        for batch in _batches(lines, table):
            writer.write_table(batch)


def _batches(path: Path, table: Table) -> Iterator[pa.Table]:
    """The rows of one table, some steps at a time."""
    columns: dict[str, list[Any]] = {name: [] for name in table.column_names}
    for count, line in enumerate(_whole_lines(path), 1):
        _add(columns, line, table)
        if count % STEPS_AT_ONCE == 0:
            yield _table(columns, table)
            columns = {name: [] for name in table.column_names}
    yield _table(columns, table)


def _add(columns: dict[str, list[Any]], line: dict[str, Any], table: Table) -> None:
    rows = line.get(table.name)
    if rows is None:
        return
    count = len(next(iter(rows.values())))
    for name, values in columns.items():
        values += rows[name] if name in rows else [line[name]] * count


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; the last one is left out where a kill has cut it in two."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"run: {path} is damaged: {error}") from error


def _table(columns: Mapping[str, list[Any]], table: Table) -> pa.Table:
    return pa.table(dict(columns), _schema(table))


def _schema(table: Table) -> pa.Schema:
    return pa.schema([(column.name, _ARROW[column.dtype]) for column in table.columns])
