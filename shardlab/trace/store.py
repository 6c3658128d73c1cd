"""Runs on disk: five tables per rank, appended while training, beside a JSON manifest.

    DIR/manifest.json                 versions, device, configuration, what recording cost
    DIR/collectives.rank0.arrows      Arrow stream, appended step by step: a killed run keeps what it had
    DIR/collectives.rank0.parquet     the same, compact, when the run has ended

Reading needs no torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from shardlab.tables import TABLES, Table

FORMAT = 1
_ARROW = {"string": pa.string(), "Int64": pa.int64(), "float64": pa.float64(), "boolean": pa.bool_()}
Row = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """The five tables of one run or of several, and the manifests by run name."""

    collectives: pd.DataFrame
    spans: pd.DataFrame
    memory: pd.DataFrame
    shards: pd.DataFrame
    steps: pd.DataFrame
    manifests: Mapping[str, Mapping[str, Any]]


class RunWriter:
    """Appends rows of one rank.

    Args:
        directory: of the run; made if it is not there.
        rank: of this process.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        directory.mkdir(parents=True, exist_ok=True)
        self._streams: dict[str, tuple[BinaryIO, pa.RecordBatchStreamWriter]] = {}

    def append(self, table: Table, rows: Sequence[Row]) -> None:
        """Write rows through to the operating system: they survive a kill of this process."""
        if not rows:
            return
        if table.name not in self._streams:
            file = self._path(table, "arrows").open("wb", buffering=0)
            self._streams[table.name] = (file, pa.ipc.new_stream(file, _schema(table)))
        self._streams[table.name][1].write_batch(pa.RecordBatch.from_pylist(list(rows), _schema(table)))

    def close(self) -> None:
        """End the streams and make compact files of them."""
        for name, (file, stream) in self._streams.items():
            stream.close()
            file.close()
            source = self._path(TABLES[name], "arrows")
            pq.write_table(_read_stream(source, TABLES[name]), self._path(TABLES[name], "parquet"))
            source.unlink()
        self._streams.clear()

    def _path(self, table: Table, ending: str) -> Path:
        return self.directory / f"{table.name}.rank{self.rank}.{ending}"


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json``; it carries the format's number."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps({"format": FORMAT, **manifest}, indent=2, default=str) + "\n")


def load_run(directory: Path | str) -> Records:
    """The records of one run, also of one that was killed.

    Raises:
        ValueError: the directory is no run, or its format is newer than this version reads.
    """
    directory = Path(directory)
    path = directory / "manifest.json"
    if not path.is_file():
        raise ValueError(f"run: {directory} holds no manifest.json, so it is no run")
    manifest = json.loads(path.read_text())
    if manifest.get("format", 0) > FORMAT:
        raise ValueError(f"run: {directory} has format {manifest['format']}, this version reads up to {FORMAT}")
    tables = {name: _load_table(directory, table) for name, table in TABLES.items()}
    return Records(**tables, manifests={manifest.get("run", directory.name): manifest})


def load_runs(directories: Iterable[Path | str]) -> Records:
    """The records of several runs in one set of tables."""
    runs = [load_run(directory) for directory in directories]
    if not runs:
        raise ValueError("run: there are no runs to load")
    names = [field.name for field in fields(Records) if field.name != "manifests"]
    joined = {name: pd.concat([getattr(run, name) for run in runs], ignore_index=True) for name in names}
    return Records(**joined, manifests={name: known for run in runs for name, known in run.manifests.items()})


def _load_table(directory: Path, table: Table) -> pd.DataFrame:
    finished = {path.stem: path for path in sorted(directory.glob(f"{table.name}.rank*.parquet"))}
    cut_off = {
        path.stem: path for path in sorted(directory.glob(f"{table.name}.rank*.arrows")) if path.stem not in finished
    }
    parts = [pq.read_table(path, schema=_schema(table)) for path in finished.values()]
    parts += [_read_stream(path, table) for path in cut_off.values()]
    if not parts:
        return table.frame([])
    return table.frame(pa.concat_tables(parts).to_pandas())


def _read_stream(path: Path, table: Table) -> pa.Table:
    """All whole batches of a stream; one that a kill has cut in two is left out."""
    batches = []
    try:
        with pa.ipc.open_stream(path) as stream:
            batches = [*_until_cut(stream)]
    except (pa.ArrowInvalid, OSError):
        pass  # killed before the header was whole: no rows
    return pa.Table.from_batches(batches, _schema(table))


def _until_cut(stream: pa.RecordBatchStreamReader) -> Iterable[pa.RecordBatch]:
    while True:
        try:
            yield stream.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError):
            return


def _schema(table: Table) -> pa.Schema:
    return pa.schema([(column.name, _ARROW[column.dtype]) for column in table.columns])
