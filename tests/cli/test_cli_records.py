"""``shardlab report``, ``trace`` and ``diff`` on records that are there: finished, cut off, damaged, of others."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.told.differences import HEADERS, QUANTITIES
from shardlab.installed import __version__
from shardlab.records.store import RunWriter, load_run, write_manifest
from tests.export.trace_format import check
from tests.trace.journals import add, heard, rows_of

CONFIG = CompareConfig(
    strategies=("single", "bucketed", "zero1"), ranks=2, steps=4, model="mlp", text="grammar", seq_len=8, device="cpu"
)


@pytest.fixture(scope="module")
def finished(pools, tmp_path_factory):
    return compare(CONFIG, tmp_path_factory.mktemp("run") / "finished", pool=pools(2)).directory


@pytest.fixture
def mine(finished, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(finished, tmp_path / "mine")


def shardlab(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def in_json(directory):
    """What ``report --json`` prints, without the page that it writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardlab.experiment.write_report", lambda *_: None)
        return shardlab("report", directory, "--json").stdout


def test_bytes_at_rest_by_module(finished):
    words = ("modules", finished, "--strategy", "zero1", "--rank", 1, "--json")
    rows, shallow = json.loads(shardlab(*words).output), json.loads(shardlab(*words, "--depth", 1).output)
    model = [row for row in rows if not row["module"].startswith("(")]
    assert all(row["gradient_bytes"] == row["parameter_bytes"] > 0 for row in model)
    assert len(shallow) < len(rows)
    assert sum(row["bytes"] for row in rows) == sum(row["bytes"] for row in shallow)
    narrow = CliRunner().invoke(app, ["modules", str(finished), "--strategy", "zero1"], env={"COLUMNS": "50"}).output
    assert "zero1, rank 0, at rest" in narrow
    assert "…" not in narrow
    assert narrow.splitlines()[1].split() == ["params", "grads", "optim", "other", "all"]  # nothing is in host memory
    for wrong, message in (
        (("--strategy", "x"), "strategy: 'x' is not one of "), ((), "strategy: none given; "),
        (("--strategy", "zero1", "--rank", 7), "rank: 7 is not one of 0, 1"),
        (("--strategy", "zero1", "--depth", 0), "depth: 0 is below 1"),
    ):  # fmt: skip
        assert message in shardlab("modules", finished, *wrong).output


def heads(output):
    return [line.split()[0] for line in output.splitlines() if line.strip()]


def cut_off(directory):
    """As a kill in the middle of 'zero1' leaves it: no summary, and lines of which the last is not whole."""
    (directory / "summary.json").unlink()
    (directory / "report.html").unlink(missing_ok=True)
    run = directory / "records" / "zero1"
    for rank, steps in ((0, 3), (1, 2)):
        whole = load_run(run)
        for path in run.glob(f"*.rank{rank}.parquet"):
            path.unlink()
        writer = RunWriter(run, rank, "zero1", "measured")
        for step in range(steps):
            writer.append(step, entry(whole, rank, step))
        add(run / f"rank{rank}.journal", b"\x85\xa3run")  # of the next one a few bytes
        writer._journal.close()
    return directory


def entry(whole, rank, step):
    """As a recorder writes it: nothing was traced yet."""
    memory = [row for row in rows_of(whole.memory, rank, step) if row["where"] == "rest"]
    steps = [row | {"peak_bytes": None} for row in rows_of(whole.steps, rank, step)]
    traffic = {name: heard(rows_of(getattr(whole, name), rank, step)) for name in ("collectives", "spans")}
    return {**traffic, "memory": heard(memory), "steps": heard(steps)}


def test_report_of_a_finished_comparison(mine):
    done = shardlab("report", mine)
    assert done.exit_code == 0
    answer, table = done.stdout.split("mlp, 2 ranks")
    assert [word for word in heads(answer) if word.isupper()] == ["LEAST", "FASTEST", "COST", "WHY", "CAN", "NEXT"]
    assert [word for word in heads(table) if word in CONFIG.strategies] == list(CONFIG.strategies)
    assert "losses equal to" in done.stdout
    assert done.stdout.splitlines()[-1] == f"Report: {mine / 'report.html'}"
    page = (mine / "report.html").read_text()
    for words in ("Timeline of step", "Where the peak", "Why a step takes", "mlp on 2 ranks", "torch "):
        assert words in page
    found = json.loads(in_json(mine))
    assert list(found["answer"]) == ["LEAST MEMORY", "FASTEST", "COST", "WHY", "CAN I TRUST IT", "NEXT"]
    rows = found["strategies"]
    assert [row["strategy"] for row in rows] == list(CONFIG.strategies)
    assert rows == json.loads((mine / "summary.json").read_text())


