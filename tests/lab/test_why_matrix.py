"""Causes put in on purpose are the causes that are named; the whole matrix is printed by a command."""

from math import isfinite

from shardlab.lab.why_matrix import INJECTED, why_matrix


def test_a_slow_loader_and_small_buckets_are_named_and_mended():
    rows = list(why_matrix(("bucketed",), (2,), ("slow loader", "small buckets")))
    assert [(row.engine, row.ranks, row.injected) for row in rows] == [
        ("bucketed", 2, "slow loader"), ("bucketed", 2, "small buckets"),
    ]  # fmt: skip
    for row in rows:
        assert row.named == INJECTED[row.injected].cause
        assert row.is_right
        assert 0 < row.predicted_us < row.step_us
        assert isfinite(row.measured_us)  # the change was made
