"""Runs on disk: what was written is read, whatever became of the writer."""

import json

import pandas as pd
import pytest

from shardlab.records import store
from shardlab.records.journal import END
from shardlab.records.store import RunWriter, load_run, load_runs, run_directories, write_manifest
from shardlab.records.tables import TABLES
from tests.analysis.hand_made import NAN, STEP
from tests.trace.journals import add, heard


def collective(seq):
    return {
        "seq": seq, "axis": "data", "op": "all_reduce", "tag": "gradients of bucket 0 \"ü\"", "phase": "backward",
        "dtype": "float32", "numel": 3, "bytes": 12, "wire_bytes": 12.5, "group_size": 2, "transport": "gloo",
        "issue_us": 1.0, "start_us": 2.0, "end_us": 3.0, "wait_start_us": NAN, "wait_end_us": NAN,
    }  # fmt: skip


def one_step(step):
    is_odd = bool(step % 2)
    return STEP | {"loss": 1.0 / (step + 3), "peak_bytes": None if is_odd else 2**40, "traced_memory": is_odd}


def write(directory, steps, rank=0, run="ddp"):
    """A writer with ``steps`` steps on disk, not closed."""
    write_manifest(directory, {"run": run, "ranks": 2})
    writer = RunWriter(directory, rank, run, "measured")
    for step in range(steps):
        collectives = [collective(2 * step), collective(2 * step + 1)]
        writer.append(step, {"collectives": heard(collectives), "steps": heard([one_step(step)])})
    return writer


def killed(writer):
    """Nothing more is written, and nothing is made of the entries."""
    writer._journal.close()


