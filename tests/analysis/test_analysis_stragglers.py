"""Who takes part in a collective, who came last, and who waited for whom."""

from pathlib import Path

import pandas as pd
import pytest

from shardlab.analysis import stragglers, waits, with_group
from shardlab.experiment import Comparison
from shardlab.recording.report import answer_of_record, late
from shardlab.records.store import Records
from tests.analysis.hand_made import STEP, collective, collectives, spans, together, two_ranks


def grid(*rows):
    """Rows (rank, axis, group size)."""
    return collectives(*(collective(rank, 0, (0, 0, 1), axis=axis, group_size=size) for rank, axis, size in rows))


def test_one_axis_holds_all_ranks_also_where_tables_put_together_repeat_their_labels():
    table = grid(*((rank, "data", 3) for rank in range(3)))
    both = pd.concat([table, table.assign(run="other")])
    assert with_group(both)["group"].tolist() == ["0,1,2"] * 6


def test_the_last_axis_varies_fastest():
    rows = grid(*((rank, axis, 2) for rank in range(4) for axis in ("shard", "replica")))
    table = with_group(rows).set_index(["axis", "rank"])["group"]
    assert table["shard"].to_dict() == {0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3"}
    assert table["replica"].to_dict() == {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    swapped = with_group(rows, {"shard": 2, "replica": 2}).set_index(["axis", "rank"])["group"]
    assert swapped["shard"].to_dict() == {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


def test_parts_of_an_axis_and_products_of_axes_are_groups_of_the_mesh():
    sizes = {"data.inner": 2, "data.outer": 2}
    rows = grid(*((rank, axis, size) for rank in range(4) for axis, size in sizes.items()))
    table = with_group(rows, {"data": 4}).set_index(["axis", "rank"])["group"]
    assert table["data.inner"].to_dict() == {0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3"}
    assert table["data.outer"].to_dict() == {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    rows = grid(*((rank, "replica_shard", 4) for rank in range(4)), *((rank, "shard", 2) for rank in range(4)))
    table = with_group(rows, {"replica": 2, "shard": 2}).set_index(["axis", "rank"])["group"]
    assert set(table["replica_shard"]) == {"0,1,2,3"}
    assert table["shard"].to_dict() == {0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3"}


def test_groups_that_cannot_be_known_are_refused():
    for rows, axes, message in (
        ([(0, "data", 4), (1, "data", 4)], None, "data=4 is a mesh of 4 ranks, but .* of ranks 0, 1; give the rows"),
        ([(0, "data", 2), (1, "data", 3)], None, "groups of several sizes on axis data"),
        ([(0, "up", 2), (1, "down", 2)], None, "the position of down, up among the axes .* is unknown"),
        ([(0, "data", 2), (1, "data", 2)], {"shard": 2}, "on axis 'data', which is not one of shard"),
    ):
        with pytest.raises(ValueError, match=message):
            with_group(grid(*rows), axes)


def test_queueing_waiting_for_the_last_and_transfer_add_up():
    moved, _ = two_ranks()
    table = waits(moved).set_index(["seq", "rank"])
    first, second = table.loc[(0, 0)], table.loc[(1, 0)]
    assert (first["queued_us"], first["straggler_us"], first["transfer_us"], first["last_rank"]) == (0, 20, 30, 1)
    assert (second["queued_us"], second["straggler_us"], second["transfer_us"]) == (10, 10, 10)
    assert (first["waited_us"], first["waited_for_last_us"]) == (10, 0)  # when it waited, the last had come
    assert (second["waited_us"], second["waited_for_last_us"]) == (20, 10)
    assert table.loc[(0, 1), "straggler_us"] == table.loc[(1, 1), "straggler_us"] == 0
    whole = (moved["end_us"] - moved["issue_us"]).tolist()
    assert (table["queued_us"] + table["straggler_us"] + table["transfer_us"]).tolist() == whole


def test_who_waited_for_whom():
    moved, _ = two_ranks()
    (row,) = stragglers(moved).to_dict("records")
    assert (row["rank"], row["last_rank"], row["num_collectives"]) == (0, 1, 2)
    assert (row["straggler_us"], row["waited_for_last_us"]) == (30, 10)
    cut_off = collectives(collective(0, 2, (200, 200, 210), step=1))  # which one rank has not recorded
    assert set(waits(together(moved, cut_off))["step"]) == {0}
    rows = [collective(rank, 0, (0, 0, 5), op="broadcast") for rank in (0, 1)]
    assert len(waits(collectives(*rows))) == 0  # they name nobody
    rows = [collective(rank, 0, (rank, rank, 9), op="all_to_all", bytes=1000 * rank) for rank in (0, 1)]
    assert stragglers(collectives(*rows))["last_rank"].tolist() == [1]
    assert len(waits(collectives())) == len(stragglers(collectives())) == 0


def test_ranks_that_disagree_are_refused():
    first = collective(0, 0, (0, 0, 9))
    for rows, message in (
        ([first, collective(1, 0, (0, 0, 9), op="all_gather")], "did not issue the same"),
        ([first, collective(1, 0, (0, 0, 9), numel=1, bytes=4)], "rank 1 all_reduce of 4 bytes"),
        ([first, collective(1, 0, (0, 0, 9), dtype="bfloat16", bytes=500)], "rank 1 all_reduce of 500 bytes"),
        ([first, collective(1, 0, (5e6, 5e6, 6e6))], "before rank 1 began it; the clocks"),
        ([collective(0, 0, (3, 0, 9)), collective(1, 0, (0, 0, 9))], "start_us 0 < issue_us 3; the clock ran back"),
    ):
        with pytest.raises(ValueError, match=message):
            waits(collectives(*rows))


WAITED_FOR = "rank 1 is waited for most in 100 % of all steps, 30 µs a step"


def records_of(step_us, mesh, moved):
    keys = {"run": "a", "source": "measured", "step": 0}
    steps = pd.DataFrame([STEP | keys | {"rank": rank, "step_us": step_us} for rank in range(2)])
    return Records(
        moved, spans(), steps, steps, steps, manifests={"a": {"mesh": mesh, "recorded": ["my/train.py", "--a b"]}}
    )


def test_which_rank_is_late():
    """As a record of a script says it; by less than a hundredth of a step is not late."""
    rows = [collective(rank, seq, (0, 30 * rank, 40)) for rank in range(2) for seq in range(3)]
    at_once = collectives(*rows)
    # Rank 0 comes last four times, by little: as where one sleeps, and the other then gathers after it.
    short = [collective(rank, seq, (50, 60 + 9 * seq - rank, 200)) for rank in range(2) for seq in range(3, 7)]
    for step_us, mesh, moved, said in (
        (130.0, {"data": 2}, two_ranks()[0], WAITED_FOR),
        (3001.0, {"data": 2}, two_ranks()[0], f"no rank; {WAITED_FOR}"),
        (130.0, {"data": 2}, two_ranks()[0].iloc[:0], "cannot be said: no meeting of ranks was watched"),
        (130.0, {"data": 2}, at_once, WAITED_FOR),  # they wait at the same time: no longer than one
        (130.0, {"data": 2}, together(at_once, collectives(*short)), WAITED_FOR),
        (130.0, None, two_ranks()[0], "cannot be said: the groups of ranks are not one mesh"),
    ):
        assert late(records_of(step_us, mesh, moved)) == said


KNOWN = {
    "strategy": "a",
    "ranks": 2,
    "parameter_bytes": 1000,
    "gradient_bytes": 1000,
    "optimizer_bytes": 2000,
    "buffer_bytes": 500,
}
KNOWN |= {"peak_bytes": 6000, "exposed_comm_ms": 0.02, "overlap": 0.25, "wire_bytes_per_step": 2000.0}
HIDDEN = "; of its communication 25 % is hidden, 0.02 ms are exposed, median over ranks"


def test_what_a_record_answers():
    for changed, moved, memory, time, sent, next_is in (
        ({}, two_ranks()[0], "at the peak 6.00 kB", HIDDEN, "2.00 kB a rank and step; messages: 2", "trace"),
        ({"peak_bytes": None}, two_ranks()[0][:0], "no peak was traced", HIDDEN, None, "diff"),
        ({"overlap": None}, two_ranks()[0], "at the peak 6.00 kB",
         "; how much of its communication is hidden is not known", None, "trace"),
        ({"wire_bytes_per_step": None}, two_ranks()[0], "at the peak 6.00 kB", "", "not known: no step was watched",
         "trace"),
        ({"wire_bytes_per_step": 0.0}, two_ranks()[0], "at the peak 6.00 kB", "", "nothing", "trace"),
    ):  # fmt: skip
        found = Comparison(pd.DataFrame([KNOWN | changed]), records_of(130.0, {"data": 2}, moved), Path("out"))
        said = dict(answer_of_record(found))
        assert said["MEMORY"] == f"4.50 kB at rest on a rank; {memory}"
        assert said["TIME"] == f"0.13 ms a step (median){time}"
        assert sent in (None, said["SENT"])
        assert said["NEXT"].startswith(f"shardlab {next_is} out ")
        assert "; shardlab same --ranks 2 my/train.py '--a b': are" in said["NEXT"]
