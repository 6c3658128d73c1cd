import numpy as np
import pandas as pd
import pytest

from shardlab.analysis import bandwidth, overlap, step_split, wire_bytes
from shardlab.analysis.overlap import hidden_by_rank, hidden_by_run
from shardlab.analysis.rows import timed_steps
from shardlab.records.tables import COLLECTIVES, SPANS, STEPS
from tests.analysis.hand_made import KEYS, NAN, STEP, collective, span


def collectives(*times, **columns):
    columns = {"tag": "g", "wire_bytes": 1500.0, "group_size": 4} | columns
    return COLLECTIVES.frame([collective(0, 0, (start, start, end)) | columns for start, end in times])


def spans(*times, **columns):
    return SPANS.frame([span(0, "m", "forward", start, end) | columns for start, end in times])


def steps(*traced):
    """A step for each, on rank 0."""
    return STEPS.frame([KEYS | STEP | {"step": step, "traced_memory": on} for step, on in enumerate(traced)])


def test_by_hand():
    row = overlap(collectives((0, 10), (20, 30)), spans((5, 25))).iloc[0]
    assert (row["comm_us"], row["compute_us"], row["both_us"], row["exposed_us"]) == (20, 20, 10, 10)
    assert row["overlap"] == 0.5
    # What runs at once and what is nested count once.
    row = overlap(collectives((0, 10), (2, 4)), spans((0, 5), (1, 2), (3, 5))).iloc[0]
    assert (row["comm_us"], row["compute_us"], row["overlap"]) == (10, 5, 0.5)
    row = overlap(collectives(), spans((5, 25))).iloc[0]  # without communication there is no number
    assert np.isnan(row["overlap"])
    assert (row["comm_us"], row["exposed_us"], row["compute_us"]) == (0, 0, 20)
    assert overlap(collectives((0, 10)), spans((0, 10), kind="data")).iloc[0]["overlap"] == 0


def test_waiting_inside_a_span_hides_nothing():
    waited = collectives((0, 10), wait_start_us=0.0, wait_end_us=10.0)
    assert overlap(waited, spans((0, 10))).iloc[0]["overlap"] == 0
    half = collectives((0, 10), wait_start_us=5.0, wait_end_us=10.0)
    assert overlap(half, spans((0, 20))).iloc[0]["overlap"] == 0.5


def test_what_travels_behind_the_next_step_is_hidden_and_who_waits_there_does_not_compute():
    work = pd.concat([spans((0, 100)), spans((100, 200), step=1), spans((500, 600), step=2)])
    sent = collectives((90, 130), wait_start_us=120.0, wait_end_us=130.0)
    first, second, _ = overlap(sent, work).to_dict("records")
    assert (first["comm_us"], first["both_us"], first["exposed_us"], first["compute_us"]) == (40, 30, 10, 100)
    assert second["compute_us"] == 90
    table = steps(False, False, False).assign(step_us=100.0)
    split = step_split(sent.assign(group_size=1), work, table)
    assert split["moving_us"].fillna(0.0).tolist() == [10, 0, 0]


def test_the_share_of_several_steps_is_that_of_their_sums():
    hidden, exposed = collectives((0, 10)), collectives((100, 190), step=1)
    work = pd.concat([spans((0, 10)), spans((100, 109), step=1), spans((0, 5), rank=1)])
    table = overlap(pd.concat([hidden, exposed]), work)
    assert hidden_by_rank(table)["overlap"].tolist() == pytest.approx([0.19, NAN], nan_ok=True)
    assert hidden_by_run(table).loc["a", ["overlap", "exposed_us"]].tolist() == pytest.approx([0.19, 40.5])
    not_seen = table.assign(both_us=table["both_us"].where(table["step"] == 0))
    assert hidden_by_rank(not_seen)["overlap"].isna().all()


