"""Right answers to every exercise. They lie here, where the package cannot import them."""

from itertools import combinations, pairwise

import numpy as np
import torch

from tests.course.exercises.whole import RIGHT_WHOLE


def right_ring(comm, x, *, cut=torch.tensor_split, rounds=2, waits=True):
    """The options are what people forget."""
    count, rank = comm.num_ranks, comm.rank
    chunks = cut(x, count)
    for step in range(rounds * (count - 1)):
        out, back = chunks[(rank - step) % count], chunks[(rank - step - 1) % count]
        sending = comm.send(out if waits else out.clone(), (rank + 1) % count)
        comm.recv(received := torch.empty_like(back), (rank - 1) % count).wait()
        if waits:
            sending.wait()
        back.copy_(received) if step >= count - 1 else back.add_(received)


def right_buckets(sizes, capacity, is_full=lambda filled, size, capacity: filled + size > capacity):
    buckets, filled = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or is_full(filled, sizes[index], capacity):
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def right_owners(sizes, num_ranks, rank, **mistakes):
    chunk = -(-sum(sizes.values()) // num_ranks)
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk, **mistakes)


def ranges_within(sizes, first, last, keep_empty=False, flat=False, past_the_end=False):
    owned, offset = {}, 0
    for name, size in sizes.items():
        start, stop = max(first, offset), last if past_the_end else min(last, offset + size)
        if start < stop and start < offset + size:
            owned[name] = (start, stop) if flat else (start - offset, stop - offset)
        elif keep_empty:
            owned[name] = (0, 0)
        offset += size
    return owned


def right_norm(comm, shards, norm_type):
    norms = [torch.linalg.vector_norm(shard, norm_type) for shard in shards]
    if norm_type == float("inf"):
        total = torch.stack([*norms, torch.zeros((), dtype=torch.float64)]).max()
        comm.all_reduce(total, reduction="max").wait()
        return total
    total = sum((norm**norm_type for norm in norms), torch.zeros((), dtype=torch.float64))
    comm.all_reduce(total).wait()
    return total ** (1 / norm_type)


def right_hooks(comm, model, num_micro_batches, *, sends_rest=True):
    params, pending = [*model.parameters()][::-1], []
    counts = [0] * len(params)

    def send(everything):
        while len(pending) < len(params) and (everything or counts[len(pending)] == num_micro_batches):
            param = params[len(pending)]
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            pending.append(comm.all_reduce(param.grad))

    def hook_of(place):
        def hook(_):
            counts[place] += 1
            send(False)

        return hook

    for place, param in enumerate(params):
        param.register_post_accumulate_grad_hook(hook_of(place))

    def finish():
        send(sends_rest)
        for each in pending:
            each.wait()
        for param in params:
            if param.grad is not None:
                param.grad /= comm.num_ranks

    return finish


def right_flat_hooks(comm, model, num_micro_batches):
    """One message for all, when the layer that is last in backward is done; by the names that the task gives."""
    state, last = {"forwards": 0}, set(model.trunk.parameters())

    def on_forward(*_):
        state["forwards"] += 1
        state["missing"] = set(last)

    def hook(param):
        state["missing"].discard(param)
        if state["forwards"] == num_micro_batches and not state["missing"]:
            gradients = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
            state["flat"] = torch.cat([gradient.flatten() for gradient in gradients])
            state["pending"] = comm.all_reduce(state["flat"])

    model.register_forward_hook(on_forward)
    for param in last:
        param.register_post_accumulate_grad_hook(hook)

    def finish():
        state["pending"].wait()
        means = state["flat"] / comm.num_ranks
        for param, mean in zip(
            model.parameters(), means.split([each.numel() for each in model.parameters()]), strict=True
        ):
            param.grad = mean.view_as(param)

    return finish


def right_forward(units, x, *, last_free=True):
    for unit in units[:1]:
        unit.gather()
    for number, unit in enumerate(units):
        for following in units[number + 1 : number + 2]:
            following.gather()
        x = unit.use(x)
        if last_free or number + 1 < len(units):
            unit.free()
    return x


def right_reshard(saved, sizes, num_ranks, rank, owners=right_owners):
    held = {}
    for name, (start, stop) in owners(sizes, num_ranks, rank).items():
        values = torch.full((stop - start,), -1.0, dtype=torch.float64)
        for first, old in (pieces[name] for pieces in saved if name in pieces):
            begin, end = max(start, first), min(stop, first + len(old))
            if begin < end:
                values[begin - start : end - start] = old[begin - first : end - first]
        held[name] = (start, values)
    return held


