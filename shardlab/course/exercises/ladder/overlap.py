"""Exercise: how much of the communication is hidden, from intervals; three definitions in use are wrong.

overlap_exposed(messages, compute, waits): on one rank, the time of communication as (hidden, exposed).

Each argument is a list of (start, end), in any order; intervals of one list may overlap and lie inside each other. A
moment counts once, however many intervals of a list hold it. It is hidden communication if a message is under way and
the rank computes; a rank that waits does not compute, although the span around it is open. Communication that is not
hidden is exposed.

Hints:
- Sort the bounds of all three lists. Between two neighbours nothing begins or ends: look at one moment of each.
- A moment t lies in a list if any(start <= t < end for start, end in intervals).
- hidden: the pieces in messages and in compute and not in waits; exposed: all others in messages.
"""

from collections.abc import Sequence

from shardlab.analysis.intervals import intersect, subtract, total
from shardlab.course.exercises.exercise import Case, Exercise, call_without_ranks

Intervals = Sequence[tuple[float, float]]

INTERVALS: dict[str, tuple[Intervals, Intervals, Intervals]] = {  # messages, compute, waits
    "two messages at once": ([(0, 10), (2, 4)], [(0, 5)], []),
    "a gap in which nothing is sent": ([(0, 4), (16, 20)], [(4, 16)], []),
    "a block inside the model": ([(0, 10), (20, 30)], [(5, 25), (8, 12)], []),
    "compute that waits for the message": ([(0, 10)], [(0, 10)], [(2, 10)]),
    "no compute": ([(0, 10), (5, 12)], [], []),
    "no communication": ([], [(0, 10)], []),
    # No grid of moments holds them all.
    "bounds that are no whole numbers, in any order": ([(3.5, 9.2718), (0.5, 4)], [(6, 8), (1, 3.7321)], [(6.5, 7)]),
}

STARTER = """def overlap_exposed(messages, compute, waits):
    hidden = 0.0  # your code: now everything is exposed, and what overlaps counts twice
    return hidden, sum(end - start for start, end in messages) - hidden
"""


def cases() -> list[Case]:
    """One for each way in which definitions differ."""
    return [Case(words, (lists,), (_wanted(*lists),)) for words, lists in INTERVALS.items()]


def _wanted(messages: Intervals, compute: Intervals, waits: Intervals) -> list[float]:
    hidden = total(intersect(messages, subtract(compute, waits)))
    return [hidden, total(messages) - hidden]


OVERLAP = Exercise.from_file(
    "overlap.exposed", __doc__, STARTER, cases, "04_overlap_defined",
    attempt=call_without_ranks, drawn_words="hidden, then exposed time", num_references=2, num_wrong=5,
)  # fmt: skip
