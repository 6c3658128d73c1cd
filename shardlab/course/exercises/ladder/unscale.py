"""Exercise: gradients of a scaled loss, of which one rank's may have overflowed: all ranks skip the step, or none.

precision_unscale(comm, shards, scale): undo the scaling of the loss, on all ranks or on none.

shards is this rank's list of float64 gradients of a loss that was multiplied by scale; it may be empty. If every
element on every rank is finite, return (the shards divided by scale, scale). If one of them is inf or NaN anywhere, all
ranks must skip the step and try a smaller scale: return (None, scale / 2) on each. One message of one float64 number is
enough: comm.all_reduce(tensor, reduction="sum" or "max").wait() works in place.

Hints:
- tensor.isfinite() is False for inf, -inf and NaN. A rank without shards has found nothing wrong.
- A rank that skips alone no longer steps with the others. Send 1.0 if something is wrong here.
- With reduction="max" everybody ends with 1.0 if anybody had it. Do not add up the gradients: inf - inf is NaN.
"""

from math import inf, nan

import torch

from shardlab.course.exercises.exercise import Case, Exercise, Message, Traffic
from shardlab.vocabulary import Collective

SCALE = 1024.0
SHARDS: dict[str, list[list[list[float]]]] = {  # of each rank
    "an inf on rank 1": [[[1024.0]], [[3.0, inf]]],
    "all are finite": [[[1024.0, 2048.0], [0.0]], [[-512.0]]],
    "a NaN on rank 0": [[[nan, 1.0], [2.0]], [[1024.0]], [[8.0]]],
    "+inf and -inf on two ranks": [[[inf]], [[-inf]]],
    "rank 0 has no shards": [[], [[1024.0], [inf]]],
    "1 rank": [[[2048.0, -1024.0]]],
}

STARTER = """def precision_unscale(comm, shards, scale):
    return [shard / scale for shard in shards], scale  # your code: and if one of them is not finite, on another rank?
"""


def cases() -> list[Case]:
    """Nothing wrong, inf and NaN on one rank, both signs, no shards, one rank."""
    return [_case(words, shards) for words, shards in SHARDS.items()]


def _case(words: str, shards: list[list[list[float]]]) -> Case:
    tensors = [[torch.tensor(shard, dtype=torch.float64) for shard in of_rank] for of_rank in shards]
    is_finite = all(bool(shard.isfinite().all()) for of_rank in tensors for shard in of_rank)
    num_ranks = len(shards)
    wanted = tuple([[shard / SCALE for shard in own], SCALE] if is_finite else [None, SCALE / 2] for own in tensors)
    one_number = Message.around_a_ring(Collective.ALL_REDUCE, 8, num_ranks)
    traffic = Traffic.of([[one_number] if num_ranks > 1 else []] * num_ranks)
    return Case(words, tuple((own, SCALE) for own in tensors), wanted, traffic)


UNSCALE = Exercise.from_file(
    "precision.unscale", __doc__, STARTER, cases, "09_precision_offload_checkpointing",
    drawn_words="an element of the gradients, if there are any, then the scale", num_references=1, num_wrong=5,
)  # fmt: skip
