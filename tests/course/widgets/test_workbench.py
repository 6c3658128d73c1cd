import re
import threading

import pytest

from shardlab.course import RunHistory, workbench
from shardlab.course.widgets.workbench import VIEWS
from shardlab.experiment import CompareConfig
from shardlab.plots import summary_of

QUICK = CompareConfig(
    strategies=("zero1",), ranks=2, steps=3, model="gpt-1m", text="grammar", seq_len=16, batch=2, device="cpu"
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Two runs that differ in strategy and bucket size."""
    bench = workbench(QUICK, tmp_path_factory.mktemp("bench"))
    assert bench.run() == 1
    assert bench.run(strategies="bucketed", bucket_mib=0.25) == 2
    yield bench
    bench.close()


def test_the_table_shows_runs_newest_first_with_what_differs(bench):
    table = bench.table.content
    assert table[["run", "strategy", "bucket (MiB)"]].values.tolist() == [[2, "bucketed", "0.25"], [1, "zero1", "1"]]
    assert "model" not in table.columns, "it is the same in both"
    assert (table["step (ms)"] > 0).all()
    assert bench.message.text.startswith("Run 2 is over: bucketed")


def test_every_picture_can_be_chosen(bench):
    for view in VIEWS:
        bench.view.value = view
        summary = summary_of(bench.upper.content)
        assert any(letter.isdigit() for letter in summary)
        if not view.startswith("one run"):
            assert "bucketed" in summary
            assert "1 zero1" in summary
        if view in ("loss", "change from the run before"):
            assert bench.upper.content.layout.title.subtitle.text.endswith("; the runs differ in bucket (MiB)")


def test_one_run_is_shown_with_its_plan_and_earlier_runs_are_found_again(bench, monkeypatch):
    bench.view.value, bench.about.value = "one run: memory over a step", "1 zero1"
    summary = summary_of(bench.upper.content)
    assert "Run 1 zero1" in summary
    rest, predicted = summary.split("At rest ")[1].split(" Predicted at rest ")
    assert rest == predicted
    history = RunHistory(bench.history.directory)
    assert history.labels() == ["1 zero1", "2 bucketed"]
    assert history.next_directory().name == "run-003"
    assert set(history.records().steps["run"]) == {"1 zero1", "2 bucketed"}
    for doubt, said in (("", 4), ("Times are UNCERTAIN: ranks slept.", 5)):
        monkeypatch.setattr("shardlab.experiment.told.verdicts.busy_verdict", lambda *_, doubt=doubt: doubt)
        lines = history.answer()
        assert [title for title, _ in lines] == ["LEAST MEMORY", "FASTEST", "COST", "WHY", "CAN I TRUST IT"][:said]
        assert lines[0].text.startswith("1 zero1, ")
    assert lines[-1].text == "times uncertain, because ranks slept"


def test_bad_input_is_said_beside_the_controls(tmp_path):
    bench = workbench(QUICK, tmp_path)
    for wrong, message in (
        ({"ranks": 0}, "ranks: 0 is below 1"),
        ({"link": "fast"}, "link: 'fast' is not understood; write bandwidth,latency"),
        ({"bucket_mib": 0.0}, "bucket_mib: 0.0 is not a finite number above 0"),
    ):
        before = {name: bench.inputs[name].value for name in wrong}
        bench.choose(**wrong)
        assert message in bench.message.text
        bench.run_button.click()
        assert message in bench.message.text
        assert 'role="alert"' in bench.message.widget.value
        assert not bench.is_running
        bench.choose(**before)
        assert bench.message.text == "Choose, then press Run."
    assert not list(tmp_path.iterdir())
    for wrong, message in (
        ({"colour": "red"}, "colour: there is no such control; there are model, steps"),
        ({"model": "gpt-9z"}, "model: 'gpt-9z' is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.choose(**wrong)
    with pytest.raises(ValueError, match="nothing has been run yet"):
        RunHistory(tmp_path / "empty").records()


def test_a_run_can_be_stopped_and_the_next_one_goes_on(tmp_path):
    bench = workbench(QUICK, tmp_path)
    bench.choose(steps=100_000)
    going, update = threading.Event(), bench.upper.replace

    def replaced(content, **how):
        going.set()
        update(content, **how)

    bench.upper.replace = replaced
    bench.run_button.click()
    assert bench.run_button.disabled
    assert going.wait(60), bench.message.text
    bench.stop_button.click()
    assert bench.wait(60)
    assert re.fullmatch(r"Run 1 was stopped after \d+ steps?, which are kept\.", bench.message.text)
    assert not bench.run_button.disabled
    assert bench.run(steps=2) == 2
    assert bench.history.labels() == ["1 zero1", "2 zero1"]
    table = bench.table.content.set_index("run")
    assert table["state"].to_dict() == {1: "stopped", 2: "finished"}
    done = int(bench.history.runs[1].comparison.summary["steps"].iloc[0])
    assert table["steps"].to_dict() == {1: f"{done} of 100000", 2: "2"}
    assert table["last loss"].notna().all()
    for view in VIEWS:
        bench.view.value, bench.about.value = view, "1 zero1"
        assert summary_of(bench.upper.content)
    assert "who holds which slice" in bench.view.value
    assert "they are written at the end of a run" in summary_of(bench.upper.content)
    again = RunHistory(tmp_path).table().set_index("run")
    assert again["state"].to_dict() == {1: "unfinished", 2: "finished"}
    bench.close()


def test_a_run_stopped_before_its_first_step_leaves_nothing(tmp_path, monkeypatch):
    bench = workbench(QUICK, tmp_path)

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardlab.course.widgets.history.compare", stopped)
    bench.start()
    assert bench.wait(60)
    assert bench.message.text == "The run was stopped before a step was finished."
    assert not bench.history.runs
    bench.close()


def test_stop_counts_before_the_thread_has_begun_and_no_second_run_begins_meanwhile(tmp_path, monkeypatch):
    bench, stopped = workbench(QUICK, tmp_path), threading.Event()
    directory = bench.history.next_directory
    monkeypatch.setattr(bench.history, "next_directory", lambda: stopped.wait(60) and directory())
    monkeypatch.setattr(
        "shardlab.course.widgets.history.compare", lambda *args, pool, on_progress: on_progress("the first")
    )
    bench.start()
    with pytest.raises(RuntimeError, match="a run goes on"):
        bench.run()
    assert (bench.run_button.disabled, bench.stop_button.disabled) == (True, False)
    bench.stop()
    stopped.set()
    assert bench.wait(60)
    assert bench.message.text == "The run was stopped before a step was finished."
    bench.close()


def test_controls_of_numbers_take_no_others():
    bench = workbench(QUICK)
    for value in (1.5, "3", None):
        with pytest.raises(ValueError, match=r"steps: .* is not a whole number"):
            bench.choose(steps=value)
    with pytest.raises(ValueError, match="bucket_mib: 'x' is not a number"):
        bench.choose(bucket_mib="x")
    assert bench.config().steps == QUICK.steps
    bench.close()
