"""Exercise: the norm of all gradients, where every rank holds only shards of them.

clip_global_norm(comm, shards, norm_type): the norm over all elements of all ranks, the same on every rank, as
a number or a tensor with one element.

shards is this rank's list of float64 tensors, which may be empty; norm_type is 1.0, 2.0 or float("inf"). One message of
one float64 number is enough: comm.all_reduce(tensor, reduction="sum" or "max").wait() works in place.

Hints:
- Norms do not add up, but for a 1-norm. What does, for a 2-norm, and how do you come back from it?
- Of an inf-norm nothing adds up: the largest counts, and a negative element may be the largest in absolute value.
- A rank without shards sends a zero: all ranks take part in every collective, with the same dtype (float64).
"""

from math import inf

import torch

from shardlab.course.exercises.exercise import Case, Exercise, Message, Traffic
from shardlab.vocabulary import Collective

SHARDS = {  # of each rank, and the norm
    "2-norm, 3 ranks, one without shards": (2.0, [[[3.0], [0.0, 4.0]], [], [[12.0]]], 13.0),
    "inf-norm, 3 ranks, one without shards": (inf, [[[1.0, -7.0], [2.0]], [], [[5.0]]], 7.0),
    "1-norm, 2 ranks": (1.0, [[[1.0, -2.0]], [[-3.0], [4.0]]], 10.0),
    "2-norm, 1 rank": (2.0, [[[3.0], [-4.0]]], 5.0),
}

STARTER = """def clip_global_norm(comm, shards, norm_type):
    return torch.nn.utils.get_total_norm(shards, norm_type)  # your code: of this rank alone
"""


def cases() -> list[Case]:
    """The three norms, with a rank that holds nothing, and one rank alone."""
    return [_case(words, *values) for words, values in SHARDS.items()]


def _case(words: str, norm_type: float, shards: list[list[list[float]]], norm: float) -> Case:
    num_ranks = len(shards)
    one_number = Message.around_a_ring(Collective.ALL_REDUCE, 8, num_ranks)
    inputs = tuple(([torch.tensor(one, dtype=torch.float64) for one in of_rank], norm_type) for of_rank in shards)
    traffic = Traffic.of([[one_number] if num_ranks > 1 else []] * num_ranks)
    return Case(words, inputs, (norm,) * num_ranks, traffic)


NORM = Exercise.from_file(
    "clip.global_norm", __doc__, f"import torch\n\n\n{STARTER}", cases, "06_zero_1_and_2",
    num_references=1, num_wrong=6,
)  # fmt: skip
