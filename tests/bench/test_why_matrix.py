"""Causes put in on purpose are the causes that are named; ``shardlab bench --why`` prints the whole matrix.

Here two: one whose change is an option, and one that is taken out again.
"""

from dataclasses import replace
from math import isfinite

from shardlab.course.why_matrix import INJECTED, why_matrix

FEW_ROWS = 16  # much compute hides messages, and on cores that others use it is more: then nothing would be wrong


def test_small_buckets_and_a_reduction_in_every_micro_batch_are_named_and_mended(monkeypatch):
    wrong = ("small buckets", "every micro-batch")
    for name in wrong:
        monkeypatch.setitem(INJECTED, name, replace(INJECTED[name], rows=FEW_ROWS))
    rows = list(why_matrix(2, ("bucketed",), wrong))
    assert [(row.engine, row.ranks, row.injected) for row in rows] == [("bucketed", 2, name) for name in wrong]
    for row in rows:
        assert row.named == INJECTED[row.injected].cause
        assert row.is_right
        assert 0 < row.predicted_us < row.step_us
        assert isfinite(row.measured_us)  # the change was made
