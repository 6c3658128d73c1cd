"""Exercises of notebooks 06, 07 and 12: who owns which elements, when they are gathered, and who reads them again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.comm import Communicator, Pending

from shardlab.course.exercises.exercise import (  # isort: skip
    Case, Exercise, Function, Measured, Traffic, VirtualClock, call_without_ranks,
)  # fmt: skip
from shardlab.course.exercises.values import numbers_in, plain, whole_number
from shardlab.partition.chunks import ParamSpec
from shardlab.partition.flat import flat_layout
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.vocabulary import Collective

# Borders inside and between parameters, a rank without anything, an empty parameter, one rank.
OWNERS_SIZES = {
    "3 ranks, sizes that do not divide": (3, {"weight": 7, "bias": 3, "scale": 1, "head": 8}),
    "4 ranks, 5 elements": (4, {"weight": 5}),
    "2 ranks, a parameter without elements": (2, {"weight": 4, "empty": 0, "bias": 4}),
    "1 rank": (1, {"weight": 3, "bias": 1}),
}


def owners_case(words: str, num_ranks: int, sizes: dict[str, int]) -> Case:
    """zero1_owners(sizes, num_ranks, rank): the ranges that rank owns, as {name: (start, stop)}.

    sizes is {name: number of elements}. The parameters lie end to end in this order, and every rank owns an equal chunk
    of ceil(total / num_ranks) elements of that line; the last ones may own fewer, or none. start and stop count within
    the parameter. A parameter of which the rank owns nothing is left out. The check then lets every rank step the
    ranges that it owns: each element must be stepped by exactly one ("ranks that step" counts them).

    Hints:
    - The chunk of a rank is rank * size to (rank + 1) * size on the line, with size = -(-total // num_ranks).
    - Walk along the line with an offset: a parameter lies at offset to offset + numel.
    - What two ranges share is max(starts) to min(stops), if the first is smaller; subtract the offset.
    """
    return Case(words, ((sizes,),) * num_ranks, tuple(_wanted(sizes, num_ranks, rank) for rank in range(num_ranks)))


def _wanted(sizes: Mapping[str, int], num_ranks: int, rank: int) -> dict[str, object]:
    layout = flat_layout([ParamSpec(name, (size,), 1) for name, size in sizes.items()], num_ranks)
    ranges = {piece.name: (piece.param_start, piece.param_stop) for piece in layout.pieces(rank)}
    held = _held(ranges, sizes)
    return {"ranges": ranges, "held": held, "ranks that step": torch.ones_like(held)}


def step_what_is_owned(function: Function, comm: Communicator, sizes: Mapping[str, int]) -> dict[str, object]:
    """Every rank steps what its ranges say; counted over the ranks, each element must have been stepped once."""
    ranges = function(dict(sizes), comm.num_ranks, comm.rank)
    held = _held(ranges if isinstance(ranges, Mapping) else {}, sizes)
    steps = held.clone()
    comm.all_reduce(steps, tag="ranks that step").wait()
    return {"ranges": ranges, "held": held, "ranks that step": steps}


def _held(ranges: Mapping[str, Any], sizes: Mapping[str, int]) -> Tensor:
    """1 for each element of the line that is in a range, else 0; what is no range holds nothing."""
    whole = {name: torch.zeros(size, dtype=torch.float32) for name, size in sizes.items()}  # whatever the default is
    for name in ranges.keys() & whole.keys():
        pair = plain(ranges[name])
        pair = pair.tolist() if isinstance(pair, Tensor) else pair
        bounds = [whole_number(bound) for bound in pair] if isinstance(pair, list) else []
        if len(bounds) == 2 and None not in bounds:
            whole[name][slice(*bounds)] = 1
    return torch.cat(list(whole.values()))


OWNERS = Exercise.of(
    "zero1.owners", owners_case, "06_zero_1_and_2", OWNERS_SIZES, attempt=step_what_is_owned,
    drawn=lambda result: result["held"].tolist(), drawn_words="an element, 1 where the rank owns it",
)  # fmt: skip


NUMEL = 12  # of a unit: divides by 1, 2 and 3
USE_US, LATENCY_US, BYTES_PER_US = 100, 40, 2  # on the virtual clock a unit is used for longer than a gather takes
# Several units, two, one and none.
ZERO3_SIZES = {
    "2 ranks, 4 units": (2, 4),
    "3 ranks, 2 units": (3, 2),
    "2 ranks, 1 unit": (2, 1),
    "2 ranks, no units": (2, 0),
}


class Unit:
    """A vector of weights of which each rank holds a shard; what is done with it is written down in ``events``."""

    def __init__(self, comm: Communicator, number: int, events: list[str], clock: VirtualClock) -> None:
        self._comm, self._number, self._events, self._clock = comm, number, events, clock
        self._shard = weights(number).chunk(comm.num_ranks)[comm.rank].clone()
        self._gathered: Tensor | None = None
        self._pending, self._end_us = Pending(), 0.0

    def gather(self) -> None:
        """Start to gather the weights."""
        self._events.append(f"gather {self._number}")
        self._gathered = torch.zeros(NUMEL, dtype=torch.float64)
        self._pending = self._comm.all_gather(self._gathered, self._shard, tag=f"unit {self._number}")
        sent = ring_wire_bytes(Collective.ALL_GATHER, self._gathered.nbytes, self._comm.num_ranks)
        self._end_us = self._clock.send(sent)

    def use(self, x: Tensor) -> Tensor:
        """The unit's output; waits for the weights.

        Raises:
            RuntimeError: they are not gathered.
        """
        self._events.append(f"use {self._number}")
        if self._gathered is None:
            raise RuntimeError(f"unit {self._number} is used, but it is not gathered")
        self._pending.wait()
        self._clock.wait(self._end_us)
        self._clock.compute(USE_US)
        return x * self._gathered + 1

    def free(self) -> None:
        """Give the gathered weights up."""
        self._events.append(f"free {self._number}")
        self._pending.wait()
        self._gathered = None


def weights(number: int) -> Tensor:
    """The whole weights of a unit."""
    return torch.arange(NUMEL, dtype=torch.float64) / NUMEL + number


def zero3_case(words: str, num_ranks: int, num_units: int) -> Case:
    """zero3_forward(units, x): send x through all units in order and return it.

    Every rank holds a shard of each unit. unit.gather() starts to gather its weights, unit.use(x) waits for them and
    returns the unit's output, unit.free() gives the gathered weights up. While a unit is used, the next one must be on
    its way, and at no moment may more than two units be gathered. At the end none is. (On the virtual clock a unit is
    used for 100 us, and a gather takes 40 us and 1 us for every 2 bytes that a rank sends: with one unit ahead only the
    first gather is waited for.)

    Hints:
    - Begin with the first unit, before the loop, if there is one.
    - In the loop: start the next unit if there is one, then use this one, then free it.
    - The third unit may start only when the first one is freed: after free(), before the second one is used.
    """
    inputs = [torch.linspace(-1, 1, NUMEL, dtype=torch.float64) + rank for rank in range(num_ranks)]
    traffic = Traffic.alike(Collective.ALL_GATHER, [NUMEL * 8] * num_units, num_ranks)
    events = _events(num_units)
    wanted = tuple({"events": events, "output": _output(x, num_units)} for x in inputs)
    return Case(words, tuple((num_units, x) for x in inputs), wanted, traffic)


def _events(num_units: int) -> list[str]:
    """The only order that is a unit ahead and never has more than two: gather 0, gather 1, use 0, free 0, gather 2."""
    events = ["gather 0"] if num_units else []
    for number in range(num_units):
        ahead = [f"gather {number + 1}"] if number + 1 < num_units else []
        events += [*ahead, f"use {number}", f"free {number}"]
    return events


def _output(x: Tensor, num_units: int) -> Tensor:
    for number in range(num_units):
        x = x * weights(number) + 1
    return x


def forward(function: Function, comm: Communicator, num_units: int, x: Tensor) -> Measured:
    """Run the learner's forward through units that log what is done with them."""
    events, clock = list[str](), VirtualClock(LATENCY_US, BYTES_PER_US)
    output = function([Unit(comm, number, events, clock) for number in range(num_units)], x)
    peak_bytes = max(_gathered_after_each(events), default=0) * NUMEL * x.element_size()
    return Measured({"events": events, "output": output}, peak_bytes, clock.now_us)


def _gathered_after_each(events: Sequence[str]) -> list[float]:
    gathered: set[str] = set()
    counts = []
    for event in events:
        verb, _, number = event.partition(" ")
        gathered = gathered | {number} if verb == "gather" else gathered - {number} if verb == "free" else gathered
        counts.append(float(len(gathered)))
    return counts


ZERO3 = Exercise.of(
    "zero3.forward", zero3_case, "07_zero_3", ZERO3_SIZES, attempt=forward,
    drawn=lambda result: _gathered_after_each(result["events"]),
    drawn_words="the number of gathered units after an event",
)  # fmt: skip


Saved = dict[str, tuple[int, Tensor]]

RESHARD_SIZES = {"weight": 7, "bias": 3, "scale": 1, "head": 8}
FEW = {"weight": 4, "bias": 1}  # too few for all of four ranks
# Fewer ranks, one, more ranks, the same number, another order; one input for each new rank.
CASES = {  # the ranks that saved, in the order of saved, and how many read
    "4 to 3": (range(4), 3, RESHARD_SIZES),
    "3 to 1": (range(3), 1, RESHARD_SIZES),
    "1 to 4": (range(1), 4, RESHARD_SIZES),
    "2 to 2": (range(2), 2, RESHARD_SIZES),
    "4 to 2, the last saved first": (range(3, -1, -1), 2, FEW),
    "2 to 4, with a rank that holds nothing": (range(2), 4, FEW),
}


def reshard_case(words: str, before: range, after: int, sizes: Mapping[str, int]) -> Case:
    """checkpoint_reshard(saved, sizes, num_ranks, rank): what rank holds of a checkpoint that others have saved.

    saved has a dict for each rank that saved, in any order: {name: (start, values)}, where values are the elements of
    the parameter from start on. sizes is {name: number of elements} of the whole parameters, in order. Return the same
    kind of dict for one of num_ranks new ranks: the parameters lie end to end, and every rank holds an equal chunk of
    ceil(total / num_ranks) elements, as in zero1.owners. Parameters of which the rank holds nothing are left out.

    Hints:
    - Your zero1_owners(sizes, num_ranks, rank) of notebook 06 says which ranges the new rank holds: copy it over.
    - Each of these ranges may lie in several of the old dicts: take what each of them shares with it.
    - Make an empty vector of the range, and copy every shared part to its place, minus the range's start.
    """
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


RESHARD = Exercise.of(
    "checkpoint.reshard", reshard_case, "12_checkpoints_that_reshard", CASES, attempt=call_without_ranks,
    drawn=lambda result: numbers_in([values for _, values in result.values()]),
    drawn_words="an element that the rank holds",
    shown_inputs=lambda saved, sizes, num_ranks, rank: f"{_ranges_in(saved)}; {sizes}; {num_ranks}; {rank}",
)  # fmt: skip
