"""What hid a collective, and why a step took as long as it did."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.analysis import attribution, critical_path, hidden_by, overlap, what_if_free
from shardlab.analysis.critical_path import ALL, LATE
from shardlab.analysis.intervals import innermost
from tests.analysis.hand_made import NAN, collective, collectives, random_step, span, spans, two_ranks

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
    path = critical_path(*two_ranks())
    assert path["start_us"].tolist()[1:] == path["end_us"].tolist()[:-1]
    assert path["duration_us"].sum() == 130
    steps = list(zip(path["rank"], path["kind"], path["what"], path["duration_us"], strict=True))
    assert steps == [
        (1, "backward", "half 1", 60),
        (1, "backward", "half 2", 40),
        (0, "all_reduce", "bucket 1", 10),
        (0, "host", "", 5),
        (0, "optimizer", "model", 15),
    ]


def test_a_chain_that_begins_late_says_so():
    moved, worked = two_ranks()
    first = (worked["rank"] == 1) & (worked["start_us"] == 0)
    path = critical_path(moved, worked.assign(start_us=worked["start_us"].mask(first, 30.0)))
    assert path.iloc[0][["rank", "kind", "start_us", "end_us"]].tolist() == [1, LATE, 0, 30]
    assert path["duration_us"].sum() == 130


def test_what_a_free_bucket_gains():
    table = what_if_free(*two_ranks()).set_index("tag")["gain_us"]
    # rank 1 is there at 100 whatever comes before: a free bucket 0 gains nothing, a free bucket 1 its 10 us
    assert table.to_dict() == {"bucket 1": 10, ALL: 10, "bucket 0": 0}
    assert what_if_free(*two_ranks()).set_index("tag").loc["bucket 1", "gain"] == 10 / 130


def test_what_is_hidden_gains_nothing_and_what_queues_behind_it_does():
    """One rank pair in step; bucket 0 takes 50 us under compute, bucket 1 waits for the lane until 70."""
    both = [
        row
        for rank in (0, 1)
        for row in (collective(rank, 0, (20, 20, 70), (60, 70)), collective(rank, 1, (40, 70, 100), (70, 100)))
    ]
    work = [span(rank, "model", "backward", 0, 60) for rank in (0, 1)]
    table = what_if_free(collectives(*both), spans(*work)).set_index("tag")["gain_us"]
    assert table["bucket 0"] == 30  # bucket 1 starts at 40 and ends at 70
    assert table["bucket 1"] == 30
    assert table[ALL] == 40  # compute alone: 60


def test_without_communication_there_is_a_path_and_nothing_to_gain():
    work = spans(span(0, "model", "forward", 0, 10), span(0, "block", "forward", 2, 6))
    path = critical_path(collectives(), work)
    assert list(zip(path["kind"], path["what"], path["duration_us"], strict=True)) == [
        ("forward", "model", 2),
        ("forward", "block", 4),
        ("forward", "model", 4),
    ]
    assert len(what_if_free(collectives(), work)) == 0


def test_the_loss_of_the_report_is_no_part_of_the_step():
    moved, worked = two_ranks()
    late = [collective(rank, 2, (140, 140, 900), (140, 900), phase="metrics") for rank in (0, 1)]
    assert critical_path(pd.concat([moved, collectives(*late)]), worked)["end_us"].max() == 130


STREAM = [collective(rank, 0, (0, 0, 90), (10, 11)) for rank in (0, 1)]
THREADS = [collective(rank, seq, (10 * seq, 10 * seq, 90), (5 - seq, 95)) for rank in (0, 1) for seq in (0, 1)]


REFUSED = (
    (two_ranks()[0], {"run": "b"}, "run: 'b' is not one of a"),
    (two_ranks()[0], {"step": 3}, "step: 3 was not recorded; there are 0 to 0"),
    (two_ranks()[0].drop(columns="tag"), {}, "missing columns .'tag'"),
    (collectives(*STREAM), {}, "a stream waited instead of the host"),
    (two_ranks()[0].assign(transport="nccl"), {}, "those over nccl are waited for by a stream"),
    (two_ranks()[0].assign(wait_start_us=NAN, wait_end_us=NAN), {}, "has no waits of the host"),
    (collectives(*THREADS), {}, "one thread cannot have done both"),
    (collectives(collective(0, 0, (0, 0, NAN)), collective(1, 0, (0, 0, 1))), {}, "has no end_us"),
)


def test_what_cannot_be_explained_is_refused():
    worked = two_ranks()[1]
    for moved, keywords, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            critical_path(moved, worked, **keywords)
    both = pd.concat([worked, worked.assign(source="predicted")])
    with pytest.raises(ValueError, match="run: the table holds 2 runs, name one of a · measured, a · predicted"):
        critical_path(two_ranks()[0], both)


def test_replaying_a_random_schedule_gives_back_its_times():
    """Many buckets on one lane and two ranks with random work: freeing nothing changes nothing."""
    for seed in range(20):
        moved, worked = random_step(seed, buckets=5, apart=0.0)
        table = what_if_free(moved, worked).set_index("tag")
        assert (table["gain_us"] >= -1e-9).all()
        assert table.loc[ALL, "gain_us"] == table["gain_us"].max()
        path = critical_path(moved, worked)
        assert path["duration_us"].sum() == pytest.approx(table["step_us"].iloc[0], rel=0.2)
        assert np.allclose(path["start_us"].to_numpy()[1:], path["end_us"].to_numpy()[:-1])
