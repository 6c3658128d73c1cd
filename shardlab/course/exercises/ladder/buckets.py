"""Exercise: which gradients travel in one message.

buckets_assign(sizes, capacity): the indices of the parameters, bucket by bucket, as a list of lists.

sizes are bytes of the gradients in the order in which forward uses the parameters; backward makes the gradients in the
reverse order, and buckets are filled as they come: list them so, also inside a bucket. A bucket is closed when the next
gradient would take it past capacity bytes. A gradient larger than that is alone in its bucket. No bucket is empty.

Hints:
- Go through reversed(range(len(sizes))).
- Keep the bucket that is open and its bytes. Is there none, or would it be too full? Then open a new one.
- With bytes == capacity a bucket is full, not too full: compare with >, after adding.
"""

from collections.abc import Sequence

from shardlab.course.exercises.exercise import Case, Exercise, call_without_ranks
from shardlab.partition.buckets import assign_buckets
from shardlab.partition.flat import ParamSpec

SIZES = {  # bytes of each parameter's gradient, in the order of forward, and of a full bucket
    "four parameters, two buckets": ((40, 60, 70, 30), 100),
    "one parameter is larger than a bucket": ((20, 20, 300, 20), 64),
    "all fit exactly": ((50, 50), 100),
    "the last bucket is not full": ((8, 16, 8, 16, 8), 32),
    "no parameters": ((), 100),
}

STARTER = """def buckets_assign(sizes, capacity):
    return [[index] for index in range(len(sizes))]  # your code: fewer messages
"""


def cases() -> list[Case]:
    """Full, exactly full, half empty, too large, none."""
    return [
        Case(words, ((list(sizes), capacity),), (_wanted(sizes, capacity),))
        for words, (sizes, capacity) in SIZES.items()
    ]


def _wanted(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    specs = [ParamSpec(str(index), (size,), 1) for index, size in enumerate(sizes)]
    return [list(bucket) for bucket in assign_buckets(specs, capacity)]


def bucket_of_each(buckets: list[list[int]]) -> list[float]:
    """The number of the bucket in which each parameter travels, in the order of the parameters."""
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    return [float(bucket_of[index]) for index in sorted(bucket_of)]


BUCKETS = Exercise.from_file(
    "buckets.assign", __doc__, STARTER, cases, "03_data_parallel", num_references=1, num_wrong=5,
    attempt=call_without_ranks, drawn=bucket_of_each, drawn_words="the bucket of a parameter",
)  # fmt: skip
