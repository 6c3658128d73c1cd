"""What hid a collective, and why a step took as long as it did."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.analysis import attribution, hidden_by, overlap
from shardlab.analysis.intervals import innermost
from shardlab.why.judged_steps import Recorded
from shardlab.why.recorded_step import ALL, LATE, critical_path, recorded_step, what_if_free
from tests.analysis.hand_made import NAN, collective, collectives, random_step, span, spans, timed, two_ranks
from tests.analysis.made_steps import Loop

times = st.integers(0, 30).map(float)
some = st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair))), max_size=6)


@given(some, some)
def test_innermost_is_whoever_began_last(given_times, holes):
    pieces, owners = innermost(given_times, holes)
    for place in range(30):  # each unit of the axis lies in one piece or in none
        middle = place + 0.5
        around = [row for row, (start, end) in enumerate(given_times) if start < middle < end]
        covered = any(start < middle < end for start, end in holes)
        here = [owner for (start, end), owner in zip(pieces, owners, strict=True) if start < middle < end]
        assert len(here) == bool(around and not covered)
        if here:
            assert given_times[here[0]][0] == max(given_times[row][0] for row in around)
    assert (pieces[1:, 0] >= pieces[:-1, 1]).all()


def test_the_innermost_unit_that_computes_hides():
    moved, worked = two_ranks()
    shares = hidden_by(moved, worked).set_index(["rank", "seq", "unit"])["hidden_us"]
    # bucket 0 of rank 0 runs from 40 to 90: 40 us under the second half, then the rank waits
    assert shares.to_dict() == {(0, 0, "half 2"): 40, (1, 0, "half 2"): 30}


def test_attribution_adds_up_and_names_what_hid_most():
    moved, worked = two_ranks()
    table = attribution(moved, worked).set_index(["rank", "seq"])
    row = table.loc[(0, 0)]
    assert (row["duration_us"], row["hidden_us"], row["exposed_us"], row["hidden"]) == (50, 40, 10, 0.8)
    assert (row["unit"], row["kind"], row["unit_us"]) == ("half 2", "backward", 40)
    assert table.loc[(0, 1), "hidden_us"] == 0
    assert pd.isna(table.loc[(0, 1), "unit"])
    whole = overlap(moved, worked).set_index("rank")["exposed_us"]
    assert table.groupby("rank")["exposed_us"].sum().to_dict() == whole.to_dict()


def test_the_path_has_no_gap_and_crosses_to_the_straggler():
    table = critical_path(recorded_step(*timed(*two_ranks())))
    for end_rank, optimizer in ((0, 15), (1, 10)):  # both are in the middle
        path = table[table["end_rank"] == end_rank]
        assert path["start_us"].tolist()[1:] == path["end_us"].tolist()[:-1]
        pieces = list(zip(path["rank"], path["kind"], path["what"], path["duration_us"], strict=True))
        assert pieces == [
            (1, "backward", "half 1", 60),
            (1, "backward", "half 2", 40),
            (end_rank, "all_reduce", "bucket 1", 10),
            (end_rank, "host", "", 5),
            (end_rank, "optimizer", "model", optimizer),
        ]


def test_a_chain_that_begins_late_says_so():
    moved, worked = two_ranks()
    first = (worked["rank"] == 1) & (worked["start_us"] == 0)
    path = critical_path(recorded_step(*timed(moved, worked.assign(start_us=worked["start_us"].mask(first, 30.0)))))
    assert path.iloc[0][["rank", "kind", "start_us", "end_us"]].tolist() == [1, LATE, 0, 30]
    assert path.groupby("end_rank")["duration_us"].sum().tolist() == [130, 95]  # from where each of them began


def test_what_a_free_bucket_gains():
    table = what_if_free(recorded_step(*timed(*two_ranks()))).set_index("tag")
    # rank 1 is there at 100 whatever comes before: a free bucket 0 gains nothing, a free bucket 1 its 10 us
    assert table["gain_us"].to_dict() == {"bucket 1": 10, ALL: 10, "bucket 0": 0}
    assert table.loc["bucket 1", "gain"] == 10 / 127.5  # of 130 us on one rank, 125 on the other


def test_what_is_hidden_gains_nothing_and_what_queues_behind_it_does():
    """One rank pair in step; bucket 0 takes 50 us under compute, bucket 1 waits for the lane until 70."""
    both = [
        row
        for rank in (0, 1)
        for row in (collective(rank, 0, (20, 20, 70), (60, 70)), collective(rank, 1, (40, 70, 100), (70, 100)))
    ]
    work = [span(rank, "model", "backward", 0, 60) for rank in (0, 1)]
    table = what_if_free(recorded_step(*timed(collectives(*both), spans(*work)))).set_index("tag")["gain_us"]
    assert table["bucket 0"] == 30  # bucket 1 starts at 40 and ends at 70
    assert table["bucket 1"] == 30
    assert table[ALL] == 40  # compute alone: 60


def test_without_communication_there_is_a_path_and_nothing_to_gain():
    work = spans(span(0, "model", "forward", 0, 10), span(0, "block", "forward", 2, 6))
    recorded = recorded_step(*timed(collectives(), work))
    path = critical_path(recorded)
    assert list(zip(path["kind"], path["what"], path["duration_us"], strict=True)) == [
        ("forward", "model", 2),
        ("forward", "block", 4),
        ("forward", "model", 4),
    ]
    assert len(what_if_free(recorded)) == 0


def test_the_loss_of_the_report_is_no_part_of_the_step():
    moved, worked = two_ranks()
    late = [collective(rank, 2, (140, 140, 900), (140, 900), phase="metrics") for rank in (0, 1)]
    assert critical_path(recorded_step(*timed(pd.concat([moved, collectives(*late)]), worked)))["end_us"].max() == 130


STREAM = [collective(rank, 0, (0, 0, 90), (10, 11)) for rank in (0, 1)]
THREADS = [collective(rank, seq, (10 * seq, 10 * seq, 90), (5 - seq, 95)) for rank in (0, 1) for seq in (0, 1)]


REFUSED = (
    (two_ranks()[0], {"run": "b"}, "run: 'b' is not one of a"),
    (two_ranks()[0], {"step": 3}, "step: 3 was not recorded; there are 0 to 0"),
    (two_ranks()[0].drop(columns="tag"), {}, "missing columns .'tag'"),
    (collectives(*STREAM), {}, "a replay that reproduces the step is missing: it is 62 % off"),
    (two_ranks()[0].assign(transport="nccl"), {}, "or a stream waited in its place"),
    (two_ranks()[0].assign(wait_start_us=NAN, wait_end_us=NAN), {}, "has no waits of the host"),
    (collectives(*THREADS), {}, "a replay that reproduces the step is missing"),  # one thread cannot do both
    (collectives(collective(0, 0, (0, 0, NAN)), collective(1, 0, (0, 0, 1), (0, 1))), {}, "has no end_us"),
)


def test_what_cannot_be_explained_is_refused():
    _, worked, steps = timed(*two_ranks())
    for moved, keywords, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            recorded_step(moved, worked, steps, **keywords)
    both = pd.concat([steps, steps.assign(source="predicted")])
    with pytest.raises(ValueError, match="run: the table holds 2 runs, name one of a · measured, a · predicted"):
        recorded_step(two_ranks()[0], worked, both)
    with pytest.raises(ValueError, match="steps: when they began is missing"):
        recorded_step(two_ranks()[0], worked, steps.assign(start_us=NAN))


def test_replaying_a_random_schedule_gives_back_its_times():
    """Many buckets on one lane and two ranks with random work: freeing nothing changes nothing."""
    for seed in range(5):
        tables = timed(*random_step(seed, buckets=5, apart=0.0))
        recorded = recorded_step(*tables)
        table = what_if_free(recorded).set_index("tag")
        assert (table["gain_us"] >= -1e-9).all()
        assert table.loc[ALL, "gain_us"] == table["gain_us"].max()
        for end_rank, path in critical_path(recorded).groupby("end_rank"):
            own = tables[2].set_index("rank").loc[end_rank]
            assert path["duration_us"].sum() == pytest.approx(own["step_us"])
            assert np.allclose(path["start_us"].to_numpy()[1:], path["end_us"].to_numpy()[:-1])
            assert path["start_us"].iloc[0] == pytest.approx(own["start_us"])


@pytest.mark.parametrize(("engine", "ranks"), [("bucketed", 1), ("zero3", 2), ("fsdp", 3), ("bucketed", 4)])
def test_path_and_causes_know_one_step_and_one_gain(engine, ranks):
    """Of a loop with a late rank: the table's steps, the path of each, and what its messages cost."""
    tables = Loop(engine, ranks=ranks, late=150 if ranks > 1 else 0, us_per_byte=0.05, steps=3).tables()
    record = Recorded(*tables, None)
    free = record.gains(record.with_transfers(lambda *_: 0.0))
    for place, (step, own) in enumerate(record.timed.groupby("step")):
        length_us = own["step_us"].median()
        assert record.base[place] == pytest.approx(length_us, abs=1e-3)
        recorded = recorded_step(*tables, step=step)
        path = critical_path(recorded).groupby("end_rank")["duration_us"].sum()
        assert path.mean() == pytest.approx(length_us, abs=1e-3)
        gains = what_if_free(recorded).set_index("tag")
        assert gains.empty if ranks == 1 else gains.loc[ALL, "gain_us"] == free[place] > 0
