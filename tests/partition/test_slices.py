"""Slices tile the whole, and sizes that do not divide are refused with what would work."""

import pytest

from shardlab.partition.slices import TensorSlice, even_slice, parts_slice, require_divisible, slices_of, stretches


def test_even_slices_tile_the_dim():
    for num_ranks in (1, 2, 4):
        for dim in (0, 1):
            found = [even_slice((8, 4), dim, rank, num_ranks) for rank in range(num_ranks)]
            places = [index for slice_ in found for start, stop in slice_.ranges for index in range(start, stop)]
            assert places == list(range((8, 4)[dim]))
            assert {slice_.shape for slice_ in found} == {(8 // num_ranks, 4) if dim == 0 else (8, 4 // num_ranks)}


def test_every_part_is_divided():
    found = parts_slice((8, 3), 0, (4, 2, 2), 1, 2)
    assert found == TensorSlice((8, 3), 0, ((2, 4), (5, 6), (7, 8)), 1, 2)
    assert found.shape == (4, 3)
    assert found.of_rank(0).ranges == ((0, 2), (4, 5), (6, 7))


def test_stretches_are_the_places_of_the_elements():
    for slice_, whole in (
        (even_slice((4, 6), 0, 1, 2), [(12, 24)]),
        (even_slice((4, 6), 1, 1, 2), [(3, 6), (9, 12), (15, 18), (21, 24)]),
        (parts_slice((8, 2), 0, (4, 2, 2), 1, 2), [(4, 8), (10, 12), (14, 16)]),
        (even_slice((2, 4, 3), 1, 0, 2), [(0, 6), (12, 18)]),
    ):
        places = [place for start, stop in whole for place in range(start, stop)]
        assert list(stretches(slice_, 0, len(places))) == whole
        found = [place for start, stop in stretches(slice_, 2, 7) for place in range(start, stop)]
        assert found == places[2:7]


def test_the_error_says_what_would_work():
    for size, num_ranks, works in (
        (6, 4, "4 or 8, or 3 ranks"), (3, 2, "2 or 4"), (3, 4, "4, or 3 ranks"), (7, 3, "6 or 9"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^heads: {size} does not divide over {num_ranks} .*; use {works}$"):
            require_divisible("heads", size, num_ranks)
    with pytest.raises(ValueError, match="parts: they add up to 6"):
        parts_slice((8, 3), 0, (4, 2), 0, 2)


def test_slices_are_collected_by_name():
    class Layer:
        def __init__(self, **slices):
            self.tensor_slices = slices

    class Model:
        def named_modules(self, *, remove_duplicate):
            assert not remove_duplicate  # a state dict has every name of a module
            return [("", object()), ("a", Layer(weight=1)), ("b.c", Layer(weight=2, bias=3))]

    assert slices_of(Model()) == {"a.weight": 1, "b.c.weight": 2, "b.c.bias": 3}