def test_round_trip_is_exact(tmp_path):
    for rank in (0, 1):
        write(tmp_path, steps=3, rank=rank).close()
    records = load_run(tmp_path)
    assert not list(tmp_path.glob("*.journal"))
    for name, table in TABLES.items():
        table.check(getattr(records, name))
    assert len(records.collectives) == 12
    assert records.steps["loss"].tolist() == [1 / 3, 1 / 4, 1 / 5] * 2  # bit for bit
    assert records.steps["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert records.steps["peak_bytes"].tolist()[:3] == [2**40, pd.NA, 2**40]
    assert records.steps["traced_memory"].tolist()[:3] == [False, True, False]
    assert records.collectives["wait_end_us"].isna().all()
    assert set(records.collectives["tag"]) == {'gradients of bucket 0 "ü"'}
    assert records.spans.empty
    assert dict(records.manifests["ddp"]) == {"format": store.FORMAT, "run": "ddp", "ranks": 2}


def test_a_stream_cut_anywhere_reads_every_whole_step(tmp_path):
    """A kill leaves no half entry, but a disk may."""
    ends, path = [], tmp_path / "rank0.journal"
    for steps in (1, 2, 3):
        killed(write(tmp_path, steps))
        ends += END.unpack(path.read_bytes()[: END.size])
    whole = path.read_bytes()
    for length in (0, 1, END.size, ends[0] - 1, ends[0], ends[0] + 7, ends[1] - 2, ends[1], ends[2] - 1, len(whole)):
        path.write_bytes(whole[:length])
        records = load_run(tmp_path)
        expected = sum(end <= length for end in ends)
        assert records.steps["step"].tolist() == list(range(expected)), length
        assert len(records.collectives) == 2 * expected  # a step is there in all tables or in none


def test_unfinished_half_finished_and_finished_runs_read_the_same(tmp_path):
    writer = write(tmp_path, steps=3)
    unfinished = load_run(tmp_path)
    assert unfinished.steps["step"].tolist() == [0, 1, 2]
    (tmp_path / "steps.rank0.parquet").write_bytes(b"PAR1 half a fi")  # killed while the files were made
    half_finished = load_run(tmp_path)
    writer.close()
    writer.close()
    finished = load_run(tmp_path)
    for name in TABLES:
        for other in (half_finished, finished):
            pd.testing.assert_frame_equal(getattr(unfinished, name), getattr(other, name))


def test_long_runs_are_finished_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STEPS_AT_ONCE", 4)
    for steps in (7, 8, 9):
        write(tmp_path / str(steps), steps).close()
        assert load_run(tmp_path / str(steps)).steps["step"].tolist() == list(range(steps))


def test_a_comparison_is_told_from_a_run(tmp_path):
    for run in ("ddp", "zero1"):
        write(tmp_path / "records" / run, steps=1, run=run).close()
    with pytest.raises(ValueError, match=r"no run but a comparison: load_comparison reads it, .* ddp, zero1"):
        load_run(tmp_path)
    assert run_directories(tmp_path) == [tmp_path / "records" / "ddp", tmp_path / "records" / "zero1"]
    assert run_directories(tmp_path / "records" / "ddp") == [tmp_path / "records" / "ddp"]
    with pytest.raises(ValueError, match="neither a run nor a comparison"):
        run_directories(tmp_path / "records")


def test_another_format_and_no_run_at_all(tmp_path):
    write(tmp_path, steps=1).close()
    for apart, age in ((1, "a newer"), (-1, "an older")):
        write_manifest(tmp_path, {"format": store.FORMAT + apart})
        words = f"format {store.FORMAT + apart} by {age} shardlab; this one reads format {store.FORMAT}"
        with pytest.raises(ValueError, match=words):
            load_run(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds no manifest\.json, so it is no run"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="no runs to load"):
        load_runs([])


def test_damage_is_named(tmp_path):
    for text in ('{"format": 1, "run', "", "[]", '{"run": "ddp"}', '{"format": "x"}', "null", "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged, or not a manifest"):
            load_run(tmp_path)
    for number, data in enumerate((b"no entry", b"\xc1", b"\x80", b"\x81\xa3run\xa1x", b"\x00")):
        killed(write(tmp_path / str(number), steps=2))
        add(tmp_path / str(number) / "rank0.journal", data)
        with pytest.raises(ValueError, match=r"rank0\.journal is damaged"):
            load_run(tmp_path / str(number))
    write(tmp_path, steps=2).close()
    (tmp_path / "steps.rank0.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"steps\.rank0\.parquet cannot be read"):
        load_run(tmp_path)


def test_files_of_another_table_or_rank_are_named(tmp_path):
    for rank in range(2):
        write(tmp_path, steps=2, rank=rank).close()
    path = tmp_path / "collectives.rank1.parquet"
    whole = path.read_bytes()
    for other, words in (("steps.rank1", "table 'collectives': missing columns"), ("collectives.rank0", "of rank0")):
        path.write_bytes((tmp_path / f"{other}.parquet").read_bytes())
        with pytest.raises(ValueError, match=rf"collectives\.rank1\.parquet .*{words}"):
            load_run(tmp_path)
    path.write_bytes(whole)
    write_manifest(tmp_path, {"run": "zero1"})
    with pytest.raises(ValueError, match="holds tables of ddp, and the manifest of zero1"):
        load_run(tmp_path)


def test_the_manifest_is_never_seen_half_written(tmp_path, monkeypatch):
    write_manifest(tmp_path, {"run": "old"})
    monkeypatch.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError):
        write_manifest(tmp_path, {"run": "new"})
    assert load_run(tmp_path).manifests.keys() == {"old"}


def test_a_run_without_one_of_its_files_is_named(tmp_path):
    for rank in range(2):
        RunWriter(tmp_path, rank, "zero1", "measured").close()
    write_manifest(tmp_path, {"run": "zero1"})
    load_run(tmp_path)
    (tmp_path / "memory.rank1.parquet").unlink()
    with pytest.raises(ValueError, match=r"memory\.rank1\.parquet cannot be read: .*copy all files of a run together"):
        load_run(tmp_path)
