"""Exercises of notebooks 06, 08 and 09: the norm of shards, units within a budget, a step that all skip or none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf, nan
from typing import Any

import torch

from shardlab.comm import Communicator
from shardlab.course.exercises.exercise import Case, Exercise, Function, Measured, Traffic
from shardlab.course.exercises.values import whole_number
from shardlab.vocabulary import Collective

ONE_NUMBER = (8,)  # bytes of a float64
# The three norms, with a rank that holds nothing, and one rank alone.
NORM_SHARDS: dict[str, tuple[float, list[list[list[float]]], float]] = {  # of each rank, and the norm
    "2-norm, 3 ranks, one without shards": (2.0, [[[3.0], [0.0, 4.0]], [], [[12.0]]], 13.0),
    "inf-norm, 3 ranks, one without shards": (inf, [[[1.0, -7.0], [2.0]], [], [[5.0]]], 7.0),
    "1-norm, 2 ranks": (1.0, [[[1.0, -2.0]], [[-3.0], [4.0]]], 10.0),
    "2-norm, 1 rank": (2.0, [[[3.0], [-4.0]]], 5.0),
}


def norm_case(words: str, norm_type: float, shards: list[list[list[float]]], norm: float) -> Case:
    """clip_global_norm(comm, shards, norm_type): the norm over all elements of all ranks, the same on every rank.

    Return a number, or a tensor with one element. shards is this rank's list of float64 tensors, which may be empty;
    norm_type is 1.0, 2.0 or float("inf"). One message of one float64 number is enough: comm.all_reduce(tensor,
    reduction="sum" or "max").wait() works in place.

    Hints:
    - Norms do not add up, but for a 1-norm. What does, for a 2-norm, and how do you come back from it?
    - Of an inf-norm nothing adds up: the largest counts, and a negative element may be the largest in absolute value.
    - A rank without shards sends a zero: all ranks take part in every collective, with the same dtype (float64).
    """
    num_ranks = len(shards)
    inputs = tuple(([torch.tensor(one, dtype=torch.float64) for one in of_rank], norm_type) for of_rank in shards)
    return Case(words, inputs, (norm,) * num_ranks, Traffic.alike(Collective.ALL_REDUCE, ONE_NUMBER, num_ranks))


NORM = Exercise.of("clip.global_norm", norm_case, "06_zero_1_and_2", NORM_SHARDS)


Units = Sequence[Sequence[int]]

# Without prefetch a greedy choice is enough; with prefetch, giving each unit half the budget is not.
SIZES = {  # bytes of each layer, budget, prefetch
    "no prefetch": ([48, 16, 32, 64, 16, 16], 96, 0),
    "no prefetch, one layer fills the budget": ([96, 16, 80], 96, 0),
    "one unit ahead": ([32, 32, 32, 32, 32, 32], 128, 1),
    "one unit ahead, a large layer": ([16, 80, 16, 16, 16, 48], 128, 1),
    "all fit": ([16, 16, 16], 64, 0),
}


def units_case(words: str, sizes: Sequence[int], budget: int, prefetch: int) -> Case:
    """fsdp_units(sizes, budget, prefetch): which layers make up each unit, as a list of lists of indices.

    sizes are the bytes of the layers' weights in the order of forward. A unit is a run of neighbouring layers, gathered
    in one message before its first layer computes and freed after its last. With prefetch 0 one unit is gathered at a
    time, with prefetch 1 the next one as well, while this one computes. A gathered layer counts with its full size. At
    no moment may more than budget bytes be gathered. Of all such divisions return one with the fewest units; there is
    at least one.

    Hints:
    - With prefetch 0: go on with the open unit for as long as the next layer fits.
    - With prefetch 1 two neighbours must fit together, but they need not be equal: a small one beside a large one.
    - n layers can be cut in 2 ** (n - 1) ways. Try them all, few cuts first, and take the first that fits:
      itertools.combinations gives the places of the cuts.
    """
    units = next(units for units in _cuts(len(sizes)) if max(_held_bytes(units, sizes, prefetch)) <= budget)
    num_bytes = [sum(sizes[index] for index in unit) for unit in units]
    traffic = Traffic.alike(Collective.ALL_GATHER, num_bytes, 2)
    inputs, wanted = (list(sizes), budget, prefetch), {"layers": list(range(len(sizes)))}
    return Case(words, (inputs,) * 2, (wanted,) * 2, traffic, most_peak_bytes=budget)


def _cuts(num_layers: int) -> Iterator[list[range]]:
    """All ways to cut a row of layers, those with few units first."""
    for num_cuts in range(num_layers):
        for cuts in combinations(range(1, num_layers), num_cuts):
            bounds = [0, *cuts, num_layers]
            yield [range(start, stop) for start, stop in pairwise(bounds)]


def _held_bytes(units: Units, sizes: Sequence[int], prefetch: int) -> list[int]:
    """What is gathered at once, while each unit computes: it, and those after it that are on their way."""
    num_bytes = [sum(sizes[index] for index in unit) for unit in units]
    return [sum(num_bytes[place : place + 1 + prefetch]) for place in range(len(units))]


def gather_units(function: Function, comm: Communicator, sizes: Sequence[int], budget: int, prefetch: int) -> Measured:
    """A forward that gathers the learner's units, each in one message."""
    found: Any = function(list(sizes), budget, prefetch)
    try:
        units: list[list[Any]] = [[whole_number(index) for index in unit] for unit in found]
    except TypeError:  # a forgotten return, too
        return Measured({"layers": "no list of lists of indices came back"})
    layers = [index for unit in units for index in unit]
    if layers != list(range(len(sizes))):
        return Measured({"layers": layers})
    for unit in units:
        gathered = torch.zeros(sum(sizes[index] for index in unit), dtype=torch.uint8)
        comm.all_gather(gathered, gathered.chunk(comm.num_ranks)[comm.rank].clone(), tag="unit").wait()
    held = _held_bytes(units, sizes, prefetch)
    return Measured({"layers": layers}, peak_bytes=max(held, default=0), held=tuple(held))


