from dataclasses import replace

import pytest

from shardlab.course import events_of_step, ranks_at, step_through
from shardlab.course.widgets.step_events import ROLES
from shardlab.course.widgets.step_view import ALL_RANKS, held_by_rank
from shardlab.plots import summary_of


@pytest.fixture(scope="module")
def events(comparison):
    return events_of_step(comparison.records, run="zero3")


def test_the_events_are_those_of_the_traced_step_with_the_peak_in_the_order_of_time(events, comparison):
    traced = int(comparison.summary.set_index("strategy").loc["zero3", "peak_step"])
    collectives = comparison.records.collectives
    rows = collectives[(collectives["run"] == "zero3") & (collectives["step"] == traced)]
    rows = rows[rows["phase"] != "metrics"]
    issued = events[events["event"].isin(["gathers", "reduces", "sends"])]
    assert events["time_us"].is_monotonic_increasing
    assert events["time_us"].min() == 0
    assert issued.groupby("rank")["what"].apply(sorted).to_dict() == rows.groupby("rank")["tag"].apply(sorted).to_dict()
    assert (events["event"] == "arrives").sum() == len(rows)


def test_what_is_held_is_the_last_sample_of_the_record(events, comparison):
    memory = comparison.records.memory
    inside = memory[(memory["run"] == "zero3") & (memory["rank"] == 1) & ~memory["where"].isin(["rest", "peak"])]
    samples = inside.pivot_table(index="time_us", columns="role", values="bytes", aggfunc="max")
    mine = events[events["rank"] == 1]
    assert mine["gathered_parameter"].max() == samples["gathered_parameter"].max() > 0
    assert mine["activation"].max() == samples["activation"].max() > 0
    grown = mine[mine["event"] == "frees"]
    assert len(grown)
    assert grown["words"].str.contains("frees").all()


def test_a_rank_is_in_what_began_and_has_not_ended(events):
    gathers = events.index[(events["event"] == "gathers") & (events["rank"] == 0)]
    for index in gathers[:5]:
        tag = events.loc[index, "what"]
        arrival = events.index[(events.index > index) & (events["event"] == "arrives") & (events["rank"] == 0)
                               & (events["what"] == tag)][0]  # fmt: skip
        assert tag in ranks_at(events, index).set_index("rank").loc[0, "in_flight"]
        assert tag not in ranks_at(events, arrival).set_index("rank").loc[0, "in_flight"].split(", ")
    last = ranks_at(events, len(events) - 1)
    assert (last[["computes", "in_flight", "waits_for"]] == "").all(axis=None), "at the end nothing is under way"


def test_without_a_traced_step_each_rank_holds_what_it_held_at_rest(comparison):
    records = comparison.records
    other = events_of_step(records, run="zero1", step=3)
    rest = records.memory[(records.memory["run"] == "zero1") & (records.memory["where"] == "rest")]
    last = rest[(rest["step"] == rest["step"].max()) & (rest["rank"] == 0)].set_index("role")["bytes"]
    row = ranks_at(other, 10).set_index("rank").loc[0]
    assert {role: row[role] for role in ROLES} == {role: last[role] for role in ROLES}
    now = ranks_at(events_of_step(replace(records, memory=records.memory[:0]), run="zero1", step=3), 5)
    assert now[list(ROLES)].isna().all(axis=None)
    assert "memory was not recorded" in summary_of(held_by_rank(now, 0.0, "now"))


def test_a_click_goes_on_to_the_next_event(comparison):
    view = step_through(comparison.records, run="zero3")
    assert view.message.text.startswith("Event 1 of")
    before = view.timeline.content.layout.shapes[-1].x0
    for _ in range(30):
        view.next()
    assert view.index == 30
    assert str(view.events["words"].iloc[30]) in view.message.text
    line = view.timeline.content.layout.shapes
    assert line[-1].x0 == pytest.approx(view.events["time_us"].iloc[30] / 1e3) != before
    assert len(line) == len(step_through(comparison.records, run="zero3").timeline.content.layout.shapes)
    view.previous()
    assert view.index == 29
    assert "rank 0" in summary_of(view.held.content)


def test_one_rank_can_be_followed(comparison):
    view = step_through(comparison.records, run="zero3")
    view.slider.value = 40
    view.follow.value = 1
    assert view.index >= 40
    for _ in range(10):
        view.next()
        assert view.events["rank"].iloc[view.index] == 1
    view.slider.value = view.slider.max
    view.next()
    assert view.index == view.events.index[view.events["rank"] == 1][-1]
    view.follow.value = ALL_RANKS
    assert view.slider.max == len(view.events) - 1
