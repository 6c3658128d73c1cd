"""The line that says why a step takes as long as it does."""

from dataclasses import replace

import pandas as pd

from shardlab.analysis.causes import BALANCED, UNKNOWN, Cause
from shardlab.experiment.why import sentence, why
from tests.analysis.made_steps import Loop

SLOW = Cause("straggler", 6000.0, 0.6, "rank 1 is last in 90 % of 20 meetings", "give rank 1 as much to do", 5000.0)


def test_the_line_has_share_evidence_change_and_gain():
    loop = Loop(sizes=(25_000,) * 64, forward=30, backward=60, buckets=64, latency=300)
    (line,) = why(*loop.tables())
    assert line.title == "WHY"
    assert line.text == (
        "a: 86 % of a step is latency of many small messages: 36.2 ms of a step wait for 64 messages of 25 kB, each "
        "with 0.6 ms of latency · larger buckets (--bucket-mib 1) would take 35.1 of 42.3 ms off"
    )


def test_each_run_has_its_line():
    tables = [loop.tables() for loop in (Loop(data=9000), Loop())]
    second = [table.assign(run="b") for table in tables[1]]
    lines = why(*(pd.concat(both, ignore_index=True) for both in zip(tables[0], second, strict=True)))
    assert [line.text.split(": ")[0] for line in lines] == ["a", "b"]
    assert "42 % of a step is input wait" in lines[0].text
    assert lines[1].text.startswith("b: balanced: ranks compute for")


def test_what_takes_little_is_said_with_care_and_ties_name_both():
    assert sentence([SLOW], 1e4).endswith("give rank 1 as much to do would take 5 of 10 ms off")
    little = sentence([replace(SLOW, share=0.15, gain_us=1500.0)], 1e4)
    assert little.startswith("about 15 % of a step is straggler")
    assert "would take about 1.5 of 10 ms off" in little
    tie = sentence([SLOW, replace(SLOW, name="bandwidth", gain_us=4600.0)], 1e4)
    assert tie.endswith("; about as much: bandwidth (4.6 ms)")
    assert "about as much" not in sentence([SLOW, replace(SLOW, gain_us=4000.0)], 1e4)


def test_answers_that_are_no_cause():
    assert (
        sentence([replace(SLOW, name=UNKNOWN, evidence="spans is missing")], 1.0) == "cannot be said: spans is missing"
    )
    assert sentence([replace(SLOW, name=BALANCED, evidence="ranks compute"), SLOW], 1.0) == "balanced: ranks compute"
    moved, worked, steps = Loop().tables()
    (line,) = why(moved.assign(transport="nccl"), worked, steps)
    assert line.text == "a: cannot be said: when the host waited for its messages is missing (on a GPU a stream waits)"
    (line,) = why(moved[moved["rank"] == 0], worked, steps)
    assert line.text.startswith("a: cannot be said: axes: data=2 is a mesh of 2 ranks, but run 'a' has rows of ranks 0")
