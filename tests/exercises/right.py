"""Right answers to every exercise. They lie here, where the package cannot import them."""

import torch


def right_ring(comm, x):
    count, rank = comm.num_ranks, comm.rank
    chunks = torch.tensor_split(x, count)
    for step in range(2 * (count - 1)):
        out, back = chunks[(rank - step) % count], chunks[(rank - step - 1) % count]
        sending = comm.send(out, (rank + 1) % count)
        received = torch.empty_like(back)
        comm.recv(received, (rank - 1) % count).wait()
        sending.wait()
        back.copy_(received) if step >= count - 1 else back.add_(received)


def right_buckets(sizes, capacity):
    buckets, filled = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def right_owners(sizes, num_ranks, rank):
    chunk = -(-sum(sizes.values()) // num_ranks)
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk)


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


RIGHT = {
    "collectives.ring_all_reduce": [right_ring],
    "buckets.assign": [right_buckets],
    "data_parallel.hooks": [right_hooks],
    "zero1.owners": [right_owners],
    "clip.global_norm": [right_norm],
    "zero3.forward": [right_forward],
    "checkpoint.reshard": [right_reshard],
}
