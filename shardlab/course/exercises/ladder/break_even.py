"""Exercise: the fewest rows with which two ranks do more than one, on a virtual clock.

scaling_break_even(fixed_us, row_us, sizes, latency_us, bytes_per_us): the fewest rows that two ranks need.

With b rows a rank computes for fixed_us + b * row_us in a step; the first third is forward, the rest backward. Backward
makes gradients at an even rate: when a part of all bytes is there, the same part of backward has passed. They fill
buckets of sizes[0], sizes[1], ... bytes. A bucket's message starts when it is full and the message before it has ended,
and takes latency_us + bytes / bytes_per_us. The step of two ranks is over when compute and the last message are, and
has trained 2b rows; one rank sends nothing and trains b. Return the smallest b >= 1 with which two ranks train more
rows a second than one. There is one.

Hints:
- Two are faster than one if the step of two is shorter than 2 * (fixed_us + b * row_us). Try b = 1, 2, 3, ...
- Go through the buckets with two numbers: how many bytes are full, and when the message before has ended.
- A bucket is full at compute / 3 + compute * 2 / 3 * (bytes so far) / (all bytes).
"""

from typing import Any

from shardlab.comm import Communicator
from shardlab.course.exercises.exercise import Case, Exercise, Function, Measured, VirtualClock
from shardlab.course.exercises.values import whole_number

Step = tuple[float, float, list[int], float, float]  # us without rows, us a row, bytes, latency, bytes a us

MOST_ROWS = 10_000
STEPS: dict[str, Step] = {
    "one bucket": (100, 50, [4000], 20, 2),
    "four buckets": (100, 50, [1000] * 4, 20, 2),
    "messages that queue": (30, 20, [8000, 400, 400, 400], 10, 4),
    "exactly as fast with 3 rows": (0, 100, [600], 0, 2),
    "only latency": (300, 10, [4] * 40, 50, 100),
    "one row is enough": (500, 5, [100], 10, 10),
}

STARTER = """def scaling_break_even(fixed_us, row_us, sizes, latency_us, bytes_per_us):
    return 1  # your code: with few rows two ranks wait for messages longer than they gain
"""


def cases() -> list[Case]:
    """Nothing to hide, something, a queue, a tie, many small messages, and much that does not depend on rows."""
    return [Case(words, (step,), (_found(_fewest(step), step).result,)) for words, step in STEPS.items()]


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


BREAK_EVEN = Exercise.from_file(
    "scaling.break_even", __doc__, STARTER, cases, "05_why_are_two_slower_than_one", num_references=1, num_wrong=5,
    attempt=play, drawn=lambda result: [result["gain"], result["gain with a row less"]],
    drawn_words="rows a second of two ranks over one: with these rows, and with a row less",
)  # fmt: skip
