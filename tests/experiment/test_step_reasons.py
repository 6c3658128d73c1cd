"""The line that says why a step takes as long as it does."""

from dataclasses import replace

import pandas as pd

from shardlab.experiment.told.step_reasons import Reasons, reasons, reasons_table, why
from shardlab.records.store import Records
from shardlab.why.judged_steps import BALANCED, UNKNOWN, Cause
from tests.analysis.made_steps import Loop

SLOW = Cause("straggler", 6000.0, 0.6, "rank 1 is last in 90 % of 20 meetings", "give rank 1 as much to do", 5000.0)
BANDWIDTH = replace(SLOW, name="bandwidth", share=0.5, change="half the bytes (--precision bf16) or a faster link")
EVEN = Cause(BALANCED, 9000.0, 0.9, "ranks compute for 90 % of a step", "a faster device", 0.0)
MISSING = Cause(UNKNOWN, 0.0, 0.0, "table spans is missing", "", 0.0)


def of(*causes: Cause) -> Reasons:
    return Reasons(1e4, causes)


def records(**loops: Loop) -> Records:
    tables = [[table.assign(run=run) for table in loop.tables()] for run, loop in loops.items()]
    moved, worked, steps = (pd.concat(both, ignore_index=True) for both in zip(*tables, strict=True))
    manifests = {run: {"mesh": {"data": 2}} for run in loops}
    return Records(moved, worked, none := steps.iloc[:0], none, steps, manifests)


def test_one_run_has_share_evidence_change_and_gain():
    found = reasons(records(a=Loop(sizes=(25_000,) * 64, forward=30, backward=60, buckets=64, latency=300)))
    assert why(found) == (
        "86 % of a step is latency of many small messages: 36.2 ms of a step wait for 64 messages of 25 kB, each with "
        "0.6 ms of latency · larger buckets (--bucket-mib 1) would take 35.1 ms of 42.3 ms off"
    )
    assert "larger buckets would take" in why(found, is_script=True)  # which has no options


def test_what_takes_little_is_said_with_care_and_ties_name_both():
    assert why({"a": of(SLOW)}).endswith("give rank 1 as much to do would take 5.00 ms of 10.0 ms off")
    little = why({"a": of(replace(SLOW, share=0.15, gain_us=1500.0))})
    assert little.startswith("about 15 % of a step is straggler")
    assert "would take about 1.50 ms of 10.0 ms off" in little
    tie = why({"a": of(SLOW, replace(SLOW, name="bandwidth", gain_us=4600.0))})
    assert tie.endswith("; about as much: bandwidth, 4.60 ms")
    assert "about as much" not in why({"a": of(SLOW, replace(SLOW, gain_us=4000.0))})


def test_several_runs_are_told_by_their_cause_and_the_largest_gain_is_last():
    runs = {"zero1": of(MISSING), "ddp": of(EVEN), "zero3": of(BANDWIDTH), "fsdp": of(replace(BANDWIDTH, share=0.4))}
    assert why(runs) == (
        "bandwidth in zero3 (50 % of a step) and fsdp (40 %); balanced, mostly compute, in ddp; of zero1 it cannot be "
        "said: table spans is missing · zero3 has most to gain: half the bytes (--precision bf16) or a faster link "
        "would take 5.00 ms of 10.0 ms off"
    )
    assert why({"a": of(EVEN), "b": of(EVEN, SLOW)}) == "balanced, mostly compute, in a and b"
    assert why({"a": of(EVEN), "b": of(replace(EVEN, share=0.13))}) == (
        "balanced, mostly compute, in a; balanced, though less than half is compute, in b"
    )
    assert why({"a": of(MISSING), "b": of(MISSING)}) == "of a and b it cannot be said: table spans is missing"


def test_each_run_has_its_causes_and_a_row_for_each():
    found = reasons(records(a=Loop(data=9000), b=Loop()))
    assert [one.causes[0].name for one in found.values()] == ["input wait", BALANCED]
    table = reasons_table(found)
    first = table.iloc[0]
    assert [first["strategy"], first["cause"]] == ["a", "input wait"]
    assert round(first["share (%)"]) == 42
    assert len(table) == sum(len(one.causes) for one in found.values())


def test_answers_that_are_no_cause():
    assert why({"a": of(MISSING)}) == "cannot be said: table spans is missing"
    assert why({"a": of(EVEN, SLOW)}) == "balanced: ranks compute for 90 % of a step"
    made = records(a=Loop())
    part = replace(made, collectives=made.collectives[made.collectives["rank"] == 0])
    assert why(reasons(part)).startswith("cannot be said: axes: data=2 is a mesh of 2 ranks, but run 'a' has rows of")
    axes = made.collectives["axis"].where(made.collectives["seq"] % 2 == 0, "ranks 0,1")
    groups = replace(made, collectives=made.collectives.assign(axis=axes), manifests={"a": {"mesh": None}})
    assert "give axes" in why(reasons(groups))
    script = replace(groups, manifests={"a": {"mesh": None, "recorded": ["train.py"]}})
    assert why(reasons(script)) == "cannot be said: the groups of ranks are not one mesh", "nobody could give axes"
    one = replace(made, steps=made.steps[made.steps["step"] < 3])
    assert why(reasons(one)).endswith("needed beside the first and the traced one, and there are 3 in all")
    (unknown,) = reasons_table(reasons(one)).to_dict("records")
    assert all(pd.isna(unknown[name]) for name in ("of a step (ms)", "share (%)", "gain (ms)"))
    assert unknown["change"] == "run more steps"
