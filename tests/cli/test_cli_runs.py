"""The command as a user starts it: a run, a rank that fails, Ctrl-C, and torchrun."""

import json
import os
import signal
import sys
import time

import pytest

import shardlab.experiment.comparison
from shardlab.cli import main
from shardlab.experiment import claim, load_comparison
from shardlab.records.entries import read
from shardlab.records.store import load_run
from tests.conftest import rank_processes
from tests.launch.helpers import as_under_torchrun, gone_within, start_forked

SMALL = ["--model", "mlp", "--text", "grammar", "--seq-len", "8", "--device", "cpu"]


@pytest.fixture
def compared(tmp_path, monkeypatch, capfd):
    """``compared(*options)``: exit code, stdout and stderr of the entry point, in this process."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["shardlab", "compare", "--ranks", "2", *options, *SMALL])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capfd.readouterr()

    return run


def test_a_run_ends_with_a_table_a_summary_and_a_report(compared, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, stderr = compared("--steps", "3", "--strategies", "single,zero1", "--out", str(out))
    assert code == 0, stderr
    lines = stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80  # (the path of the report is as long as it is)
    assert "…" not in stdout
    heads = [line.split()[0] for line in lines if line.strip()]
    assert [head for head in heads if head in ("strategy", "single", "zero1")][:3] == ["strategy", "single", "zero1"]
    assert "losses equal to" in stdout
    assert lines[-1] == f"Report: {out / 'report.html'}"
    assert 3e5 < (out / "report.html").stat().st_size < 1.5e6
    assert [row["strategy"] for row in json.loads((out / "summary.json").read_text())] == ["single", "zero1"]


def test_a_learning_rate_that_blows_up_fails_and_says_so(compared, tmp_path):
    options = ("--steps", "4", "--strategies", "single,zero1", "--learning-rate", "1e30", "--out", "out")
    code, stdout, stderr = compared(*options)
    assert code == 1, stderr
    words = " ".join(stdout.split())
    assert "Losses are NOT finite, so the run has failed: that of single from step 1 on, that of zero1" in words
    assert "losses equal" not in words
    assert "Traceback" not in stderr
    assert "Losses are NOT finite" in (tmp_path / "out" / "report.html").read_text()
    text = (tmp_path / "out" / "summary.json").read_text()
    rows = json.loads(text, parse_constant=lambda word: f"{word} is not JSON")
    assert [(row["loss_last"], row["losses_equal"]) for row in rows] == [(None, False)] * 2


def test_a_directory_that_another_run_takes_in_the_same_moment_is_one_line(compared, monkeypatch):
    def claims(directory, **options):
        claim(directory, **options)
        (directory / "records").mkdir()  # by the other run

    monkeypatch.setattr(shardlab.experiment.comparison, "claim", claims)
    code, stdout, stderr = compared("--steps", "1", "--out", "out")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: out: out holds another run, which did not finish; name a new")
    assert len(stderr.splitlines()) == 1


def fails(rank, *arguments):
    if rank == 0:
        time.sleep(600)
    broken = {}
    return broken["on purpose"]


def test_a_rank_that_raises_shows_its_traceback(compared, monkeypatch):
    monkeypatch.setattr(shardlab.experiment.comparison, "run_strategy", fails)
    code, _, stderr = compared("--out", "of mine")
    assert "shardlab report 'of mine' shows them" in stderr
    assert code == 1
    assert "rank 1 raised KeyError: 'on purpose'" in stderr
    assert 'return broken["on purpose"]' in stderr  # the rank's own line
    assert "shardlab/cli" not in stderr  # and not the parent's


def steps_in(path):
    if not path.exists():
        return 0
    return len(list(read(path)))


def test_ctrl_c_ends_the_ranks_and_keeps_the_records(tmp_path):
    out = tmp_path / "out"
    command = ["compare", "--ranks", "2", "--steps", "1000000", *SMALL, "--strategies", "ddp,zero1", "--out", out]
    before = {*rank_processes()}
    process = start_forked("-m", "shardlab", *command, cwd=tmp_path, output=tmp_path / "printed.txt")
    try:
        records = out / "records" / "ddp"
        wait_for(lambda: min(steps_in(records / f"rank{rank}.journal") for rank in (0, 1)) > 5, process)
        ranks = [rank for rank in rank_processes() if rank not in before and rank.pid != process.pid]
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGINT)
        assert gone_within(ranks, 2.0)
        process.join(10)
        assert process.exitcode == 130
        assert f"records so far are in {out}" in (tmp_path / "printed.txt").read_text().replace("\n", " ")
    finally:
        process.kill()
        process.join()
    steps = load_run(records).steps
    for _, rows in steps.groupby("rank"):
        assert len(rows) >= 5
        assert rows["step"].tolist() == list(range(len(rows)))
    assert not (out / "summary.json").exists()


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def compares(directory):
    os.chdir(directory)
    os.dup2(os.open("errors.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w")
    sys.argv = ["shardlab", "compare", "--ranks", "2", "--steps", "3", *SMALL, "--strategies", "single,zero1"]
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def test_under_torchrun_rank_0_alone_writes_and_prints(pools, tmp_path):
    pools(2).start()  # and with it the server that forks
    printed = as_under_torchrun(tmp_path / "printed.txt", compares, tmp_path)
    errors = (tmp_path / "errors.txt").read_text()
    assert printed.count("losses equal to") == 1
    assert printed.count("Report: ") == 1
    assert errors.count("records go to") == 1
    assert "Traceback" not in errors
    (found,) = tmp_path.glob("runs/*")  # one directory, named by the date: rank 0's, whatever the other's clock said
    result = load_comparison(found)
    assert result.summary["strategy"].tolist() == ["single", "zero1"]
    assert result.losses_equal
    assert set(result.records.steps.loc[result.records.steps["run"] == "zero1", "rank"]) == {0, 1}
    assert (found / "report.html").exists()
