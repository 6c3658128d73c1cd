"""Exercise: gather, use and free the units of a ZeRO-3 forward, one unit ahead.

zero3_forward(units, x): send x through all units in order and return it.

Every rank holds a shard of each unit. unit.gather() starts to gather its weights, unit.use(x) waits for them and
returns the unit's output, unit.free() gives the gathered weights up. While a unit is used, the next one must be on
its way, and never may more than two units be gathered at once. At the end none is. (On the virtual clock a unit is
used for 100 us, and a gather takes 40 us and 1 us for every 2 bytes that a rank sends: with one unit ahead only the
first gather is waited for.)

Hints:
- Begin with the first unit, before the loop, if there is one.
- In the loop: start the next unit if there is one, then use this one, then free it.
- The third unit may start only when the first one is freed: after free(), before the second one is used.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.comm import Communicator, Pending
from shardlab.course.exercises.exercise import Case, Exercise, Function, Measured, Message, Traffic, VirtualClock
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.vocabulary import Collective

NUMEL = 12  # of a unit: divides by 1, 2 and 3
USE_US, LATENCY_US, BYTES_PER_US = 100, 40, 2  # on the virtual clock a unit is used for longer than a gather takes
SIZES = {"2 ranks, 4 units": (2, 4), "3 ranks, 2 units": (3, 2), "2 ranks, 1 unit": (2, 1), "2 ranks, no units": (2, 0)}

STARTER = """def zero3_forward(units, x):
    for unit in units:
        unit.gather()
    for unit in units:
        x = unit.use(x)  # your code: now all units are gathered at once, and none is freed
    return x
"""


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


def cases() -> list[Case]:
    """Several units, two, one and none."""
    return [_case(words, *sizes) for words, sizes in SIZES.items()]


def _case(words: str, num_ranks: int, num_units: int) -> Case:
    inputs = [torch.linspace(-1, 1, NUMEL, dtype=torch.float64) + rank for rank in range(num_ranks)]
    message = Message.around_a_ring(Collective.ALL_GATHER, NUMEL * 8, num_ranks)
    traffic = Traffic.of([[message] * num_units] * num_ranks)
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


ZERO3 = Exercise.from_file(
    "zero3.forward", __doc__, STARTER, cases, "07_zero_3", num_references=1, num_wrong=5,
    attempt=forward, drawn=lambda result: _gathered_after_each(result["events"]),
    drawn_words="the number of gathered units after an event",
)  # fmt: skip
