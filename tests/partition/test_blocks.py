import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import ModelBytes, place_blocks

MODELS = st.builds(
    ModelBytes, st.lists(st.integers(0, 100), max_size=20).map(tuple), *(st.integers(0, 200) for _ in range(3))
)


def test_a_heavy_embedding_gets_fewer_blocks_beside_it():
    placement = place_blocks(ModelBytes((10,) * 8, embedding=40, final_norm=1, head=40), 4)
    assert placement.embedding_rank != placement.head_rank
    assert placement.bytes_by_rank == (40, 40, 41, 40)
    assert [len(placement.blocks_of(rank)) for rank in range(4)] == [0, 0, 4, 4]


def test_embedding_norm_and_head_are_not_all_on_rank_0():
    placement = place_blocks(ModelBytes((10,) * 12, embedding=5, final_norm=1, head=5), 4)
    assert {placement.embedding_rank, placement.head_rank, placement.final_norm_rank} == {0, 1, 2}
    assert max(placement.bytes_by_rank) - min(placement.bytes_by_rank) <= 5


def test_a_tied_head_stays_with_the_embedding():
    placement = place_blocks(ModelBytes((10, 10), embedding=30), 3)
    assert placement.head_rank == placement.embedding_rank


def test_fractions_are_of_bytes_not_of_blocks():
    placement = place_blocks(ModelBytes((30, 10), embedding=0), 2)
    assert [len(placement.blocks_of(rank)) for rank in range(2)] == [1, 1]
    assert placement.byte_fractions == (0.75, 0.25)
    assert placement.saving(0) == 0.25


@given(MODELS, st.integers(1, 8))
def test_every_block_has_one_owner_and_bytes_add_up(model, num_ranks):
    placement = place_blocks(model, num_ranks)
    blocks = [block for rank in range(num_ranks) for block in placement.blocks_of(rank)]
    assert blocks == list(range(len(model.blocks)))
    assert all(block in placement.blocks_of(placement.owner_of_block(block)) for block in blocks)
    assert sum(placement.bytes_by_rank) == model.total
    sizes = (*model.blocks, model.embedding, model.final_norm, model.head)
    assert max(placement.bytes_by_rank) <= model.total / num_ranks + 2 * max(sizes)


def test_errors_name_the_field():
    with pytest.raises(ValueError, match="head: -1 is too small; it must be at least 0"):
        ModelBytes((1,), embedding=1, head=-1)
    with pytest.raises(ValueError, match="num_ranks: 0 is too small"):
        place_blocks(ModelBytes((1,), embedding=1), 0)
    with pytest.raises(ValueError, match="block: there is no block 1; it must be 0 to 0"):
        place_blocks(ModelBytes((1,), embedding=1), 2).owner_of_block(1)
