"""Exercise: which layers make a unit, so that what is gathered stays within a budget and few messages are sent.

fsdp_units(sizes, budget, prefetch): which layers make up each unit, as a list of lists of indices.

sizes are the bytes of the layers' weights in the order of forward. A unit is a run of neighbouring layers, gathered in
one message before its first layer computes and freed after its last. With prefetch 0 one unit is gathered at a time,
with prefetch 1 the next one as well, while this one computes. A gathered layer counts whole. Never may more than budget
bytes be gathered, and there must be as few units as possible. There is always a way.

Hints:
- With prefetch 0: go on with the open unit for as long as the next layer fits.
- With prefetch 1 two neighbours must fit together, but they need not be equal: a small one beside a large one.
- n layers can be cut in 2 ** (n - 1) ways. Try them all, few cuts first, and take the first that fits:
  itertools.combinations gives the places of the cuts.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from shardlab.comm import Communicator
from shardlab.course.exercises.exercise import Case, Exercise, Function, Measured, Message, Traffic
from shardlab.vocabulary import Collective

Units = Sequence[Sequence[int]]

SIZES = {  # bytes of each layer, budget, prefetch
    "no prefetch": ([48, 16, 32, 64, 16, 16], 96, 0),
    "no prefetch, one layer fills the budget": ([96, 16, 80], 96, 0),
    "one unit ahead": ([32, 32, 32, 32, 32, 32], 128, 1),
    "one unit ahead, a large layer": ([16, 80, 16, 16, 16, 48], 128, 1),
    "all fit": ([16, 16, 16], 64, 0),
}

STARTER = """def fsdp_units(sizes, budget, prefetch):
    return [[index] for index in range(len(sizes))]  # your code: within the budget, but a message for every layer
"""


def cases() -> list[Case]:
    """Without prefetch a greedy choice is enough; with prefetch, giving each unit half the budget is not."""
    return [_case(words, *layers) for words, layers in SIZES.items()]


def _case(words: str, sizes: Sequence[int], budget: int, prefetch: int) -> Case:
    units = next(units for units in _cuts(len(sizes)) if _peak_bytes(units, sizes, prefetch) <= budget)
    num_bytes = [sum(sizes[index] for index in unit) for unit in units]
    sent = [Message.around_a_ring(Collective.ALL_GATHER, size, 2) for size in num_bytes]
    inputs, wanted = (list(sizes), budget, prefetch), {"layers": list(range(len(sizes)))}
    return Case(words, (inputs,) * 2, (wanted,) * 2, Traffic.of([sent] * 2), most_peak_bytes=budget)


def _cuts(num_layers: int) -> Iterator[list[range]]:
    """All ways to cut a row of layers, those with few units first."""
    for num_cuts in range(num_layers):
        for cuts in combinations(range(1, num_layers), num_cuts):
            bounds = [0, *cuts, num_layers]
            yield [range(start, stop) for start, stop in pairwise(bounds)]


def _peak_bytes(units: Units, sizes: Sequence[int], prefetch: int) -> int:
    """What is gathered at once, at most: a unit and those after it that are on their way."""
    num_bytes = [sum(sizes[index] for index in unit) for unit in units]
    return max((sum(num_bytes[place : place + 1 + prefetch]) for place in range(len(units))), default=0)


def gather_units(function: Function, comm: Communicator, sizes: Sequence[int], budget: int, prefetch: int) -> Measured:
    """A forward that gathers the learner's units, each in one message."""
    found: Any = function(list(sizes), budget, prefetch)
    if found is None:  # a forgotten return
        return Measured(None)
    units = [list(unit) for unit in found]
    layers = [index for unit in units for index in unit]
    if layers != list(range(len(sizes))):
        return Measured({"layers": layers})
    for unit in units:
        gathered = torch.zeros(sum(sizes[index] for index in unit), dtype=torch.uint8)
        comm.all_gather(gathered, gathered.chunk(comm.num_ranks)[comm.rank].clone(), tag="unit").wait()
    return Measured({"layers": layers}, peak_bytes=_peak_bytes(units, sizes, prefetch))


UNITS = Exercise.from_file(
    "fsdp.units", __doc__, STARTER, cases, "08_fsdp_units", num_references=1, num_wrong=5,
    attempt=gather_units, drawn_words="the layers in the order in which they are gathered",
)  # fmt: skip