def test_runs_ranks_steps_and_sources_stay_apart_and_in_order():
    comm = pd.concat([collectives((0, 10), rank=rank, step=step) for rank in (0, 1) for step in (0, 1)])
    work = pd.concat([spans((0, 10), rank=0, step=0), spans((0, 5), rank=1, step=1, source="predicted")])
    table = overlap(comm, work).set_index(["source", "rank", "step"])
    assert table.at[("measured", 0, 0), "overlap"] == 1
    assert table.at[("measured", 1, 1), "overlap"] == 0
    assert np.isnan(table.at[("predicted", 1, 1), "overlap"])
    assert len(table) == 5
    work = pd.concat([spans((0, 1), run=run) for run in ("single", "ddp", "bucketed")])
    assert overlap(collectives((0, 1), run="ddp"), work)["run"].tolist() == ["single", "ddp", "bucketed"]


def test_what_cannot_be_true_is_refused_by_name():
    for comm, work, message in (
        (collectives((10, 0)), spans(), r"collectives.*row 0 .*rank 0, step 0, 'g'.*end_us 0 < start_us 10"),
        (collectives((0, NAN)), spans(), r"collectives.*row 0 .*no end_us"),
        (collectives(), spans((0, 1), (3, 2)), r"spans.*row 1 .*'m'.*clock ran backwards"),
        (collectives((0, 1), wait_start_us=3.0, wait_end_us=2.0), spans(), "wait_end_us 2 < wait_start_us 3"),
        (collectives((0, 1)).drop(columns="end_us"), spans(), "missing columns .'end_us'"),
    ):
        with pytest.raises(ValueError, match=message):
            overlap(comm, work)


def test_bandwidth_by_hand():
    factors = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1.0, "gather": 0.75}
    for op, factor in factors.items():
        row = bandwidth(collectives((0, 2), op=op, bytes=8_000_000)).iloc[0]
        assert (row["algorithm_gb_per_s"], row["bus_gb_per_s"]) == pytest.approx((4000, 4000 * factor)), op
    assert np.isnan(bandwidth(collectives((1, 1))).iloc[0]["bus_gb_per_s"])  # no time
    assert np.isnan(bandwidth(collectives((0, 1), op="barrier", bytes=0)).iloc[0]["algorithm_gb_per_s"])


def test_wire_bytes_are_summed_per_rank_step_and_op():
    rows = pd.concat([collectives((0, 1), (1, 2)), collectives((2, 3), op="all_gather", wire_bytes=7.0)])
    table = wire_bytes(rows).set_index("op")
    assert table["wire_bytes"].to_dict() == {"all_reduce": 3000.0, "all_gather": 7.0}
    assert table["num_collectives"].to_dict() == {"all_reduce": 2, "all_gather": 1}
    assert wire_bytes(rows, ())["wire_bytes"].tolist() == [3007.0]


def test_the_first_step_of_a_run_warms_up_wherever_it_begins_and_a_profile_has_none():
    for first, rate, timed in ((0, 0.1, [1, 2]), (11, 0.1, [12, 13]), (11, NAN, [11, 12, 13])):
        run = steps(False, False, False)
        run = run.assign(step=run["step"] + first, learning_rate=rate)
        assert timed_steps(run)["step"].tolist() == timed


def test_a_stream_whose_wait_was_not_seen_has_no_number():
    seen = overlap(collectives((0, 10), transport="nccl", wait_start_us=6.0, wait_end_us=10.0), spans((0, 20))).iloc[0]
    assert (seen["exposed_us"], seen["overlap"]) == (4, 0.6)
    unseen = overlap(collectives((0, 10), transport="nccl"), spans((0, 20), unit="model")).iloc[0]
    assert unseen[["exposed_us", "overlap", "both_us"]].isna().all()
    assert (unseen["comm_us"], unseen["compute_us"]) == (10, 20)
    of_kernels = overlap(collectives((0, 10), transport="nccl"), spans((0, 20), unit="aten::mm")).iloc[0]
    assert of_kernels["overlap"] == 1
