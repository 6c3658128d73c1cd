import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.analysis import intersect, merge, subtract, total
from shardlab.analysis.intervals import covered_until

# Integer bounds in a small range: touching, nested and empty intervals all come up, and a set of points is an oracle.
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda one: (one[0], sum(one))), max_size=12)


def points(rows):
    return {point for start, end in rows for point in range(int(start), int(end))}


@given(intervals)
def test_merge_covers_the_same_points_with_sorted_disjoint_intervals(rows):
    merged = merge(rows)
    assert points(merged) == points(rows)
    assert (merged[:, 0] < merged[:, 1]).all()
    assert (merged[1:, 0] > merged[:-1, 1]).all()
    assert total(rows) == len(points(rows))


@given(intervals, intervals)
def test_intersection_and_difference_are_those_of_the_points(first, second):
    assert points(intersect(first, second)) == points(first) & points(second)
    assert points(subtract(first, second)) == points(first) - points(second)
    assert total(first) == total(intersect(first, second)) + total(subtract(first, second))


def test_an_impossible_interval_is_named():
    for wrong in ((5.0, 4.0), (0.0, float("nan")), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="interval 1"):
            merge([(0, 1), wrong])


def test_what_is_covered_until_a_moment_is_the_intersection_with_all_before_it():
    times = [(3.0, 5.0), (4.0, 7.0), (10.0, 11.0), (0.5, 1.0)]
    for moment in (0.0, 0.75, 1.0, 2.0, 4.5, 8.0, 10.5, 20.0):
        assert covered_until(times, [moment])[0] == total(intersect(times, [(-1.0, moment)]))
    assert covered_until([], [[1.0, 2.0]]).tolist() == [[0.0, 0.0]]
