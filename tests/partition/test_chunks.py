from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import chunk_bounds, chunk_sizes, even_bounds, owner_of, saving, shard_bytes

NUMEL = st.integers(0, 2_000_000)
RANKS = st.integers(1, 70)


def test_remainder_goes_to_the_first_ranks():
    assert chunk_sizes(10, 3) == (4, 3, 3)
    assert chunk_bounds(10, 3) == (0, 4, 7, 10)
    assert chunk_sizes(1_000_003, 7) == (142_858,) * 4 + (142_857,) * 3
    assert sum(chunk_sizes(1_000_003, 7)) == 1_000_003


def test_more_ranks_than_elements_leaves_empty_shards():
    assert chunk_sizes(2, 4) == (1, 1, 0, 0)
    assert chunk_sizes(0, 3) == (0, 0, 0)
    assert [owner_of(index, 2, 4) for index in range(2)] == [0, 1]
    assert shard_bytes(2, 4, num_ranks=4, rank=3) == 0
    assert saving(2, num_ranks=4, rank=3) == 1.0


@given(NUMEL, RANKS)
def test_chunks_cover_the_range_once_and_differ_by_at_most_one(numel, num_ranks):
    bounds = chunk_bounds(numel, num_ranks)
    sizes = chunk_sizes(numel, num_ranks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, num_ranks + 1)
    assert tuple(stop - start for start, stop in pairwise(bounds)) == sizes
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(1, 2_000_000), RANKS, st.data())
def test_the_owner_of_an_index_is_the_rank_whose_chunk_holds_it(numel, num_ranks, data):
    index = data.draw(st.integers(0, numel - 1))
    bounds = chunk_bounds(numel, num_ranks)
    owner = owner_of(index, numel, num_ranks)
    assert bounds[owner] <= index < bounds[owner + 1]


@given(NUMEL, RANKS)
def test_even_bounds_are_equal_and_pad_by_less_than_the_ranks(numel, num_ranks):
    bounds = even_bounds(numel, num_ranks)
    assert len({stop - start for start, stop in pairwise(bounds)}) == 1
    assert len(bounds) == num_ranks + 1
    assert 0 <= bounds[-1] - numel < num_ranks


@given(NUMEL, st.sampled_from([1, 2, 4, 8]), RANKS)
def test_bytes_and_savings_add_up(numel, itemsize, num_ranks):
    held = [shard_bytes(numel, itemsize, num_ranks, rank) for rank in range(num_ranks)]
    assert sum(held) == numel * itemsize
    saved = [saving(numel, num_ranks, rank) for rank in range(num_ranks)]
    if numel:
        assert sum(saved) == pytest.approx(num_ranks - 1)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: chunk_sizes(-1, 2), "numel"),
        (lambda: chunk_bounds(4, 0), "num_ranks"),
        (lambda: even_bounds(4, 0), "num_ranks"),
        (lambda: owner_of(4, 4, 2), "index"),
        (lambda: owner_of(0, 0, 2), "index"),
        (lambda: shard_bytes(4, 0, 2, 0), "itemsize"),
        (lambda: shard_bytes(4, 4, 2, 2), "rank"),
        (lambda: saving(4, 2, -1), "rank"),
    ],
)
def test_errors_name_the_field(call, field):
    with pytest.raises(ValueError, match=rf"^{field}: .* must be"):
        call()
