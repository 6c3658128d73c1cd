"""The plain-Python intervals of one step agree with ``analysis.intervals``, which the figures use."""

from hypothesis import given
from hypothesis import strategies as st

from shardlab.analysis import intervals
from shardlab.records.entries import exposure

times = st.integers(0, 40).map(float)
some = st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(some, some)
def test_exposed_is_the_length_of_the_difference(one, other):
    exposed, overlap = exposure(one, other)
    if length := intervals.total(one):
        assert exposed == length - intervals.total(intervals.intersect(one, other))
        assert overlap == (length - exposed) / length


def test_exposure_of_the_intervals_of_the_issue():
    assert exposure([(0, 10), (20, 30)], [(5, 25)]) == (10, 0.5)
    exposed, overlap = exposure([(0, 10), (2, 4)], [])  # what lies within another does not count twice
    assert (exposed, overlap) == (10, 0)