def test_report_does_not_need_the_text_or_the_device_and_takes_one_run_alone(mine):
    for path in mine.glob("records/*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["config"] |= {"text": "/nowhere/else.txt", "device": "cuda"}
        path.write_text(json.dumps(manifest))
    assert shardlab("report", mine).exit_code == 0
    assert "/nowhere/else.txt" in (mine / "report.html").read_text()
    done = shardlab("report", mine / "records" / "zero1")
    assert done.exit_code == 0
    assert "losses not compared: one strategy ran" in " ".join(done.stdout.split())
    assert (mine / "records" / "zero1" / "report.html").exists()


def test_report_of_a_run_that_was_cut_off_has_its_whole_steps(mine):
    done = shardlab("report", cut_off(mine))
    assert done.exit_code == 0, done.stderr
    assert "There is no plan" in done.stdout
    rows = {row["strategy"]: row for row in json.loads(in_json(mine))["strategies"]}
    assert list(rows) == list(CONFIG.strategies)
    assert {name: row["steps"] for name, row in rows.items()} == {"single": 4, "bucketed": 4, "zero1": 2}
    assert rows["zero1"]["peak_bytes"] is None
    assert rows["zero1"]["losses_equal"] is True


def test_trace_writes_valid_files(finished, tmp_path):
    for strategy in ("bucketed", "zero1"):
        done = shardlab("trace", finished, "--strategy", strategy, "-o", tmp_path / "trace.json")
        assert done.exit_code == 0
        assert "https://ui.perfetto.dev" in done.stdout
        trace = json.loads((tmp_path / "trace.json").read_text())
        assert check(trace)["X"]
        assert trace["otherData"]["run"] == strategy
    assert shardlab("trace", finished / "records" / "zero1", "-o", tmp_path / "one.json").exit_code == 0
    done = shardlab("trace", finished, "--strategy", "zero1", "-o", tmp_path / "hta", "--format", "hta")
    assert done.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "hta").iterdir()) == ["rank0.json", "rank1.json"]


