import json
import threading
from contextlib import suppress
from dataclasses import asdict

import pytest

from shardlab.analysis import at_rest
from shardlab.course import live, read_progress
from shardlab.experiment import compare
from shardlab.plots import summary_of, training_progress
from shardlab.records import store
from shardlab.records.store import RunWriter, write_manifest
from shardlab.trace.process_memory import Allocator
from tests.analysis.hand_made import STEP
from tests.course.widgets.conftest import SMALL
from tests.trace.journals import add, heard


def memory_row(role, size, where="rest"):
    row = {"time_us": 0.0, "phase": "step", "where": where, "role": role, "bytes": size}
    return row | asdict(Allocator()) | {"resident_bytes": None}


def span_row(start):
    return {"unit": "model", "kind": "forward", "start_us": start, "end_us": start + 1}


@pytest.fixture
def writers(tmp_path):
    write_manifest(tmp_path / "records" / "zero1", {"run": "zero1"})
    writers = [RunWriter(tmp_path / "records" / "zero1", rank, "zero1", "measured") for rank in range(2)]
    yield writers
    for writer in writers:
        with suppress(ValueError):  # a test has damaged what it wrote
            writer.close()


def append(writer, step):
    writer.append(
        step,
        {
            "steps": heard([STEP | {"loss": 5.0 - step}]),
            "spans": heard([span_row(10.0 * step)]),
            "memory": heard([memory_row("parameter", 8)]),
        },
    )


def test_nothing_yet_is_empty_tables(tmp_path):
    progress = read_progress(tmp_path / "not" / "yet")
    assert "no step has ended yet" in summary_of(training_progress(progress.steps, progress.memory))


def test_the_newest_step_is_one_that_all_ranks_have_finished(tmp_path, writers):
    append(writers[0], 0)
    append(writers[1], 0)
    append(writers[0], 1)
    assert read_progress(tmp_path).spans["step"].tolist() == [0, 0]
    append(writers[1], 1)
    assert read_progress(tmp_path).spans.query("step == 1")["rank"].tolist() == [0, 1]


def test_memory_is_the_last_sample_at_rest(tmp_path, writers):
    append(writers[0], 0)
    writers[0].append(1, {"steps": heard([STEP]), "memory": heard([memory_row("parameter", 99, "blocks.0")])})
    append(writers[1], 0)
    memory = read_progress(tmp_path).memory
    assert at_rest(memory)["bytes"].tolist() == [8]


def test_a_rank_that_ends_while_it_is_read_keeps_its_steps(tmp_path, writers, monkeypatch):
    for writer in writers:
        append(writer, 0)
        append(writer, 1)
    opened = store.read

    def ends_meanwhile(path):
        for writer in writers:
            writer.close()  # its journal is gone when it is opened
        return opened(path)

    monkeypatch.setattr(store, "read", ends_meanwhile)
    assert read_progress(tmp_path).steps["step"].tolist() == [0, 1, 0, 1]


def test_a_damaged_record_ends_the_view_and_not_the_run(tmp_path, writers):
    append(writers[0], 0)
    add(tmp_path / "records" / "zero1" / "rank1.journal", b"no entry")
    with pytest.raises(ValueError, match=r"rank1\.journal is damaged"):
        read_progress(tmp_path)
    view = live(tmp_path).start()
    view.stop()
    assert "is damaged" in view.message.text


def test_the_view_changes_while_the_ranks_train(pools, tmp_path):
    """The order tells: the view had drawn a step before the run's last step was made."""
    view, drawn = live(tmp_path / "run"), threading.Event()
    update = view.update

    def updated(**how):
        done = update(**how)
        if view.progress is not None:
            drawn.set()
        return done

    view.update = updated
    seen_before_the_end = []

    def on_progress(progress):
        if progress.step == SMALL.steps - 2 and progress.strategy == "zero3":
            # The parent's own thread waits here; the ranks have at most a few steps in their pipes.
            drawn.wait(20)
            seen_before_the_end.append(drawn.is_set())

    with view:
        compare(SMALL, tmp_path / "run", pool=pools(2), on_progress=on_progress)
    assert seen_before_the_end[0]
    assert view.message.text == "Ended: zero3, step 3."
    progress = view.progress
    first = progress.steps[progress.steps["rank"] == 0]
    assert first.groupby("run")["step"].apply(list).to_dict() == {"zero1": [0, 1, 2, 3], "zero3": [0, 1, 2, 3]}
    assert set(progress.memory["run"]) == {"zero1", "zero3"}
    assert "zero3, step 3: loss" in summary_of(view.curves.content)
    assert "Step 3 of run zero3: 2 ranks" in summary_of(view.timeline.content)
    assert not [thread for thread in threading.enumerate() if thread.name == "shardlab-live"]


def test_what_is_watched_is_what_was_recorded(comparison):
    progress, steps = read_progress(comparison.directory), comparison.records.steps
    rank0 = steps[(steps["rank"] == 0) & (steps["step"] >= 0)]
    assert progress.steps.query("rank == 0")["loss"].tolist() == rank0["loss"].tolist()
    assert json.loads((comparison.directory / "summary.json").read_text())
