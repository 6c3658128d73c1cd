from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import chunk_bounds, chunk_sizes, even_bounds

NUMEL = st.integers(0, 2_000_000)
RANKS = st.integers(1, 70)


def test_remainder_goes_to_the_first_ranks_and_more_ranks_than_elements_leave_empty_shards():
    assert chunk_sizes(10, 3) == (4, 3, 3)
    assert chunk_bounds(10, 3) == (0, 4, 7, 10)
    assert (chunk_sizes(2, 4), chunk_sizes(0, 3)) == ((1, 1, 0, 0), (0, 0, 0))
    for call in (lambda: chunk_sizes(-1, 2), lambda: chunk_bounds(4, 0), lambda: even_bounds(4, 0)):
        with pytest.raises(ValueError, match=r"^num(el|_ranks): .* must be"):
            call()


@given(NUMEL, RANKS)
def test_chunks_cover_the_range_once_and_differ_by_at_most_one(numel, num_ranks):
    bounds = chunk_bounds(numel, num_ranks)
    sizes = chunk_sizes(numel, num_ranks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, num_ranks + 1)
    assert tuple(stop - start for start, stop in pairwise(bounds)) == sizes
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(NUMEL, RANKS)
def test_even_bounds_are_equal_and_pad_by_less_than_the_ranks(numel, num_ranks):
    bounds = even_bounds(numel, num_ranks)
    assert len({stop - start for start, stop in pairwise(bounds)}) == 1
    assert len(bounds) == num_ranks + 1
    assert 0 <= bounds[-1] - numel < num_ranks