UNITS = Exercise.of(
    "fsdp.units", units_case, "08_fsdp_units", SIZES, attempt=gather_units,
    drawn_words="the layers in the order in which they are gathered",
)  # fmt: skip


# Nothing wrong, inf and NaN on one rank, both signs, no shards, no other element so small, one rank.
UNSCALE_SHARDS: dict[str, tuple[float, list[list[list[float]]]]] = {  # the scale, and what each rank has
    "an inf on rank 1": (1024.0, [[[1024.0]], [[3.0, inf]]]),
    "all are finite": (1024.0, [[[1024.0, 2048.0], [0.0]], [[-512.0]]]),
    "a NaN on rank 0": (1024.0, [[[nan, 1.0], [2.0]], [[1024.0]], [[8.0]]]),
    "+inf and -inf on two ranks": (1024.0, [[[inf]], [[-inf]]]),
    "rank 0 has no shards": (1024.0, [[], [[1024.0], [inf]]]),
    "-inf on rank 0": (256.0, [[[-inf, 1.0]], [[1024.0]]]),
    "1 rank": (512.0, [[[2048.0, -1024.0]]]),
}


def unscale_case(words: str, scale: float, shards: list[list[list[float]]]) -> Case:
    """precision_unscale(comm, shards, scale): undo the scaling of the loss, on all ranks or on none.

    shards is this rank's list of float64 gradients of a loss that was multiplied by scale; it may be empty. If every
    element on every rank is finite, return (the shards divided by scale, scale). If one of them is inf or NaN anywhere,
    all ranks must skip the step and try a smaller scale: return (None, scale / 2) on each. One message of one float64
    number is enough: comm.all_reduce(tensor, reduction="sum" or "max").wait() works in place.

    Hints:
    - tensor.isfinite() is False for inf, -inf and NaN. A rank without shards has found nothing wrong.
    - A rank that skips alone no longer steps with the others. Send 1.0 if something is wrong here.
    - With reduction="max" everybody ends with 1.0 if anybody had it. Do not add up the gradients: inf - inf is NaN.
    """
    tensors = [[torch.tensor(shard, dtype=torch.float64) for shard in of_rank] for of_rank in shards]
    is_finite = all(bool(shard.isfinite().all()) for of_rank in tensors for shard in of_rank)
    num_ranks = len(shards)
    wanted = tuple([[shard / scale for shard in own], scale] if is_finite else [None, scale / 2] for own in tensors)
    traffic = Traffic.alike(Collective.ALL_REDUCE, ONE_NUMBER, num_ranks)
    traffic = replace(traffic, least_bytes=traffic.least_bytes / ONE_NUMBER[0])  # a byte says as much
    return Case(words, tuple((own, scale) for own in tensors), wanted, traffic)


UNSCALE = Exercise.of(
    "precision.unscale", unscale_case, "09_precision_offload_checkpointing", UNSCALE_SHARDS,
    drawn_words="an element of the gradients, if there are any, then the scale",
)  # fmt: skip
