import numpy as np
import pandas as pd
import pytest

from shardlab.course.figures import COSTS, run_difference
from shardlab.experiment.told.differences import pairs_of
from shardlab.plots import summary_of, traffic_matrix
from shardlab.plots.theme import STRATEGY_COLOURS
from tests.analysis.hand_made import collective, collectives
from tests.plots.sample_records import NUM_RANKS, NUMEL


def rows(axis_sizes, calls, num_ranks):
    """One row per rank and call (axis, op, bytes sent)."""
    return collectives(*(
        collective(rank, seq, (0.0, 0.0, 0.0), run="r", axis=axis, op=op, wire_bytes=sent, group_size=axis_sizes[axis])
        for rank in range(num_ranks)
        for seq, (axis, op, sent) in enumerate(calls)
    ))  # fmt: skip


def cells(figure):
    heatmap = figure.data[0]
    return {
        (int(source), int(target)): value
        for source, line in zip(heatmap.y, heatmap.z, strict=True)
        for target, value in zip(heatmap.x, line, strict=True)
        if np.isfinite(value)
    }


def test_a_ring_sends_to_the_next_rank(records):
    figure = traffic_matrix(records.collectives, run="ddp", step=3)
    sent = 2 * 4 * NUMEL * (NUM_RANKS - 1) / NUM_RANKS / 1e6
    assert cells(figure) == pytest.approx({(0, 1): sent, (1, 2): sent, (2, 3): sent, (3, 0): sent})
    assert "4 ranks send over 4 links from rank to rank, 7.20 MB on each, 28.8 MB in all" in summary_of(figure)


def test_the_groups_of_a_hybrid_mesh_follow_from_its_axes():
    table = rows({"shard": 2, "replica": 2}, [("shard", "all_gather", 3000), ("replica", "all_reduce", 1000)], 4)
    shard = {(0, 1): 3, (1, 0): 3, (2, 3): 3, (3, 2): 3}
    replica = {(0, 2): 1, (2, 0): 1, (1, 3): 1, (3, 1): 1}
    assert cells(traffic_matrix(table)) == pytest.approx(shard | replica)
    swapped = cells(traffic_matrix(table, axes={"shard": 2, "replica": 2}))
    assert swapped[0, 2] == 3


def test_all_to_all_goes_to_every_other_and_a_barrier_to_none():
    figure = traffic_matrix(rows({"data": 3}, [("data", "all_to_all", 2000), ("data", "barrier", 0)], 3))
    assert cells(figure) == pytest.approx({(a, b): 1 for a in range(3) for b in range(3) if a != b})


def test_what_cannot_be_derived_is_refused():
    for size, op, options, words in (
        (2, "send", {}, "a send does not record its receiver"),
        (4, "all_reduce", {}, "axes:"),
        (2, "all_reduce", {"step": 5}, "step: 5 was not recorded"),
    ):
        with pytest.raises(ValueError, match=words):
            traffic_matrix(rows({"data": size}, [("data", op, 8)], 2), **options)


def costs(**changed):
    return pd.Series({"strategy": "zero1", **dict.fromkeys(COSTS, 100.0), **changed})


def test_the_difference_view_draws_what_changed_and_names_what_did_not():
    figure = run_difference(costs(), costs(step_ms=120.0, peak_bytes=50.0, gradient_bytes=None), ("a", "b"))
    (bars,) = figure.data
    assert dict(zip(bars.y, bars.x, strict=True)) == pytest.approx({"time of a step": 20, "peak": -50, "gradients": 0})
    assert bars.text == ("+20 %", "\u221250 %", "not known")
    assert bars.marker.color == STRATEGY_COLOURS["zero1"]
    assert figure.layout.title.subtitle.text.startswith("unchanged: exposed communication, parameters")
    assert summary_of(figure).startswith("Change from a to b: time of a step 100 ms to 120 ms, peak 100 B to 50 B and")
    assert "nothing changed" in summary_of(run_difference(costs(), costs(step_ms=100.4), ("a", "b")))


def test_the_only_run_of_a_record_is_compared_with_each_strategy():
    assert pairs_of(["train"], ["single", "fsdp"]) == [("train", "single"), ("train", "fsdp")]
    assert pairs_of(["single", "fsdp"], ["train"]) == [("single", "train"), ("fsdp", "train")]
    assert pairs_of(["single", "fsdp"], ["fsdp"]) == [("fsdp", "fsdp")]
