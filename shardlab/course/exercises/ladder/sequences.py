"""Exercises of the notebook on long sequences: parts that are equal work, and attention to two parts of the keys."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.comm import Communicator
from shardlab.context import positions_of
from shardlab.course.exercises.exercise import Case, Exercise, Function, call_without_ranks
from shardlab.course.exercises.values import numbers_in

LENGTHS = {"2 ranks, 8 tokens": (8, 2), "3 ranks, 12 tokens": (12, 3), "4 ranks, 32 tokens": (32, 4)}


def parts_cases() -> list[Case]:
    """context_parts(seq_len, num_ranks, rank): the positions of the tokens that a rank has, as a list.

    Attention is causal: the query at position t sees the t + 1 keys at positions 0 to t, and each of them is a pair
    that its rank computes. Divide the tokens so that each is on one rank, and all ranks compute equally many pairs.
    2 num_ranks divides seq_len.

    Hints:
    - Cut the sequence into 2 num_ranks pieces. The first piece has the least work, the last one the most.
    - Rank 0 takes the first and the last piece, rank 1 the second and the last but one.
    """
    return [
        Case(words, (sizes,), ({"tokens": "each once", "pairs": _pairs(_zigzag(*sizes))},))
        for words, sizes in LENGTHS.items()
    ]


def _zigzag(seq_len: int, num_ranks: int) -> list[list[int]]:
    return [positions_of(seq_len, num_ranks, rank, zigzag=True).tolist() for rank in range(num_ranks)]


def _pairs(parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(position + 1 for position in part) for part in parts]


def divide(function: Function, _comm: Communicator, seq_len: int, num_ranks: int) -> object:
    """The learner's parts, counted."""
    parts = [function(seq_len, num_ranks, rank) for rank in range(num_ranks)]
    try:
        numbers = [[int(position) for position in part] for part in parts]
    except TypeError:
        return {"tokens": "no list of positions came back", "pairs": None}
    found = sorted(position for part in numbers for position in part)
    wrong = sorted(set(found) ^ set(range(seq_len))) or [one for one in set(found) if found.count(one) > 1]
    return {"tokens": f"not once: {wrong[0]}" if wrong else "each once", "pairs": _pairs(numbers)}


PARTS = Exercise.of(
    "context.parts", parts_cases, "19_long_sequences", attempt=divide,
    drawn=lambda result: numbers_in(result["pairs"]), drawn_words="pairs that a rank computes",
)  # fmt: skip


def merge_cases() -> list[Case]:
    """context_merge(one, other): attention to all keys, from that to each of two parts of them.

    Each part is a pair (output, log_sum): output is [queries, d], float64, the values' mean with softmax weights over
    the keys of that part alone; log_sum is [queries, 1], the logarithm of the sum of exp(score) over the same keys, and
    minus infinity where a query sees none of them (its output is 0). Return a dict with "output" and "log_sum" of both
    parts together, as if there had been one softmax. Scores may be large: exp(1000) is no number.

    Hints:
    - A part's share of the weight is exp(log_sum) / (exp(log_sum) + exp(other_log_sum)), = exp(log_sum - both).
    - both = torch.logaddexp(log_sum, other_log_sum) is the new log_sum, and never leaves the range of numbers.
    """
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5), (5, 3)))
    unseen = scores.clone()
    unseen[0, 3:] = -torch.inf
    return [_merge_case(words, given, values) for words, given in {
        "3 and 2 keys": scores, "scores around 1000": scores + 1000, "a query that sees one part": unseen
    }.items()]  # fmt: skip


def _merge_case(words: str, scores: Tensor, values: Tensor) -> Case:
    whole, *parts = (
        (scores[:, keys].softmax(-1).nan_to_num() @ values[keys], scores[:, keys].logsumexp(-1, keepdim=True))
        for keys in (slice(None), slice(3), slice(3, None))
    )
    return Case(words, (tuple(parts),), ({"output": whole[0], "log_sum": whole[1]},))


MERGE = Exercise.of(
    "context.merge", merge_cases, "19_long_sequences", attempt=call_without_ranks,
    drawn=lambda result: _row(result["output"]), drawn_words="the outputs",
)  # fmt: skip


def _row(output: Any) -> list[float]:
    return list(numbers_in(torch.as_tensor(output).flatten()))
