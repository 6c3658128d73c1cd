"""The parts of a step: by hand, and that they add up whatever happened."""

import pandas as pd
import pytest

from shardlab.analysis import step_split, stragglers
from shardlab.records.tables import COLLECTIVES, STEPS
from tests.analysis.hand_made import KEYS, STEP, collective, collectives, span, spans, two_ranks

PARTS = ["compute_us", "moving_us", "waiting_us", "off_cpu_us", "other_us"]


def steps(*times_us):
    return STEPS.frame([KEYS | STEP | {"rank": rank, "step_us": time_us} for rank, time_us in enumerate(times_us)])


def test_exposed_time_is_cut_where_the_last_rank_comes():
    split = step_split(*two_ranks(), steps(130.0, 125.0)).set_index("rank")
    # Rank 0 waits from 80: bucket 0 moves until 90, for bucket 1 it waits until rank 1 comes at 100.
    assert split.loc[0, PARTS].tolist() == [95.0, 20.0, 10.0, 0.0, 5.0]
    assert split.loc[1, PARTS].tolist() == [110.0, 10.0, 0.0, 0.0, 5.0]
    assert (split[PARTS].sum(axis=1) == split["step_us"]).all()


def test_time_off_the_cpu_is_a_part_where_nothing_moves_and_exposed_where_something_does():
    moved, _ = two_ranks()
    worked = spans(
        span(0, "model", "backward", 0, 80), span(0, "model", "optimizer", 115, 130),
        span(1, "model", "backward", 0, 20), span(1, "model", "off_cpu", 20, 60),  # late, because it slept
        span(1, "model", "backward", 60, 70), span(1, "model", "off_cpu", 70, 100),  # beside bucket 0
        span(1, "model", "optimizer", 115, 125),
    )  # fmt: skip
    split = step_split(moved, worked, steps(130.0, 125.0)).set_index("rank")
    assert split.loc[1, PARTS].tolist() == [40.0, 30.0, 0.0, 50.0, 5.0]
    assert (split[PARTS].sum(axis=1) == split["step_us"]).all()
    late = stragglers(moved, spans=worked).iloc[0]
    assert (late["straggler_us"], late["last_computed_us"], late["last_off_cpu_us"]) == (30, 0, 30)
    assert stragglers(moved, spans=two_ranks()[1]).iloc[0]["last_computed_us"] == 30


def test_the_communication_of_the_report_does_not_count():
    moved, worked = two_ranks()
    times = steps(130.0, 125.0)
    report = collectives(*(collective(rank, 2, (200, 200, 300), (200, 300), phase="metrics") for rank in (0, 1)))
    both = pd.concat([moved, report], ignore_index=True)
    assert step_split(both, worked, times).equals(step_split(moved, worked, times))
    split = step_split(COLLECTIVES.frame([]), worked, times).set_index("rank")
    assert split.loc[0, PARTS].tolist() == [95.0, 0.0, 0.0, 0.0, 35.0]
    with pytest.raises(ValueError, match="all ranks"):
        step_split(moved[moved["rank"] == 0], worked, times)
    with pytest.raises(ValueError, match="step_us"):
        step_split(moved, worked, times.drop(columns="step_us"))
