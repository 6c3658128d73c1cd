from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import ParamSpec
from shardlab.partition.dim0 import dim0_layout

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(SHAPES, max_size=10).map(lambda shapes: [ParamSpec(f"p{i}", s, 4) for i, s in enumerate(shapes)])
RANKS = st.integers(1, 9)


def rows_of(spec):
    return spec.shape[0] if spec.shape else 1


def test_the_picture_in_the_docstring():
    layout = dim0_layout([ParamSpec("a", (3, 2), 4), ParamSpec("b", (1, 2), 4), ParamSpec("c", (), 4)], 2)
    assert layout.bounds == (0, 7, 14)
    assert (layout.numel, layout.padded_numel, layout.padding_numel) == (9, 14, 5)
    assert layout.chunk_sizes == (7, 7)
    held = [
        [(p.name, p.flat_start, p.flat_stop, p.param_start, p.param_stop, p.whole) for p in layout.pieces(rank)]
        for rank in range(2)
    ]
    assert held[0] == [("a", 0, 4, 0, 4, False), ("b", 4, 6, 0, 2, True), ("c", 6, 7, 0, 1, True)]
    assert held[1] == [("a", 7, 9, 4, 6, False)]


@given(SPECS, RANKS)
def test_the_pieces_of_all_ranks_are_each_parameter_once_in_whole_rows(specs, num_ranks):
    layout = dim0_layout(specs, num_ranks)
    seen = {spec.name: [] for spec in specs}
    for rank in range(num_ranks):
        place, end = layout.chunk(rank)
        for piece in layout.pieces(rank):
            spec = next(one for one in specs if one.name == piece.name)
            row = spec.numel // rows_of(spec)
            assert piece.flat_start == place  # one behind the other
            place = piece.flat_stop
            assert piece.param_start % row == piece.param_stop % row == 0
            assert piece.param_start == rank * -(-rows_of(spec) // num_ranks) * row
            assert piece.numel == piece.param_stop - piece.param_start > 0
            assert piece.whole == (piece.numel == spec.numel)
            seen[piece.name].extend(range(piece.param_start, piece.param_stop))
        assert place <= end
    assert seen == {spec.name: list(range(spec.numel)) for spec in specs}
    assert layout.padding_numel == layout.padded_numel - sum(spec.numel for spec in specs)


@given(SPECS, RANKS)
def test_chunks_are_equal_and_hold_the_largest_rank_exactly(specs, num_ranks):
    layout = dim0_layout(specs, num_ranks)
    held = [sum(piece.numel for piece in layout.pieces(rank)) for rank in range(num_ranks)]
    assert set(layout.chunk_sizes) == {max(held)}
    assert layout.bounds == tuple(rank * max(held) for rank in range(num_ranks + 1))
    assert layout.numel == sum(held) == sum(spec.numel for spec in specs)
    # A block is less than a row more than an even share, so padding is less than a row a parameter and rank.
    assert layout.padding_numel <= sum((num_ranks - 1) * spec.numel // max(rows_of(spec), 1) for spec in specs)