def test_trace_and_help_import_no_torch(finished, tmp_path):
    words = ["trace", str(finished), "--strategy", "zero1", "-o", str(tmp_path / "a.json")]
    code = f"""
import sys
import shardlab.plots, shardlab.analysis, shardlab.records.store, shardlab.export, shardlab.planner, shardlab.cli.plan
from shardlab.cli import app
app({words}, standalone_mode=False)
app(["compare", "--help"], standalone_mode=False)
print('torch' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "--strategies" in done.stdout


def test_a_link_that_changes_nothing_is_told_with_why(finished):
    done = shardlab("what-if", finished, "--strategy", "zero1", "--link", "1000Gbps,1us")
    assert "messages over that link take no longer than recorded, or are hidden" in " ".join(done.stdout.split())


def test_diff_of_the_same_is_nothing(finished):
    done = shardlab("diff", finished, finished)
    assert done.exit_code == 0
    assert done.stdout.count("are equal: in 4 steps they differ by at most 0.0e+00") == 3
    rows = json.loads(shardlab("diff", finished, finished, "--json").stdout)
    assert {row["strategy"] for row in rows} == set(CONFIG.strategies)
    assert all(row["difference"] in (0, None) for row in rows)
    quantities = {row["quantity"] for row in rows}
    assert quantities >= {"step_ms", "exposed_comm_ms", "peak_bytes", "wire_bytes_per_step", "loss_last"}
    assert set(HEADERS) >= set(QUANTITIES), "each has a name in the table"


def test_diff_of_two_strategies_by_their_directories(finished):
    two = (finished / "records" / "bucketed", finished / "records" / "zero1")
    done = shardlab("diff", *two)
    assert done.exit_code == 0
    assert "Losses of bucketed and zero1 are equal" in done.stdout
    assert re.search(r"last loss +\d\.\d{7} ", done.stdout), "a loss of few digits cannot be compared"
    ratios = {row["quantity"]: row["ratio"] for row in json.loads(shardlab("diff", *two, "--json").stdout)}
    assert ratios["optimizer_bytes"] == pytest.approx(0.5, rel=0.01)
    assert ratios["parameter_bytes"] == 1
    assert ratios["wire_bytes_per_step"] == pytest.approx(1, rel=0.01)
    assert shardlab("diff", two[1], finished).exit_code == 0  # the one that both have


def test_diff_says_what_was_set_otherwise_and_that_losses_differ_or_are_not_finite(finished, pools, tmp_path):
    other = replace(CONFIG, strategies=("single", "zero1"), steps=2, seed=7, learning_rate=1e30)
    directory = compare(other, tmp_path / "other", pool=pools(2)).directory
    done = shardlab("diff", finished, directory)
    assert done.exit_code == 1
    assert "seed: 0 in the first, 7 in the second" in done.stdout
    assert "steps: 4 in the first, 2 in the second" in done.stdout
    assert "Losses of zero1 are NOT equal: " in done.stdout
    assert "bucketed" not in heads(done.stdout)
    assert "Losses are NOT finite" in shardlab("report", directory).stdout
    assert "NaN" not in in_json(directory)
    done = shardlab("diff", directory, directory)
    assert done.exit_code == 1
    wrong = "that of the first run is not finite from step 1 on and that of the second run is not finite from step 1 on"
    assert f"Losses of zero1 are NOT equal: {wrong}." in done.stdout


def test_a_summary_that_was_changed_is_one_line(mine):
    whole = (mine / "summary.json").read_text()
    (mine / "summary.json").write_text("[1, 2]")
    assert "summary.json is damaged: " in one_line("report", mine)
    (mine / "summary.json").write_text(whole)
    without_steps(mine, "zero1")
    assert "in the records of zero1 no rank has finished a step" in shardlab("report", mine).stderr


def one_line(*arguments):
    """Of a refusal."""
    done = shardlab(*arguments)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    return " ".join(done.stderr.split())


def edit_manifest(mine, **changes):
    path = mine / "records" / "zero1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_steps(mine, run="*"):
    for path in mine.glob(f"records/{run}/steps.*"):
        pd.read_parquet(path).iloc[:0].to_parquet(path)


def test_a_report_is_written_through_no_link_and_stays_where_there_is_no_room(mine, monkeypatch):
    (mine.parent / "theirs.html").write_text("theirs")
    for name in ("report.html", "report.html.part"):
        (mine / name).symlink_to(mine.parent / "theirs.html")
    assert shardlab("report", mine).exit_code == 0
    assert (mine.parent / "theirs.html").read_text() == "theirs"
    assert not (mine / "report.html").is_symlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    page = (mine / "report.html").read_bytes()
    monkeypatch.setattr(Path, "replace", full)
    done = shardlab("report", mine)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "report.html cannot be written: No space left on device" in done.stderr
    assert (mine / "report.html").read_bytes() == page
    assert not (mine / "report.html.part").exists()


CHANGED = (
    (partial(edit_manifest, config={}), "zero1 is damaged: it names no strategies"),
    (
        partial(edit_manifest, config={"strategies": ["zero1"], "steps": "4"}),
        "configuration in the manifests is damaged: steps: '4' was given; it must be a whole number",
    ),
    (partial(edit_manifest, devices=3), "zero1's manifest has no right devices, so 'compare' did not"),
    (partial(edit_manifest, not_finite=1, workload=3), "zero1's manifest has no right not_finite, workload, so"),
    (without_steps, "no rank has finished a step, so there is nothing to report"),
)


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_report_of_records_that_were_changed_is_one_line(finished, tmp_path, is_finished):
    for number, (spoil, words) in enumerate(CHANGED):
        mine = shutil.copytree(finished, tmp_path / str(number))
        spoil(mine)
        if not is_finished:
            (mine / "summary.json").unlink()
        assert words in one_line("report", mine)


def test_what_cannot_be_read_is_one_line(mine, tmp_path):
    nowhere = "holds no manifest.json and no records/*/manifest.json, so it is neither a run nor a comparison"
    (mine / "records" / "zero1" / "manifest.json").write_text("{")
    for directory, words in ((mine / "nowhere", nowhere), (mine, "manifest.json is damaged")):
        for command in (("report", directory), ("diff", directory, directory),
                        ("trace", directory, "--strategy", "zero1", "-o", tmp_path / "t.json")):  # fmt: skip
            assert words in one_line(*command)


def test_what_compare_did_not_write_is_said(mine, tmp_path):
    directory = mine / "by_hand"
    write_manifest(directory, {"run": "by_hand"})
    RunWriter(directory, 0, "by_hand", "measured").close()
    assert "'compare' did not write it; load_run reads it" in shardlab("report", directory).stderr
    assert "nothing to export" in shardlab("trace", directory, "-o", tmp_path / "t.json").stderr


def test_a_trace_of_what_is_refused(finished, tmp_path):
    (tmp_path / "there").write_text("")
    for options, words in (
        ((), "name one of bucketed, single, zero1"),
        (("--strategy", "zero9"), "'zero9' is not one of bucketed, single, zero1"),
        (("--strategy", "zero1", "--format", "excel"), "'excel' is not one of 'perfetto', 'hta'"),
        (("--strategy", "zero1"), "name a file that ends with .json or .json.gz"),
        (("--strategy", "zero1", "--format", "hta"), "must be a new or an empty directory"),
    ):
        done = CliRunner().invoke(app, ["trace", str(finished), "-o", str(tmp_path / "there"), *options])
        assert done.exit_code == 2
        assert words in " ".join(done.stderr.replace("│", " ").split())


def test_the_version():
    assert shardlab("--version").stdout == f"shardlab {__version__}\n"
