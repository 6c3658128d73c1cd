"""Exercise: the smallest bucket whose message is hidden, on a virtual clock.

link_smallest_bucket(layers, latency_us, bytes_per_us): of how many layers a bucket must be.

layers is a list of (time_us, num_bytes) in the order of backward: a layer computes for time_us, and leaves num_bytes of
gradients. A bucket holds k layers, the last bucket what is left. Its message starts as soon as its last layer has
computed and the message before it has ended, and takes latency_us + bytes / bytes_per_us. Return the smallest k with
which no message has to wait for the one before it. (One bucket of all layers always does: it has none before it.)

Hints:
- Go through the buckets with two times: when a bucket is ready, and when the message before it has ended.
- Try k = 1, 2, 3, ... and return the first with which no bucket is ready before the message of the last one ended.
- The last bucket may be smaller: then it is ready sooner, while the message before it may still be out.
"""

from collections.abc import Iterator, Sequence

import torch

from shardlab.comm import Communicator
from shardlab.course.exercises.exercise import Case, Exercise, Function, Measured, Message, Traffic, VirtualClock
from shardlab.course.exercises.values import numbers_in, whole_number
from shardlab.vocabulary import Collective

Layers = Sequence[tuple[float, int]]  # microseconds of backward, bytes of gradients

LINKS: dict[str, tuple[Layers, float, float]] = {  # layers, latency in us, bytes per us
    "only the latency is too long": ([(100, 8)] * 6, 240, 1000),
    "layers that differ": ([(300, 400), (20, 4000), (200, 800), (200, 800), (50, 1600), (250, 400)], 100, 20),
    "8 equal layers": ([(100, 1000)] * 8, 150, 20),
    "a link that keeps up with every layer": ([(100, 800)] * 4, 10, 20),
    "a link that never keeps up": ([(100, 4000)] * 5, 50, 20),
}

STARTER = """def link_smallest_bucket(layers, latency_us, bytes_per_us):
    return 1  # your code: the smallest bucket, but its latency may be longer than a layer computes
"""


def cases() -> list[Case]:
    """Equal layers with a last bucket that is not full, unequal ones, and links that are fast, slow or far."""
    return [_case(words, *link) for words, link in LINKS.items()]


def _case(words: str, layers: Layers, latency_us: float, bytes_per_us: float) -> Case:
    link = (list(layers), latency_us, bytes_per_us)
    best = next(k for k in range(1, len(layers) + 1) if not any(_queued_us(k, *link)))
    sizes = [sum(num_bytes for _, num_bytes in bucket) for bucket in _buckets(best, layers)]
    sent = [Message.around_a_ring(Collective.ALL_REDUCE, size, 2) for size in sizes]
    wanted = {"layers in a bucket": best, "messages wait": _queued_us(best, *link)}
    return Case(words, (link,) * 2, (wanted,) * 2, Traffic.of([sent] * 2))


def _buckets(num_layers: int, layers: Layers) -> Iterator[Layers]:
    return (layers[start : start + num_layers] for start in range(0, len(layers), num_layers))


def _queued_us(num_layers: int, layers: Layers, latency_us: float, bytes_per_us: float) -> list[float]:
    """How long each message waits for the one before it."""
    clock, queued, end_us = VirtualClock(latency_us, bytes_per_us), [], 0.0
    for bucket in _buckets(num_layers, layers):
        clock.compute(sum(time_us for time_us, _ in bucket))
        queued.append(max(0.0, end_us - clock.now_us))
        end_us = clock.send(sum(num_bytes for _, num_bytes in bucket))
    return queued


def backward(
    function: Function, comm: Communicator, layers: Layers, latency_us: float, bytes_per_us: float
) -> Measured:
    """A backward with buckets of as many layers as the learner says: real messages, with the times of the clock."""
    returned = function(list(layers), latency_us, bytes_per_us)
    num_layers = whole_number(returned)
    if num_layers is None or not 1 <= num_layers <= len(layers):
        return Measured({"layers in a bucket": returned, "messages wait": []})
    clock, end_us = VirtualClock(latency_us, bytes_per_us), 0.0
    for bucket in _buckets(num_layers, layers):
        clock.compute(sum(time_us for time_us, _ in bucket))
        gradients = torch.zeros(sum(num_bytes for _, num_bytes in bucket), dtype=torch.uint8)
        end_us = clock.send(gradients.nbytes)
        comm.all_reduce(gradients, tag="bucket").wait()
    clock.wait(end_us)
    queued = _queued_us(num_layers, layers, latency_us, bytes_per_us)
    return Measured({"layers in a bucket": num_layers, "messages wait": queued}, time_us=clock.now_us)


LINK = Exercise.from_file(
    "link.smallest_bucket", __doc__, STARTER, cases, "04_overlap_defined", num_references=1, num_wrong=5,
    attempt=backward, drawn=lambda result: numbers_in(result["messages wait"]),
    drawn_words="how long a message waits for the one before it (us)",
)  # fmt: skip
