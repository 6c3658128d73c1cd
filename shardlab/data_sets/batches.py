"""Which sequences a step trains on: decided by seed, step and micro-batch alone, never by the number of ranks.

The global batch of a micro-batch is ``batch_size`` sequences; rank r of N takes its rows of it. One process that takes
all rows sees exactly what N ranks see together, which is what every parity test compares.
"""

import random

import torch

from shardlab.data_sets.text import TextData


def batch(
    data: TextData,
    step: int,
    micro_batch: int,
    rows: range | slice,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the global batch of one micro-batch.

    Args:
        data: the text.
        step: training step, from 0.
        micro_batch: micro-batch within the step, from 0.
        rows: which of the ``batch_size`` rows to return.
        batch_size: sequences of the global batch.
        seq_len: bytes of one sequence.
        seed: of the choice of sequences.

    Returns:
        Inputs and targets, int64, each of shape (number of rows, seq_len); the target is the byte that follows.

    Raises:
        ValueError: a size below 1, rows outside the batch, or a text shorter than ``seq_len + 1`` bytes.
    """
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size and seq_len must be at least 1, got {batch_size} and {seq_len}")
    if len(data) < seq_len + 1:
        raise ValueError(f"seq_len must be at most {len(data) - 1} for text {data.name}, got {seq_len}")
    wanted = rows if isinstance(rows, range) else range(batch_size)[rows]
    if any(not 0 <= row < batch_size for row in wanted):
        raise ValueError(f"rows must be within 0 to {batch_size - 1}, got {rows}")
    # A str seed goes through SHA-512, so neighbouring steps share nothing; it does not depend on PYTHONHASHSEED.
    draw = random.Random(f"{seed}/{step}/{micro_batch}")
    starts = [draw.randrange(len(data) - seq_len) for _ in range(batch_size)]
    offsets = torch.tensor([starts[row] for row in wanted], dtype=torch.int64)
    windows = data.tokens[offsets[:, None] + torch.arange(seq_len + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