def right_overlap(messages, compute, waits):
    bounds = sorted({bound for intervals in (messages, compute, waits) for pair in intervals for bound in pair})
    times = [0.0, 0.0]
    for start, end in pairwise(bounds):
        sends, computes, idles = (any(a <= start < b for a, b in each) for each in (messages, compute, waits))
        if sends:
            times[0 if computes and not idles else 1] += end - start
    return tuple(times)


def right_overlap_of_arrays(messages, compute, waits):
    """NumPy's numbers: int64 where all bounds are whole."""
    bounds = np.unique([bound for intervals in (messages, compute, waits) for pair in intervals for bound in pair])
    moments, lengths = (bounds[1:] + bounds[:-1]) / 2, np.diff(bounds)
    sends, computes, idles = (
        np.array([any(a <= moment < b for a, b in each) for moment in moments], bool)
        for each in (messages, compute, waits)
    )
    return lengths[sends & computes & ~idles].sum(), lengths[sends & ~(computes & ~idles)].sum()


def right_link(layers, latency_us, bytes_per_us):
    def waits(k):
        ready = end = 0.0
        for start in range(0, len(layers), k):
            ready += sum(time for time, _ in layers[start : start + k])
            if end > ready:
                return True
            end = ready + latency_us + sum(size for _, size in layers[start : start + k]) / bytes_per_us
        return False

    return next(k for k in range(1, len(layers) + 1) if not waits(k))


def right_units(sizes, budget, prefetch):
    for num_cuts in range(len(sizes)):
        for cuts in combinations(range(1, len(sizes)), num_cuts):
            bounds = [0, *cuts, len(sizes)]
            units = [list(range(a, b)) for a, b in pairwise(bounds)]
            held = [sum(sizes[index] for index in unit) for unit in units]
            if all(sum(held[place : place + 1 + prefetch]) <= budget for place in range(len(held))):
                return units
    raise AssertionError


def right_column_row(comm, x, weights, grad, *, early_bias=1.0, mask=True, sums_x=True, sums_bias=False):
    """The options are what people forget."""
    before = x @ weights["column"].T + weights["column_bias"]
    hidden = torch.relu(before)
    output = hidden @ weights["row"].T + (1 - early_bias) * weights["row_bias"]
    comm.all_reduce(output).wait()
    grad_hidden = grad @ weights["row"] * ((before > 0) if mask else 1)
    grad_x = grad_hidden @ weights["column"]
    row_bias = grad.sum(0)
    if sums_x:
        comm.all_reduce(grad_x).wait()
    if sums_bias:
        comm.all_reduce(row_bias).wait()
    return {
        "output": output + early_bias * weights["row_bias"], "x": grad_x, "column": grad_hidden.T @ x,
        "column_bias": grad_hidden.sum(0), "row": grad.T @ hidden, "row_bias": row_bias,
    }  # fmt: skip


def right_who_reduces(mesh, parts, *, divisor=0, counts_whole_twice=False):
    data, tensor = mesh["data"], mesh["tensor"]
    tensor.all_reduce(parts["output"]).wait()
    for name in ("slice", "whole"):
        data.all_reduce(parts[name]).wait()
        parts[name] /= divisor or data.num_ranks
    squares = parts["slice"].square().sum() + (parts["whole"].square().sum() if counts_whole_twice else 0)
    tensor.all_reduce(squares).wait()
    norm = (squares + (0 if counts_whole_twice else parts["whole"].square().sum())).sqrt()
    return {**parts, "norm": norm}


def right_break_even(
    fixed_us, row_us, sizes, latency_us, bytes_per_us, *, hides=2 / 3, queues=True, wins=lambda two, one: two < one
):
    """The options are what people get wrong."""
    for rows in range(1, 10_000):
        compute, full, end = fixed_us + rows * row_us, 0, 0.0
        for size in sizes:
            full += size
            ready = compute * (1 - hides) + compute * hides * full / sum(sizes)
            end = max(ready, end if queues else 0) + latency_us + size / bytes_per_us
        if wins(max(end, compute), 2 * compute):
            return rows
    raise AssertionError


