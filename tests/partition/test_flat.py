from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import ParamSpec, flat_layout, owned_layout
from shardlab.partition.flat import ALIGNED_NUMEL, aligned_first

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
RANKS = st.integers(1, 9)


@st.composite
def spec_lists(draw, min_size=0):
    shapes = draw(st.lists(SHAPES, min_size=min_size, max_size=12))
    return [ParamSpec(f"p{index}", shape, 4) for index, shape in enumerate(shapes)]


@st.composite
def layouts(draw):
    specs, num_ranks = draw(spec_lists()), draw(RANKS)
    if draw(st.booleans()):
        return specs, flat_layout(specs, num_ranks)
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(specs), max_size=len(specs)))
    return specs, owned_layout(specs, owners, num_ranks)


def test_a_border_may_cut_a_parameter_and_padding_is_at_the_end():
    layout = flat_layout([ParamSpec("a", (4,), 4), ParamSpec("b", (3,), 4), ParamSpec("c", (2, 2), 4)], 2)
    assert layout.bounds == (0, 6, 12)
    assert (layout.numel, layout.padded_numel, layout.padding_numel) == (11, 12, 1)
    first, second = layout.pieces(1)
    assert (first.name, first.flat_start, first.flat_stop, first.param_start, first.param_stop) == ("b", 6, 7, 2, 3)
    assert (first.whole, first.numel) == (False, 1)
    assert (second.name, second.whole) == ("c", True)


@given(layouts())
def test_the_pieces_of_all_ranks_cover_each_element_once(specs_and_layout):
    specs, layout = specs_and_layout
    seen = {spec.name: [] for spec in specs}
    for rank in range(layout.num_ranks):
        start, stop = layout.chunk(rank)
        for piece in layout.pieces(rank):
            place = layout.names.index(piece.name)
            assert start <= piece.flat_start < piece.flat_stop <= stop
            assert piece.flat_start - layout.starts[place] == piece.param_start
            assert piece.numel == piece.param_stop - piece.param_start > 0
            assert piece.whole == (piece.numel == layout.specs[place].numel)
            seen[piece.name].extend(range(piece.param_start, piece.param_stop))
    assert seen == {spec.name: list(range(spec.numel)) for spec in specs}


@given(spec_lists(), RANKS, st.data())
def test_an_owned_layout_gives_each_rank_exactly_its_parameters(specs, num_ranks, data):
    owners = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(specs), max_size=len(specs)))
    layout = owned_layout(specs, owners, num_ranks)
    assert layout.padding_numel == 0
    assert list(layout.specs) == [
        spec for rank in range(num_ranks) for spec, owner in zip(specs, owners, strict=True) if owner == rank
    ]
    for rank in range(num_ranks):
        mine = [spec.name for spec, owner in zip(specs, owners, strict=True) if owner == rank and spec.numel]
        assert [piece.name for piece in layout.pieces(rank)] == mine
        assert all(piece.whole for piece in layout.pieces(rank))


def test_errors_name_the_field():
    spec = ParamSpec("a", (4,), 4)
    for call, words in (
        (lambda: flat_layout([spec], 0), "num_ranks"),
        (lambda: ParamSpec("a", (4,), 0), "itemsize of 'a'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@given(st.lists(st.integers(0, 40), max_size=12))
def test_each_parameter_begins_at_a_multiple_of_what_divides_its_size(sizes):
    specs = aligned_first([ParamSpec(str(place), (size,), 4) for place, size in enumerate(sizes)])
    for spec, start in zip(specs, flat_layout(specs, 1).starts, strict=False):
        assert start % gcd(spec.numel, ALIGNED_NUMEL) == 0
