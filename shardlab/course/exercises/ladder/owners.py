"""Exercise: which elements of which parameters each rank owns under ZeRO-1, with sizes that do not divide.

zero1_owners(sizes, num_ranks, rank): the ranges that rank owns, as {name: (start, stop)}.

sizes is {name: number of elements}. The parameters lie end to end in this order, and every rank owns an equal chunk of
ceil(total / num_ranks) elements of that line; the last ones may own fewer, or none. start and stop count within the
parameter. A parameter of which the rank owns nothing is left out. The check then lets every rank step the ranges that
it owns: each element must be stepped by exactly one ("ranks that step" counts them).

Hints:
- The chunk of a rank is rank * size to (rank + 1) * size on the line, with size = -(-total // num_ranks).
- Walk along the line with an offset: a parameter lies at offset to offset + numel.
- What two ranges share is max(starts) to min(stops), if the first is smaller; subtract the offset.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardlab.comm import Communicator
from shardlab.course.exercises.exercise import Case, Exercise, Function
from shardlab.partition.flat import ParamSpec, flat_layout

SIZES = {
    "3 ranks, sizes that do not divide": (3, {"weight": 7, "bias": 3, "scale": 1, "head": 8}),
    "4 ranks, 5 elements": (4, {"weight": 5}),
    "2 ranks, a parameter without elements": (2, {"weight": 4, "empty": 0, "bias": 4}),
    "1 rank": (1, {"weight": 3, "bias": 1}),
}

STARTER = """def zero1_owners(sizes, num_ranks, rank):
    return {name: (0, size) for name, size in sizes.items()}  # your code: here every rank owns everything
"""


def cases() -> list[Case]:
    """Borders inside and between parameters, a rank without anything, an empty parameter, one rank."""
    return [
        Case(words, ((sizes,),) * num_ranks, tuple(_wanted(sizes, num_ranks, rank) for rank in range(num_ranks)))
        for words, (num_ranks, sizes) in SIZES.items()
    ]


def _wanted(sizes: Mapping[str, int], num_ranks: int, rank: int) -> dict[str, object]:
    layout = flat_layout([ParamSpec(name, (size,), 1) for name, size in sizes.items()], num_ranks)
    ranges = {piece.name: (piece.param_start, piece.param_stop) for piece in layout.pieces(rank)}
    return {"ranges": ranges, "held": _held(ranges, sizes), "ranks that step": torch.ones(sum(sizes.values()))}


def step_what_is_owned(function: Function, comm: Communicator, sizes: Mapping[str, int]) -> dict[str, object]:
    """Every rank steps what its ranges say; counted over the ranks, each element must have been stepped once."""
    ranges = function(dict(sizes), comm.num_ranks, comm.rank)
    held = _held(ranges, sizes) if isinstance(ranges, Mapping) else torch.zeros(sum(sizes.values()))
    steps = held.clone()
    comm.all_reduce(steps, tag="ranks that step").wait()
    return {"ranges": ranges, "held": held, "ranks that step": steps}


def _held(ranges: Mapping[str, Any], sizes: Mapping[str, int]) -> Tensor:
    """1 for each element of the line that is in a range, else 0."""
    whole = {name: torch.zeros(size) for name, size in sizes.items()}
    for name in ranges.keys() & whole.keys():
        start, stop = ranges[name]
        whole[name][start:stop] = 1
    return torch.cat(list(whole.values()))


OWNERS = Exercise.from_file(
    "zero1.owners", __doc__, STARTER, cases, "06_zero_1_and_2", num_references=1, num_wrong=5,
    attempt=step_what_is_owned, drawn=lambda result: result["held"].tolist(),
    drawn_words="an element, 1 where the rank owns it",
)  # fmt: skip
