"""Bytes under way at once, from intervals made by hand."""

import pandas as pd
import pytest

from shardlab.analysis.timed import in_flight, traced_and_ordinary
from shardlab.records.tables import STEPS
from tests.analysis.hand_made import KEYS, STEP, collective, collectives


def steps(*traced):
    """A step for each, on rank 0."""
    return STEPS.frame([KEYS | STEP | {"step": step, "traced_memory": on} for step, on in enumerate(traced)])


def test_from_issue_until_waited_for():
    rows = collectives(
        collective(0, 0, (0, 5, 10), (20, 30), bytes=1000),  # under way until 30
        collective(0, 1, (25, 26, 40), bytes=300),  # nobody waited: until 40
        collective(0, 2, (30, 31, 32), (30, 32), bytes=900),  # begins when the first is gone
        collective(0, 3, (26, 27, 28), bytes=5000, phase="metrics"),
        collective(1, 0, (0, 5, 10), bytes=70),
    )
    assert in_flight(rows).set_index("rank")["in_flight_bytes"].to_dict() == {0: 1300.0, 1: 70.0}


def test_a_traced_step_beside_ordinary_ones():
    together, apart = ((0, 0, 10), (5, 5, 15)), ((0, 0, 10), (10, 10, 20))
    rows = [
        collective(0, seq, times, step=step)
        for step, pair in enumerate((together, apart, together, together))
        for seq, times in enumerate(pair)
    ]
    found = traced_and_ordinary(collectives(*rows), steps(False, True, False, False)).loc["a"]
    assert found.to_dict() == {"traced_bytes": 1000.0, "ordinary_bytes": 2000.0}
    alone = traced_and_ordinary(collectives(*rows).iloc[:0], steps(False, False, True)).loc["a"]
    assert alone.to_dict() == {"traced_bytes": 0.0, "ordinary_bytes": 0.0}
    only = traced_and_ordinary(collectives(*rows), steps(True)).loc["a"]
    assert only["traced_bytes"] == pytest.approx(2000)
    assert pd.isna(only["ordinary_bytes"])


def test_what_a_stream_waits_for_is_left_out():
    for transport in ("nccl", "staged"):
        rows = collectives(collective(0, 0, (0, 0, 10), transport=transport))
        assert in_flight(rows).empty
        assert traced_and_ordinary(rows, steps(True, False)).empty
