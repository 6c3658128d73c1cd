from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import ParamSpec, assign_owners
from shardlab.vocabulary import Partition

WHOLE = (Partition.ROUND_ROBIN, Partition.CONTIGUOUS, Partition.BALANCED)
SMALL = st.lists(st.integers(0, 30), max_size=7)


def specs_of(numels):
    return [ParamSpec(f"p{index}", (numel,), 4) for index, numel in enumerate(numels)]


def largest_load(numels, owners, num_ranks):
    return max(sum(size for size, own in zip(numels, owners, strict=True) if own == rank) for rank in range(num_ranks))


def test_the_three_partitions_by_hand():
    specs = specs_of([8, 1, 1, 1, 5])
    assert assign_owners(specs, 2, Partition.ROUND_ROBIN) == (0, 1, 0, 1, 0)
    assert assign_owners(specs, 2, Partition.CONTIGUOUS) == (0, 1, 1, 1, 1)
    assert assign_owners(specs, 2, Partition.BALANCED) == (0, 1, 1, 1, 1)
    assert assign_owners(specs_of([3, 3, 3, 3]), 2, Partition.BALANCED) == (0, 1, 0, 1)


@given(SMALL, st.integers(1, 4))
def test_balanced_is_within_four_thirds_of_the_optimum(numels, num_ranks):
    owners = assign_owners(specs_of(numels), num_ranks, Partition.BALANCED)
    best = min(largest_load(numels, choice, num_ranks) for choice in product(range(num_ranks), repeat=len(numels)))
    assert largest_load(numels, owners, num_ranks) * 3 <= best * 4


@given(SMALL, st.integers(1, 4))
def test_contiguous_runs_have_the_smallest_possible_largest_run(numels, num_ranks):
    owners = assign_owners(specs_of(numels), num_ranks, Partition.CONTIGUOUS)
    assert list(owners) == sorted(owners)
    assert len(set(owners)) == min(len(numels), num_ranks)
    ordered = combinations_with_replacement(range(num_ranks), len(numels))
    assert largest_load(numels, owners, num_ranks) == min(largest_load(numels, c, num_ranks) for c in ordered)


def test_errors_name_the_field_and_what_to_use():
    specs = specs_of([1])
    with pytest.raises(ValueError, match=r"'elements' .* round_robin, contiguous, balanced$"):
        assign_owners(specs, 2, Partition.ELEMENTS)
    with pytest.raises(ValueError, match="num_ranks: 0 is too small"):
        assign_owners(specs, 0, Partition.BALANCED)
