import pytest
import torch

from shardlab.data_sets import TextData, batch
from shardlab.partition import chunk_bounds

DATA = TextData(bytes(index * 7 % 256 for index in range(5000)), 16)


def test_targets_are_the_bytes_that_follow():
    inputs, targets = batch(DATA, 0, 0, slice(None), 8, 16)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 7) % 256)


def test_the_rows_of_all_ranks_are_the_global_batch():
    whole_inputs, whole_targets = batch(DATA, 3, 1, slice(None), 12, 16, seed=4)
    for num_ranks in (1, 2, 5, 16):
        bounds = chunk_bounds(12, num_ranks)
        parts = [batch(DATA, 3, 1, range(bounds[r], bounds[r + 1]), 12, 16, seed=4) for r in range(num_ranks)]
        assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole_inputs)
        assert torch.equal(torch.cat([targets for _, targets in parts]), whole_targets)


def test_seed_step_and_micro_batch_each_change_the_batch_and_nothing_else_does():
    first, _ = batch(DATA, 0, 0, slice(None), 8, 16)
    torch.manual_seed(99)
    again, _ = batch(DATA, 0, 0, slice(None), 8, 16)
    assert torch.equal(first, again)
    for step, micro_batch, seed in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (11, 0, 0), (1, 1, 0)):
        assert not torch.equal(first, batch(DATA, step, micro_batch, slice(None), 8, 16, seed)[0])
    # Nor the hash seed: the numbers are these in every process.
    found = batch(TextData(bytes(range(256)), 4), 2, 1, slice(0, 3), 3, 4, seed=5)[0]
    assert found[:, 0].tolist() == [186, 143, 206]


def test_every_start_can_be_drawn_and_none_runs_past_the_end():
    short = TextData(b"abcdef", 4)
    starts = {tuple(row.tolist()) for step in range(40) for row in batch(short, step, 0, slice(None), 4, 4)[0]}
    assert starts == {tuple(b"abcd"), tuple(b"bcde")}


def test_errors_name_the_field():
    for arguments, message in (
        ((slice(None), 0, 16), "batch_size, seq_len: .*; both must be at least 1"),
        ((slice(None), 4, 0), "batch_size, seq_len: .*; both must be at least 1"),
        ((range(2, 5), 4, 16), "rows: .* are not all within 0 to 3"),
        ((range(-1, 2), 4, 16), "rows: .* are not all within 0 to 3"),
        ((slice(None), 4, 5000), "seq_len: 5000 is above 4999"),
    ):
        with pytest.raises(ValueError, match=message):
            batch(DATA, 0, 0, *arguments)
