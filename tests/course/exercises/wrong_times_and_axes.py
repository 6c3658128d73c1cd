"""Wrong answers: definitions of overlap, buckets on a link, units under a budget, layers divided, two axes."""

from functools import partial

import torch

from tests.course.exercises.right import (  # isort: skip
    right_break_even, right_column_row, right_finish, right_link, right_merge, right_overlap, right_parts,
    right_schedule, right_units, right_unscale, right_who_reduces,
)  # fmt: skip


def every_pair(messages, compute, waits):
    """What overlaps twice counts twice."""
    both = sum(max(0, min(b, d) - max(a, c)) for a, b in messages for c, d in compute)
    return both, right_overlap(messages, [], [])[1] - both


def waits_compute(messages, compute, waits):
    """A span is open, so it counts as compute, also while it waits."""
    return right_overlap(messages, compute, [])


def first_to_last(messages, compute, waits):
    """Communication lasts from the first message to the last, gaps included."""
    if not messages:
        return 0.0, 0.0
    return right_overlap([(min(messages)[0], max(end for _, end in messages))], compute, waits)


def lengths_alone(messages, compute, waits):
    """As much is hidden as there is compute, wherever it lies."""
    sent, computed = (sum(right_overlap(each, [], [])) for each in (messages, compute))
    return min(sent, computed), max(0, sent - computed)


def share_in_place_of_a_time(messages, compute, waits):
    hidden, exposed = right_overlap(messages, compute, waits)
    return hidden / (hidden + exposed), exposed


def exchanged(messages, compute, waits):
    return right_overlap(messages, compute, waits)[::-1]


def all_waits_taken_off(messages, compute, waits):
    """Also those in which nothing is sent."""
    hidden, exposed = right_overlap(messages, compute, [])
    waited = sum(right_overlap(waits, [], []))
    return hidden - waited, exposed + waited


def latency_forgotten(layers, latency_us, bytes_per_us):
    return right_link(layers, 0, bytes_per_us)


def on_average(layers, latency_us, bytes_per_us):
    time, size = (sum(each) / len(layers) for each in zip(*layers, strict=True))
    ways = range(1, len(layers))
    return next((k for k in ways if latency_us + k * size / bytes_per_us <= k * time), len(layers))


def last_bucket_forgotten(layers, latency_us, bytes_per_us):
    """Looks at full buckets only."""

    def keeps_up(k):
        buckets = [layers[start : start + k] for start in range(0, len(layers) - k + 1, k)]
        sends = (latency_us + sum(size for _, size in bucket) / bytes_per_us for bucket in buckets)
        return all(sent <= sum(time for time, _ in bucket) for sent, bucket in zip(sends, buckets[1:], strict=False))

    return next(k for k in range(1, len(layers) + 1) if keeps_up(k))


def all_in_one(layers, latency_us, bytes_per_us):
    return len(layers)


def may_not_end_at_once(layers, latency_us, bytes_per_us):
    return right_link(layers, latency_us + 1e-6, bytes_per_us)


def divisors_alone(layers, latency_us, bytes_per_us):
    return next(k for k in range(right_link(layers, latency_us, bytes_per_us), len(layers) + 1) if len(layers) % k == 0)


def last_layer_first(layers, latency_us, bytes_per_us):
    return right_link(layers[::-1], latency_us, bytes_per_us)


def none_hides(layers, latency_us, bytes_per_us):
    found = right_link(layers, latency_us, bytes_per_us)
    return found if found < len(layers) else None


def one_for_each_layer(sizes, budget, prefetch):
    return [[index] for index in range(len(sizes))]


def prefetch_forgotten(sizes, budget, prefetch):
    return right_units(sizes, budget, 0)


