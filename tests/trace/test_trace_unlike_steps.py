"""Which steps are traced for being unlike all that were: of random, growing and mixed shapes."""

import random

import pytest
import torch

from shardlab.trace.unlike_steps import EVERY, MOST_AT_ONCE, UnlikeSteps, within


def traced(steps, settled=2):
    """Which of the steps are traced, and the last whose peak is not known; each step is a list of shapes."""
    unlike, found, missed = UnlikeSteps(), [], None
    for step, calls in enumerate(steps):
        unlike.begin(step)
        is_traced = step == settled
        if is_traced:
            unlike.forget_traced()
        for shape in calls:
            if unlike.add("batch", [torch.empty(shape, device="meta")]) and not is_traced:
                is_traced = True
                unlike.trace()
        missed = unlike.end(traced=is_traced)
        found += [step] if is_traced else []
    return found, missed


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([8] * 40, [0, 2]),
        ([8] * 20 + [9] + [8] * 20, [0, 2, 20]),
        ([9] + [8] * 20 + [9], [0, 2, 21]),  # state was missing in the first
        ([8, 8, 9, 8, 7, 8], [0, 2, 3]),  # one that is smaller shows that steps differ
    ],
)
def test_steps_of_new_lengths_are_traced(lengths, expected):
    assert traced([[(4, length)] for length in lengths]) == (expected, None)


def test_no_dim_of_any_batch_goes_unseen():
    square, tall, wide = (8, 8), (64, 1), (1, 64)
    assert traced([[square]] * 3 + [[tall], [wide], [square]]) == ([0, 2, 3, 4], None)
    assert traced([[square, square]] * 4 + [[square, wide]]) == ([0, 2, 4], None)
    assert traced([[square]] * 3 + [[square, square]]) == ([0, 2, 3], None)
    assert not within(((8, 8),), ((8, 8, 8),))


def test_random_lengths_trace_few_steps_and_growing_ones_say_what_was_missed():
    draw = random.Random(0)
    steps = [[(4, draw.randrange(1, 10_000))] for _ in range(1000)]
    found, missed = traced(steps)
    assert len(found) < 20
    longest = max(range(3, 1000), key=lambda step: steps[step][0][1])
    assert longest in found
    assert missed is None
    found, missed = traced([[(4, step + 1)] for step in range(1001)])
    assert len(found) <= 2 + MOST_AT_ONCE + 1001 // EVERY
    assert missed == 1000
