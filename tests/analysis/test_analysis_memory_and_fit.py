from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.analysis import at_rest, fit_latency_bandwidth, peak, process_items, with_fit
from shardlab.records.tables import MEMORY
from shardlab.trace.process_memory import Allocator


def memory(*rows):
    """Rows (rank, step, where, role, bytes)."""
    names = ("rank", "step", "where", "role", "bytes")
    rest = {"run": "a", "source": "measured", "time_us": 0.0, "phase": "step"}
    rest |= asdict(Allocator()) | {"resident_bytes": pd.NA}
    return MEMORY.frame([rest | dict(zip(names, row, strict=True)) for row in rows])


def test_at_rest_is_the_last_step_and_the_largest_rank_of_each_role():
    rows = [(0, 0, "rest", "parameter", 999), (0, 1, "rest", "parameter", 10), (1, 1, "rest", "parameter", 12)]
    rows += [(0, 1, "rest", "gradient", 7), (1, 1, "rest", "gradient", 5), (0, 1, "peak", "gradient", 500)]
    table = at_rest(memory(*rows))
    assert table.set_index("role")["bytes"].to_dict() == {"parameter": 12, "gradient": 7}


def test_peak_is_one_moment_and_not_a_sum_of_maxima():
    rows = [(0, 0, "peak", "parameter", 10), (0, 0, "peak", "activation", 90), (1, 0, "peak", "parameter", 60)]
    table = peak(memory(*rows, (1, 0, "peak", "activation", 50), (1, 0, "rest", "parameter", 5000)))
    assert table.set_index("role")["bytes"].to_dict() == {"parameter": 60, "activation": 50}
    assert set(table["rank"]) == {1}


def test_the_process_is_that_of_the_rank_which_holds_most_and_leaves_the_roles_as_they_are():
    rows = [(rank, step, where, item, size + 10 * rank + step) for rank in (0, 1) for step in (0, 1)
            for where, item, size in (("rest", "parameter", 100), ("process", "heap", 200))]  # fmt: skip
    table = memory(*rows)
    table["resident_bytes"] = (300 + 20 * table["rank"] + 2 * table["step"]).astype("Int64")
    items = process_items(table)
    assert items.set_index("item")["bytes"].to_dict() == {"parameter": 111, "heap": 211}
    assert items["bytes"].sum() == items["resident_bytes"].iloc[0] == 322
    assert set(items["rank"]) == {1}
    assert at_rest(table)["role"].tolist() == ["parameter"]
    assert process_items(table[:0]).empty


@given(st.floats(1, 1e4), st.floats(0.01, 1e3))
def test_an_exact_line_is_found_again(latency_us, gb_per_s):
    size = np.array([0.0, 1e3, 1e5, 1e7, 1e9])
    line = fit_latency_bandwidth(size, latency_us + size / (gb_per_s * 1e3))
    assert line.latency_us == pytest.approx(latency_us, rel=1e-6)
    assert line.bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=1e-6)


@given(st.lists(st.floats(1, 1e5), min_size=4, max_size=4))
def test_coefficients_are_never_negative_and_nothing_nearby_is_better(times):
    size, times = np.array([1e2, 1e4, 1e6, 1e8]), np.array(times)
    line = fit_latency_bandwidth(size, times)
    assert line.latency_us >= 0
    assert line.bandwidth_gb_per_s > 0

    def error(latency, slope):
        return np.square((latency + slope * size) / times - 1).sum()

    slope = 1e-3 / line.bandwidth_gb_per_s
    best = error(line.latency_us, slope)
    for latency_factor, slope_factor in [(1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)]:
        assert error(line.latency_us * latency_factor, slope * slope_factor) >= best - 1e-9
    assert error(line.latency_us, slope + 1e-9) >= best - 1e-9


def test_fit_by_op_and_refusals():
    table = pd.DataFrame({"op": ["a", "a", "b", "b"], "bytes": [0, 1000, 0, 1000], "time_us": [5.0, 6.0, 1.0, 11.0]})
    assert with_fit(table)["fitted_us"].tolist() == pytest.approx([5, 6, 1, 11])
    # An unweighted fit would miss the latency by far.
    line = fit_latency_bandwidth([1e3, 1e3, 1e6, 1e9], [100.1, 100.1, 200, 1.1e5])
    assert line.latency_us == pytest.approx(100, rel=0.1)
    for call, words in (
        (lambda: with_fit(table.drop(columns="bytes")), "missing columns .'bytes'"),
        (lambda: fit_latency_bandwidth([1, 1], [1, 2]), "two sizes"),
        (lambda: fit_latency_bandwidth([1, 2], [1, 0]), "above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
