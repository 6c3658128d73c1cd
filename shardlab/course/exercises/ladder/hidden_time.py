"""Exercises of notebooks 04 and 05: what is hidden, by which bucket, and from which batch on a second rank pays off."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlab.analysis.intervals import intersect, subtract, total
from shardlab.comm import Communicator

from shardlab.course.exercises.exercise import (  # isort: skip
    Case, Exercise, Function, Measured, Traffic, VirtualClock, call_without_ranks,
)  # fmt: skip
from shardlab.course.exercises.values import numbers_in, whole_number
from shardlab.vocabulary import Collective

Intervals = Sequence[tuple[float, float]]

# One for each way in which definitions differ.
INTERVALS: dict[str, tuple[Intervals, Intervals, Intervals]] = {  # messages, compute, waits
    "two messages at once": ([(0, 10), (2, 4)], [(0, 5)], []),
    "compute that begins late": ([(0, 10)], [(4, 7)], []),
    "a gap in which nothing is sent": ([(0, 4), (16, 20)], [(4, 16)], []),
    "a block inside the model": ([(0, 10), (20, 30)], [(5, 25), (8, 12)], []),
    "compute that waits for the message": ([(0, 10)], [(0, 10)], [(2, 10)]),
    "no compute": ([(0, 10), (5, 12)], [], []),
    "no communication": ([], [(0, 10)], []),
    "a wait that is longer than the message": ([(0, 4)], [(0, 10)], [(3, 6)]),
    # No grid of moments holds them all.
    "bounds that are no whole numbers, in any order": ([(3.5, 9.2718), (0.5, 4)], [(6, 8), (1, 3.7321)], [(6.5, 7)]),
}


def overlap_case(words: str, messages: Intervals, compute: Intervals, waits: Intervals) -> Case:
    """overlap_exposed(messages, compute, waits): on one rank, the time of communication as (hidden, exposed).

    Each argument is a list of (start, end), in any order; intervals of one list may overlap and lie inside each other.
    A moment counts once, however many intervals of a list hold it. It is hidden communication if a message is under way
    and the rank computes; a rank that waits does not compute, although the span around it is open. Communication that
    is not hidden is exposed.

    Hints:
    - Sort the bounds of all three lists. Between two neighbours nothing begins or ends: look at one moment of each.
    - A moment t lies in a list if any(start <= t < end for start, end in intervals).
    - hidden: the pieces in messages and in compute and not in waits; exposed: all others in messages.
    """
    hidden = total(intersect(messages, subtract(compute, waits)))
    return Case(words, ((messages, compute, waits),), ([hidden, total(messages) - hidden],))


OVERLAP = Exercise.of(
    "overlap.exposed", overlap_case, "04_overlap_defined", INTERVALS, attempt=call_without_ranks,
    drawn_words="hidden, then exposed time",
)  # fmt: skip


Layers = Sequence[tuple[float, int]]  # microseconds of backward, bytes of gradients

# Equal layers with a last bucket that is not full, unequal ones, links that are fast, slow or far, and no slack.
LINKS: dict[str, tuple[Layers, float, float]] = {  # layers, latency in us, bytes per us
    "only the latency is too long": ([(100, 8)] * 6, 240, 1000),
    "layers that differ": ([(300, 400), (20, 4000), (200, 800), (200, 800), (50, 1600), (250, 400)], 100, 20),
    "8 equal layers": ([(100, 1000)] * 8, 150, 20),
    "a link that keeps up with every layer": ([(100, 800)] * 4, 10, 20),
    "a link that never keeps up": ([(100, 4000)] * 5, 50, 20),
    "a message ends as the next is ready": ([(100, 4000), (100, 1600), (200, 1600), (100, 800), (300, 1600)], 20, 20),
}


def link_case(words: str, layers: Layers, latency_us: float, bytes_per_us: float) -> Case:
    """link_smallest_bucket(layers, latency_us, bytes_per_us): of how many layers a bucket must be.

    layers is a list of (time_us, num_bytes) in the order of backward: a layer computes for time_us, and leaves
    num_bytes of gradients. A bucket holds k layers, the last bucket what is left. Its message, of one hop, starts as
    soon as its last layer has computed and the message before it has ended, and takes latency_us + bytes /
    bytes_per_us. Return the smallest k with which no message has to wait for the one before it. (One bucket of all
    layers always does: it has none before it.)

    Hints:
    - Go through the buckets with two times: when a bucket is ready, and when the message before it has ended.
    - Try k = 1, 2, 3, ... and return the first with which no bucket is ready before the message of the last one ended.
    - The last bucket may be smaller: then it is ready sooner, while the message before it may still be out.
    """
    link = (list(layers), latency_us, bytes_per_us)
    best = next(k for k in range(1, len(layers) + 1) if not any(_played(k, *link)[0]))
    sizes = list[int]()
    wanted = {"layers in a bucket": best, "messages wait": _played(best, *link, sizes.append)[0]}
    return Case(words, (link,) * 2, (wanted,) * 2, Traffic.alike(Collective.ALL_REDUCE, sizes, 2))


def _played(
    num_layers: int, layers: Layers, latency_us: float, bytes_per_us: float, send: Callable[[int], object] = id
) -> tuple[list[float], float]:
    """How long each message waits for the one before it, and what backward takes; ``send`` gets the bytes of each."""
    clock, queued, end_us = VirtualClock(latency_us, bytes_per_us), [], 0.0
    for start in range(0, len(layers), num_layers):
        times_us, sizes = zip(*layers[start : start + num_layers], strict=True)
        clock.compute(sum(times_us))
        queued.append(max(0.0, end_us - clock.now_us))
        end_us = clock.send(sum(sizes))
        send(sum(sizes))
    clock.wait(end_us)
    return queued, clock.now_us


def backward(
    function: Function, comm: Communicator, layers: Layers, latency_us: float, bytes_per_us: float
) -> Measured:
    """A backward with buckets of as many layers as the learner says: real messages, with the times of the clock."""
    returned = function(list(layers), latency_us, bytes_per_us)
    num_layers = whole_number(returned)
    if num_layers is None or not 1 <= num_layers <= len(layers):
        return Measured({"layers in a bucket": returned, "messages wait": []})

    def send(num_bytes: int) -> None:
        comm.all_reduce(torch.zeros(num_bytes, dtype=torch.uint8), tag="bucket").wait()

    queued, time_us = _played(num_layers, layers, latency_us, bytes_per_us, send)
    return Measured({"layers in a bucket": num_layers, "messages wait": queued}, time_us=time_us)


LINK = Exercise.of(
    "link.smallest_bucket", link_case, "04_overlap_defined", LINKS, attempt=backward,
    drawn=lambda result: numbers_in(result["messages wait"]),
    drawn_words="how long a message waits for the one before it (us)",
)  # fmt: skip


Step = tuple[float, float, list[int], float, float]  # us without rows, us a row, bytes, latency, bytes a us

MOST_ROWS = 10_000
# Nothing to hide, something, a queue, a tie, many small messages, and much that does not depend on rows.
STEPS: dict[str, Step] = {
    "one bucket": (100, 50, [4000], 20, 2),
    "four buckets": (100, 50, [1000] * 4, 20, 2),
    "messages that queue": (30, 20, [8000, 400, 400, 400], 10, 4),
    "exactly as fast with 3 rows": (0, 100, [600], 0, 2),
    "only latency": (300, 10, [4] * 40, 50, 100),
    "one row is enough": (500, 5, [100], 10, 10),
}


def break_even_case(words: str, *step: Any) -> Case:
    """scaling_break_even(fixed_us, row_us, sizes, latency_us, bytes_per_us): the fewest rows that two ranks need.

    With b rows a rank computes for fixed_us + b * row_us in a step; the first third is forward, the rest backward.
    Backward makes gradients at an even rate: when a part of all bytes is there, the same part of backward has passed.
    They fill buckets of sizes[0], sizes[1], ... bytes. A bucket's message, of one hop, starts when it is full and the
    message before it has ended, and takes latency_us + bytes / bytes_per_us. The step of two ranks is over when compute
    and the last message are, and has trained 2b rows; one rank sends nothing and trains b. Return the smallest b >= 1
    with which two ranks train more rows a second than one. There is one.

    Hints:
    - Two are faster than one if the step of two is shorter than 2 * (fixed_us + b * row_us). Try b = 1, 2, 3, ...
    - Go through the buckets with two numbers: how many bytes are full, and when the message before has ended.
    - A bucket is full at compute / 3 + compute * 2 / 3 * (bytes so far) / (all bytes).
    """
    return Case(words, (step,), (_found(_fewest(step), step).result,))


def _fewest(step: Step) -> int:
    return next(rows for rows in range(1, MOST_ROWS) if _gain(rows, step) > 1)


def _gain(rows: int, step: Step) -> float:
    """Rows a second of two ranks over those of one."""
    fixed_us, row_us, *_ = step
    return 2 * (fixed_us + rows * row_us) / _step_us(rows, step)


def _step_us(rows: int, step: Step) -> float:
    fixed_us, row_us, sizes, latency_us, bytes_per_us = step
    clock, compute_us, end_us = VirtualClock(latency_us, bytes_per_us), fixed_us + rows * row_us, 0.0
    clock.compute(compute_us / 3)
    for num_bytes in sizes:
        clock.compute(compute_us * 2 / 3 * num_bytes / sum(sizes))
        end_us = clock.send(num_bytes)
    clock.wait(end_us)
    return clock.now_us


def _found(rows: int, step: Step) -> Measured:
    gains = {"gain": _gain(rows, step), "gain with a row less": _gain(rows - 1, step) if rows > 1 else 0.0}
    return Measured({"rows": rows, **gains}, time_us=_step_us(rows, step))


def play(function: Function, _comm: Communicator, *step: Any) -> Measured:
    """The step of two ranks with as many rows as the learner says; what is no number of rows is compared as it is."""
    returned = function(*step)
    rows = whole_number(returned)
    if rows is None or not 1 <= rows < MOST_ROWS:
        return Measured({"rows": returned, "gain": None, "gain with a row less": None})
    return _found(rows, step)


BREAK_EVEN = Exercise.of(
    "scaling.break_even", break_even_case, "05_why_are_two_slower_than_one", STEPS, attempt=play,
    drawn=lambda result: [result["gain"], result["gain with a row less"]],
    drawn_words="rows a second of two ranks over one: with these rows, and with a row less",
)  # fmt: skip