def right_unscale(comm, shards, scale, *, is_right=lambda shard: shard.isfinite().all(), asks=True, backoff=2):
    wrong = torch.tensor([float(any(not is_right(shard) for shard in shards))], dtype=torch.float64)
    if asks:
        comm.all_reduce(wrong, reduction="max").wait()
    return (None, scale / backoff) if wrong.item() else ([shard / scale for shard in shards], scale)


def right_unscale_with_a_byte(comm, shards, scale):
    """In place, and what is sent is no float64."""
    is_wrong = torch.tensor(any(not np.isfinite(shard.numpy()).all() for shard in shards), dtype=torch.uint8)
    comm.all_reduce(is_wrong, reduction="max").wait()
    return [None, scale / 2] if is_wrong else [[shard.div_(scale) for shard in shards], scale]


def right_schedule(num_ranks, num_micro_batches, rank):
    ahead = min(num_ranks - rank, num_micro_batches)
    actions = [f"{rank}F{number}" for number in range(ahead)]
    for number in range(num_micro_batches):
        actions.append(f"{rank}B{number}")
        if number + ahead < num_micro_batches:
            actions.append(f"{rank}F{number + ahead}")
    return actions


def right_finish(comm, sums, num_micro_batches, *, divisor=None, adds_up=True, of_norms=False):
    """The options are what people forget."""
    means = [gradient / (divisor or num_micro_batches) for gradient in sums]
    total = sum((gradient.square().sum() for gradient in means), torch.zeros((), dtype=torch.float64))
    total = total.sqrt() if of_norms else total
    if adds_up:
        comm.all_reduce(total).wait()
    return {"gradients": means, "norm": total if of_norms else total.sqrt()}


def right_finish_with_numbers(comm, sums, num_micro_batches):
    """The norm is a float, and not a tensor."""
    total = torch.tensor([sum(float(number) ** 2 for gradient in sums for number in gradient)], dtype=torch.float64)
    comm.all_reduce(total).wait()
    norm = total.item() ** 0.5 / num_micro_batches
    return {"norm": norm, "gradients": [gradient.numpy() / num_micro_batches for gradient in sums]}


def right_finish_of_one_element(comm, sums, num_micro_batches):
    found = right_finish_with_numbers(comm, sums, num_micro_batches)
    return {**found, "norm": torch.tensor([found["norm"]], dtype=torch.float64)}


def right_parts(seq_len, num_ranks, rank, *, late_of=lambda num_ranks, rank: 2 * num_ranks - 1 - rank):
    each = seq_len // (2 * num_ranks)
    return [piece * each + place for piece in (rank, late_of(num_ranks, rank)) for place in range(each)]


def right_pairs_of_tokens(seq_len, num_ranks, rank):
    """Token by token: an early one and its late partner."""
    early = range(rank, seq_len // 2, num_ranks)
    return [*early, *(seq_len - 1 - token for token in early)]


def right_owners_in_floats(sizes, num_ranks, rank):
    """As by np.ceil, and in another order."""
    ranges = right_owners(sizes, num_ranks, rank)
    return {name: np.array(ranges[name], dtype=float) for name in reversed(ranges)}


def right_merge(one, other, *, weigh=torch.exp, both=torch.logaddexp):
    """The options are what people forget."""
    (output, log_sum), (other_output, other_log_sum) = one, other
    total = both(log_sum, other_log_sum)
    merged = output * weigh(log_sum - total) + other_output * weigh(other_log_sum - total)
    return {"output": merged, "log_sum": total}


RIGHT = {
    "context.parts": [right_parts, right_pairs_of_tokens],
    "context.merge": [right_merge],
    "pipeline.schedule": [right_schedule],
    "pipeline.finish": [right_finish, right_finish_with_numbers, right_finish_of_one_element],
    "collectives.ring_all_reduce": [right_ring],
    "buckets.assign": [right_buckets],
    "data_parallel.hooks": [right_hooks, right_flat_hooks],
    "overlap.exposed": [right_overlap, right_overlap_of_arrays],
    "link.smallest_bucket": [right_link],
    "zero1.owners": [right_owners, right_owners_in_floats],
    "clip.global_norm": [right_norm],
    "zero3.forward": [right_forward],
    "scaling.break_even": [right_break_even],
    "precision.unscale": [right_unscale, right_unscale_with_a_byte],
    "fsdp.units": [right_units],
    "tensor.column_row": [right_column_row],
    "mesh.who_reduces": [right_who_reduces],
    "checkpoint.reshard": [right_reshard],
} | RIGHT_WHOLE
