"""Causes put in on purpose are the causes that are named; the whole matrix is printed by a command."""

from math import isfinite

from shardlab.lab.why_matrix import INJECTED, why_matrix


def test_a_slow_loader_and_a_slow_link_are_named_and_mended():
    rows = [*why_matrix(("bucketed",), (2,), ("slow loader",)), *why_matrix(("fsdp",), (2,), ("low bandwidth",))]
    assert [(row.engine, row.ranks, row.injected) for row in rows] == [
        ("bucketed", 2, "slow loader"), ("fsdp", 2, "low bandwidth"),
    ]  # fmt: skip
    for row in rows:
        assert row.named == INJECTED[row.injected].cause
        assert row.is_right
        assert 0 < row.predicted_us < row.step_us
        assert isfinite(row.measured_us)  # the change was made