def half_the_budget_each(sizes, budget, prefetch):
    return right_units(sizes, max(budget // (1 + prefetch), max(sizes)), 0)


def never_full(sizes, budget, prefetch):
    return right_units(sizes, max(budget - 1, *sizes), prefetch)


def first_layers_alone(sizes, budget, prefetch):
    return [unit[0] for unit in right_units(sizes, budget, prefetch)]


def by_size(sizes, budget, prefetch):
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    return [[order[index] for index in unit] for unit in right_units(sorted(sizes), max(budget, *sizes), 0)]


bias_on_every_rank = partial(right_column_row, early_bias=0.0)
gradient_of_x_in_terms = partial(right_column_row, sums_x=False)
relu_forgotten_in_backward = partial(right_column_row, mask=False)
bias_gradient_summed = partial(right_column_row, sums_bias=True)


def features_gathered(comm, x, weights, grad):
    """Gathers a part of the first bias too: right, and not what was asked."""
    comm.all_gather(torch.zeros(6, dtype=torch.float64), weights["column_bias"]).wait()
    return right_column_row(comm, x, weights, grad)


def weights_reduced_too(comm, x, weights, grad):
    found = right_column_row(comm, x, weights, grad)
    before = found["column"].clone()
    comm.all_reduce(before).wait()
    return found


def over_all_ranks(mesh, parts):
    mesh["data"].all_reduce(parts["output"]).wait()
    return right_who_reduces(mesh, parts)


divided_by_all = partial(right_who_reduces, divisor=4)
whole_counted_twice = partial(right_who_reduces, counts_whole_twice=True)


def axes_exchanged(mesh, parts):
    return right_who_reduces({"data": mesh["tensor"], "tensor": mesh["data"]}, parts)


def whole_over_both(mesh, parts):
    mesh["tensor"].all_reduce(parts["whole"]).wait()
    parts["whole"] /= mesh["tensor"].num_ranks
    return right_who_reduces(mesh, parts)


def norm_of_this_rank(mesh, parts):
    tensor = mesh["tensor"]
    found = right_who_reduces({"data": mesh["data"], "tensor": tensor}, parts)
    return {**found, "norm": (parts["slice"].square().sum() + parts["whole"].square().sum()).sqrt()}


def backward_first(num_ranks, num_micro_batches, rank):
    return right_schedule(num_ranks, num_micro_batches, rank)[::-1]


def loses_the_last_batch(num_ranks, num_micro_batches, rank):
    return right_schedule(num_ranks, num_micro_batches - 1, rank)


def forgets_a_backward(num_ranks, num_micro_batches, rank):
    return right_schedule(num_ranks, num_micro_batches, rank)[:-1]


def waits_for_ever(num_ranks, num_micro_batches, rank):
    """As the last rank does it, on all: it waits for a gradient of what it has not sent on."""
    if rank == num_ranks - 1:
        return all_forwards_first(num_ranks, num_micro_batches, rank)
    return [f"{rank}{kind}{number}" for number in range(num_micro_batches) for kind in "FB"]


def all_forwards_first(num_ranks, num_micro_batches, rank):
    return [f"{rank}{kind}{number}" for kind in "FB" for number in range(num_micro_batches)]


no_mean = partial(right_finish, divisor=1)
norm_of_one_stage = partial(right_finish, adds_up=False)
sum_of_stages_norms = partial(right_finish, of_norms=True)
mean_over_stages = partial(right_finish, divisor=2)
nothing_hides = partial(right_break_even, hides=0)
forward_hides_too = partial(right_break_even, hides=1)
messages_at_once = partial(right_break_even, queues=False)
as_fast_is_enough = partial(right_break_even, wins=lambda two, one: two <= one)
as_fast_as_one_step = partial(right_break_even, wins=lambda two, one: two < 1.1 * one / 2)
asks_nobody = partial(right_unscale, asks=False)
nan_overlooked = partial(right_unscale, is_right=lambda shard: not shard.isinf().any())
scale_kept = partial(right_unscale, backoff=1)


def first_shard_only(comm, shards, scale):
    right = all(shard.isfinite().all() for shard in shards[:1])
    wrong = torch.tensor([float(not right)], dtype=torch.float64)
    comm.all_reduce(wrong, reduction="max").wait()
    return (None, scale / 2) if wrong.item() else ([shard / scale for shard in shards], scale)


def largest_alone(comm, shards, scale):
    """Minus infinity is never the largest."""
    largest = torch.tensor([max((shard.max().item() for shard in shards), default=0.0)], dtype=torch.float64)
    is_wrong = (~largest.isfinite()).double()
    comm.all_reduce(is_wrong, reduction="max").wait()
    return (None, scale / 2) if is_wrong else ([shard / scale for shard in shards], scale)


def scale_by_heart(comm, shards, scale):
    return right_unscale(comm, shards, 1024.0)


def sends_everything(comm, shards, scale):
    for shard in shards[:1]:
        comm.all_reduce(shard.clone()).wait()
    return right_unscale(comm, shards, scale)


def one_after_another(seq_len, num_ranks, rank):
    each = seq_len // num_ranks
    return list(range(rank * each, (rank + 1) * each))


def in_turns(seq_len, num_ranks, rank):
    return list(range(rank, seq_len, num_ranks))


half_a_sequence_later = partial(right_parts, late_of=lambda num_ranks, rank: num_ranks + rank)
one_piece_too_far = partial(right_parts, late_of=lambda num_ranks, rank: 2 * num_ranks - rank)
forgets_to_weigh = partial(right_merge, weigh=torch.ones_like)
weighs_by_logarithms = partial(right_merge, weigh=lambda share: 1 + share)
sums_exponentials = partial(right_merge, both=lambda one, other: (one.exp() + other.exp()).log())
keeps_the_larger = partial(right_merge, both=torch.maximum)


def exponentials_over(largest, one, other):
    """With what is taken off every exponent."""
    (output, log_sum), (other_output, other_log_sum) = one, other
    weights = (log_sum - largest).exp(), (other_log_sum - largest).exp()
    total = sum(weights)
    merged = (weights[0] * output + weights[1] * other_output) / total
    return {"output": merged, "log_sum": largest + total.log()}


def over_the_first_part(one, other):
    return exponentials_over(one[1], one, other)


def over_the_largest_of_all_queries(one, other):
    return exponentials_over(torch.maximum(one[1], other[1]).max(), one, other)


def sums_by_heart(comm, sums, num_micro_batches):
    return right_finish(comm, sums, 5)


def norm_of_the_first(comm, sums, num_micro_batches):
    return {
        **right_finish(comm, sums, num_micro_batches),
        "norm": right_finish(comm, sums[:1], num_micro_batches)["norm"],
    }


def nothing_finished(comm, sums, num_micro_batches):
    return {**right_finish(comm, sums, num_micro_batches), "gradients": sums}


def counted_from_one(num_ranks, num_micro_batches, rank):
    return [f"{action[:2]}{int(action[2:]) + 1}" for action in right_schedule(num_ranks, num_micro_batches, rank)]


def waits_with_each(num_ranks, num_micro_batches, rank):
    """On all ranks a backward as soon as its forward is over."""
    return [f"{rank}{kind}{number}" for number in range(num_micro_batches) for kind in "FB"]


def other_stage(num_ranks, num_micro_batches, rank):
    return right_schedule(num_ranks, num_micro_batches, 0)
