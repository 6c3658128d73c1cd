"""Exercise: a checkpoint of 4 ranks, read by 3, then by 1.

checkpoint_reshard(saved, sizes, num_ranks, rank): what rank holds of a checkpoint that others have saved.

saved has a dict for each rank that saved, in any order: {name: (start, values)}, where values are the elements of
the parameter from start on. sizes is {name: number of elements} of the whole parameters, in order. Return the same
kind of dict for one of num_ranks new ranks: the parameters lie end to end, and every rank holds an equal chunk of
ceil(total / num_ranks) elements, as in zero1.owners. Parameters of which the rank holds nothing are left out.

Hints:
- Your zero1_owners(sizes, num_ranks, rank) of notebook 06 says which ranges the new rank holds: copy it over.
- Each of these ranges may lie in several of the old dicts: take what each of them shares with it.
- Make an empty vector of the range, and copy every shared part to its place, minus the range's start.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardlab.course.exercises.exercise import Case, Exercise, call_without_ranks
from shardlab.course.exercises.values import numbers_in
from shardlab.partition.flat import ParamSpec, flat_layout

Saved = dict[str, tuple[int, Tensor]]

SIZES = {"weight": 7, "bias": 3, "scale": 1, "head": 8}
FEW = {"weight": 4, "bias": 1}  # too few for all of four ranks
CASES = {  # the ranks that saved, in the order of saved, and how many read
    "4 to 3": (range(4), 3, SIZES),
    "3 to 1": (range(3), 1, SIZES),
    "1 to 4": (range(1), 4, SIZES),
    "2 to 2": (range(2), 2, SIZES),
    "4 to 2, the last saved first": (range(3, -1, -1), 2, FEW),
    "2 to 4, with a rank that holds nothing": (range(2), 4, FEW),
}

STARTER = """def checkpoint_reshard(saved, sizes, num_ranks, rank):
    return saved[rank % len(saved)]  # your code: here a rank reads one old file, which holds other ranges
"""


def cases() -> list[Case]:
    """Fewer ranks, one, more ranks, the same number, another order; one input for each new rank."""
    return [_case(words, *of_case) for words, of_case in CASES.items()]


def _case(words: str, before: range, after: int, sizes: Mapping[str, int]) -> Case:
    saved = [_pieces(sizes, len(before), rank) for rank in before]
    wanted = tuple(_pieces(sizes, after, rank) for rank in range(after))
    return Case(words, tuple((saved, dict(sizes), after, rank) for rank in range(after)), wanted)


def _pieces(sizes: Mapping[str, int], num_ranks: int, rank: int) -> Saved:
    layout = flat_layout([ParamSpec(name, (size,), 1) for name, size in sizes.items()], num_ranks)
    whole = _parameters(sizes)
    return {
        piece.name: (piece.param_start, whole[piece.name][piece.param_start : piece.param_stop].clone())
        for piece in layout.pieces(rank)
    }


def _parameters(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Every element has its own value, so that a wrong place shows."""
    numel = sum(sizes.values())
    return dict(zip(sizes, torch.arange(numel, dtype=torch.float64).split(list(sizes.values())), strict=True))


def _ranges_in(saved: list[Saved]) -> str:
    """What each rank has saved, without the values."""
    of_ranks = (
        ", ".join(f"{name} {start} to {start + len(values)}" for name, (start, values) in pieces.items())
        for pieces in saved
    )
    return f"saved [{' | '.join(of_ranks)}]"


RESHARD = Exercise.from_file(
    "checkpoint.reshard", __doc__, STARTER, cases, "12_checkpoints_that_reshard", num_references=1, num_wrong=5,
    attempt=call_without_ranks, drawn=lambda result: numbers_in([values for _, values in result.values()]),
    drawn_words="an element that the rank holds",
    shown_inputs=lambda saved, sizes, num_ranks, rank: f"{_ranges_in(saved)}; {sizes}; {num_ranks}; {rank}",
)  # fmt: skip
