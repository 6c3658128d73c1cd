"""The short fault matrix: every kind of fault is told, or the run is right, and nothing is left behind."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.cli.faults import _matrix, _verdict
from shardlab.faults import SkippedCollective
from shardlab.faults.matrix import KINDS, MatrixConfig, Outcome, Row, _Runs
from shardlab.launch import RankHang, RankPool
from shardlab.vocabulary import Phase

# What the user is told: by which exception, and whether it names the rank, a collective and a line of the loop.
TOLD = {
    "Straggler": ("right", "", False, False),
    "SlowLink": ("right", "", False, False),
    "LossyLink": ("right", "", False, False),
    "DeadRank": ("rank named", "RankDied", True, True),
    "StoppedRank": ("rank named", "RankHang", True, True),
    "OutOfMemory": ("rank named", "RankError", False, True),
    "SkippedCall": ("rank named", "RankError", False, True),
    "SkippedCollective": ("rank named", "RankError", True, True),
    "MismatchedCollective": ("rank named", "RankError", True, True),
    "NaN": ("rank named", "", False, False),
}


def test_the_short_matrix():
    done = CliRunner().invoke(app, ["faults", "--quick", "--strategies", "bucketed", "--timeout-s", "3", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    found = {row["fault"]: (row["outcome"], row["error"], row["names_collective"], row["names_line"]) for row in rows}
    assert found == TOLD
    assert [(row["usable"], row["left"]) for row in rows] == [(True, "")] * len(KINDS)
    (stopped,) = (row for row in rows if row["fault"] == "StoppedRank")
    assert "for more than timeout_s=3 s" in stopped["said"]
    for row in rows:
        assert (row["told_s"] is None) == (row["error"] == "")


def test_what_ranks_print_as_they_die_is_no_part_of_the_matrix(capsys):
    with RankPool(3, device="cpu", timeout_s=5.0, notice_s=None, threads_per_rank=1) as pool:
        died = _Runs("bucketed", "gloo", pool).row(SkippedCollective(1, 1, "step"))
    assert (died.error, died.is_good) == ("RankDied", True)
    assert not capsys.readouterr().out


def test_ranks_that_wait_too_long_without_a_fault_need_a_longer_timeout():
    def run(*_):
        raise RankHang("ranks waited", (0, 1, 2), "table")

    pool = SimpleNamespace(run=run, timeout_s=2.0)
    with pytest.raises(ValueError, match=r"^timeout_s: 2 is too short .* Under ddp without a fault, ranks waited$"):
        _Runs("ddp", None, pool)


def row(outcome, **changed):
    fields = {
        "fault": "NaN", "phase": "step", "rank": 1, "strategy": "ddp", "error": "RankError", "names_collective": True,
        "names_line": False, "told_s": 1.25, "usable": True, "left": "", "said": "words\nmore",
    }  # fmt: skip
    return Row(outcome=outcome, **{**fields, **changed})


def test_the_table_says_what_is_not_good():
    left = row(Outcome.RIGHT, strategy="fsdp", left="1 folders")
    rows = [row(Outcome.NAMED), row(Outcome.SILENT, strategy="zero1"), left]
    cells = [next(iter(column.cells)) for column in _matrix(rows).columns]
    assert cells == ["NaN", "step", "1", "RC 1.2 s", "SILENT", "right (!)"]
    late = row(Outcome.NAMED, fault="Straggler", phase="forward")
    phases = [row(Outcome.NAMED, phase="forward", strategy="fsdp"), late]
    shown = [list(column.cells) for column in _matrix([rows[0], *phases]).columns[:2]]
    assert shown == [["NaN", "NaN", "Straggler"], ["forward", "step", "forward"]], "by fault, then by phase"
    assert _verdict(rows).splitlines() == [
        "In 1 of 3 cases the run was right or the user was told, and nothing was left.",
        "zero1, NaN on rank 1 in the step: SILENT",
        "fsdp, NaN on rank 1 in the step: 1 folders",
    ]


def test_all_cases_are_those_that_can_happen():
    quick, whole = MatrixConfig(strategies=("fsdp",), quick=True), MatrixConfig()
    assert {type(fault) for _, fault in quick.cases} == set(KINDS)
    assert {fault.phase for _, fault in quick.cases} == {"backward"}
    forward = {strategy for strategy, fault in whole.cases if (type(fault), fault.phase) == (KINDS[7], Phase.FORWARD)}
    assert forward == {"fsdp"}, "the only one that gathers in the module's forward"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategies", "single"], "strategies: 'single' has one process"),
        (["--strategies", "torch_tp"], "strategies: 'torch_tp' needs a tensor axis"),
        (["--strategies", "ddp, zero1", "--ranks", "2"], "ranks: 2 is below 3"),
        (["--strategies", "ddp,ddp"], "strategies: ddp, ddp; at least one is needed, and each only once"),
        (["--strategies", "ddp,zero4"], "strategies: 'zero4' is not one of ddp, bucketed"),
        (["--ranks", "2"], "ranks: 2 is below 3"),
        (["--timeout-s", "0"], "timeout_s: 0.0 is not above 0"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, words):
    done = CliRunner().invoke(app, ["faults", *options])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
