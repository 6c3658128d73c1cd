"""Right and wrong answers to every exercise. They lie here, where the package cannot import them."""

import os
import time

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


def ring_in_ceil_chunks(comm, x):
    """``chunk`` makes fewer chunks than ranks when there are few elements."""
    count, rank, chunks = comm.num_ranks, comm.rank, x.chunk(comm.num_ranks)
    for step in range(2 * (count - 1)):
        out, back = chunks[(rank - step) % count], chunks[(rank - step - 1) % count]
        sending = comm.send(out, (rank + 1) % count)
        comm.recv(received := torch.empty_like(back), (rank - 1) % count).wait()
        sending.wait()
        back.copy_(received) if step >= count - 1 else back.add_(received)


def half_a_ring(comm, x):
    count, rank, chunks = comm.num_ranks, comm.rank, torch.tensor_split(x, comm.num_ranks)
    for step in range(count - 1):
        sending = comm.send(chunks[(rank - step) % count], (rank + 1) % count)
        back = chunks[(rank - step - 1) % count]
        comm.recv(received := torch.empty_like(back), (rank - 1) % count).wait()
        sending.wait()
        back.add_(received)


def whole_vectors(comm, x):
    travelling = x.clone()
    for _ in range(comm.num_ranks - 1):
        sending = comm.send(travelling, (comm.rank + 1) % comm.num_ranks)
        comm.recv(received := torch.empty_like(x), (comm.rank - 1) % comm.num_ranks).wait()
        sending.wait()
        x += received
        travelling = received


def librarys_own(comm, x):
    comm.all_reduce(x).wait()


def receives_first(comm, x):
    if comm.num_ranks > 1:
        comm.recv(received := torch.empty_like(x), (comm.rank - 1) % comm.num_ranks).wait()
        comm.send(x, (comm.rank + 1) % comm.num_ranks).wait()
        x += received


def right_buckets(sizes, capacity):
    buckets, filled = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def buckets_of_forward(sizes, capacity):
    return [[len(sizes) - 1 - index for index in bucket] for bucket in right_buckets(sizes[::-1], capacity)]


def closed_when_past(sizes, capacity):
    buckets, filled = [], capacity
    for index in reversed(range(len(sizes))):
        if filled >= capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def forgets_the_last(sizes, capacity):
    buckets, opened, filled = [], [], 0
    for index in reversed(range(len(sizes))):
        if opened and filled + sizes[index] > capacity:
            buckets.append(opened)
            opened, filled = [], 0
        opened.append(index)
        filled += sizes[index]
    return buckets


def empty_before_a_large_one(sizes, capacity):
    buckets, filled = [[]], 0
    for index in reversed(range(len(sizes))):
        if filled + sizes[index] > capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
        if filled > capacity:
            buckets.append([])
            filled = 0
    return buckets


def never_exactly_full(sizes, capacity):
    return right_buckets(sizes, capacity - 1)


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


def chunks_rounded_down(sizes, num_ranks, rank):
    chunk = sum(sizes.values()) // num_ranks
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk)


def whole_parameters(sizes, num_ranks, rank):
    return {name: (0, size) for place, (name, size) in enumerate(sizes.items()) if place % num_ranks == rank}


def empty_ranges(sizes, num_ranks, rank):
    chunk = -(-sum(sizes.values()) // num_ranks)
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk, keep_empty=True)


def offsets_on_the_line(sizes, num_ranks, rank):
    chunk = -(-sum(sizes.values()) // num_ranks)
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk, flat=True)


def padding_too(sizes, num_ranks, rank):
    chunk = -(-sum(sizes.values()) // num_ranks)
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk, past_the_end=True)


def right_norm(comm, shards, norm_type):
    norms = [torch.linalg.vector_norm(shard, norm_type) for shard in shards]
    if norm_type == float("inf"):
        total = torch.stack([*norms, torch.zeros((), dtype=torch.float64)]).max()
        comm.all_reduce(total, reduction="max").wait()
        return total
    total = sum((norm**norm_type for norm in norms), torch.zeros((), dtype=torch.float64))
    comm.all_reduce(total).wait()
    return total ** (1 / norm_type)


def local_norm(comm, shards, norm_type):
    return torch.linalg.vector_norm(torch.cat([torch.zeros(1, dtype=torch.float64), *shards]), norm_type)


def sum_of_norms(comm, shards, norm_type):
    total = local_norm(comm, shards, norm_type)
    comm.all_reduce(total).wait()
    return total


def a_rank_without_shards_fails(comm, shards, norm_type):
    return right_norm(comm, [torch.cat(shards)], norm_type)


def powers_of_inf(comm, shards, norm_type):
    if norm_type != float("inf"):
        return right_norm(comm, shards, norm_type)
    return sum_of_norms(comm, shards, norm_type)


def largest_with_sign(comm, shards, norm_type):
    if norm_type != float("inf"):
        return right_norm(comm, shards, norm_type)
    total = torch.cat([torch.zeros(1, dtype=torch.float64), *shards]).max()
    comm.all_reduce(total, reduction="max").wait()
    return total


def asks_twice(comm, shards, norm_type):
    comm.all_reduce(torch.tensor([float(len(shards))], dtype=torch.float64)).wait()
    return right_norm(comm, shards, norm_type)


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


def hooks_as_they_come(comm, model, num_micro_batches, *, divisor=0, every_time=False):
    """Sends what is ready at once, in an order that differs between ranks where one leaves a parameter out."""
    counts, sent, pending = {}, set(), []

    def send(param):
        sent.add(param)
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        pending.append(comm.all_reduce(param.grad))

    def hook(param):
        counts[param] = counts.get(param, 0) + 1
        if every_time or counts[param] == num_micro_batches:
            send(param)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)

    def finish():
        for param in model.parameters():
            if param not in sent:
                send(param)
        for each in pending:
            each.wait()
        for param in model.parameters():
            param.grad /= divisor or comm.num_ranks

    return finish


def forgets_to_divide(comm, model, num_micro_batches):
    return hooks_as_they_come(comm, model, num_micro_batches, divisor=1)


def waits_for_the_unused(comm, model, num_micro_batches):
    return right_hooks(comm, model, num_micro_batches, sends_rest=False)


def sends_every_micro_batch(comm, model, num_micro_batches):
    return hooks_as_they_come(comm, model, num_micro_batches, every_time=True)


def all_at_the_end(comm, model, num_micro_batches):
    def finish():
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            comm.all_reduce(param.grad).wait()
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


def not_ahead(units, x):
    for unit in units:
        unit.gather()
        x = unit.use(x)
        unit.free()
    return x


def keeps_the_last(units, x):
    return right_forward(units, x, last_free=False)


def frees_one_late(units, x):
    for unit in units[:1]:
        unit.gather()
    for number, unit in enumerate(units):
        for following in units[number + 1 : number + 2]:
            following.gather()
        x = unit.use(x)
        if number:
            units[number - 1].free()
    for unit in units[-1:]:
        unit.free()
    return x


def past_the_end(units, x):
    units[0].gather()
    for number, unit in enumerate(units):
        if number < 3:
            units[number + 1].gather()
        x = unit.use(x)
        unit.free()
    return x


def frees_before_use(units, x):
    for unit in units:
        unit.gather()
        unit.free()
        x = unit.use(x)
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


def first_file_only(saved, sizes, num_ranks, rank):
    return right_reshard([{name: saved[0][name] for name in saved[0]}], sizes, num_ranks, rank)


def forgets_where_it_starts(saved, sizes, num_ranks, rank):
    return {name: (0, values) for name, (_, values) in right_reshard(saved, sizes, num_ranks, rank).items()}


def each_parameter_in_parts(saved, sizes, num_ranks, rank):
    def in_parts(sizes, num_ranks, rank):
        chunks = {name: -(-size // num_ranks) for name, size in sizes.items()}
        parts = {name: (rank * part, min((rank + 1) * part, sizes[name])) for name, part in chunks.items()}
        return {name: (start, stop) for name, (start, stop) in parts.items() if start < stop}

    return right_reshard(saved, sizes, num_ranks, rank, in_parts)


def files_handed_on(saved, sizes, num_ranks, rank):
    """Rank r reads the old files r, r + N, ... and keeps what is in them."""
    return {name: piece for pieces in saved[rank::num_ranks] for name, piece in pieces.items()}


RIGHT = {
    "collectives.ring_all_reduce": [right_ring],
    "buckets.assign": [right_buckets],
    "data_parallel.hooks": [right_hooks],
    "zero1.owners": [right_owners],
    "clip.global_norm": [right_norm],
    "zero3.forward": [right_forward],
    "checkpoint.reshard": [right_reshard],
}

# Each with words of its own reason.
WRONG = {
    "collectives.ring_all_reduce": {
        ring_in_ceil_chunks: "4 ranks, 3 elements: rank . raised IndexError",
        half_a_ring: "2 ranks, 8 elements: rank 0, result, element 0 .bytes 0 to 7.*4 of 8 elements differ",
        whole_vectors: "3 ranks, 7 elements: rank 0 sent 112 B where 96 B.*send of 56 B",
        librarys_own: "2 ranks, 8 elements: rank 0, message 0 is all_reduce of 64 B .*allowed: send and recv",
        receives_first: "2 ranks, 8 elements: ranks waited in a collective.*recv",
    },
    "buckets.assign": {
        buckets_of_forward: r"four parameters.*result\[0\]\[0\]: 3 is wanted, 0 was found",
        closed_when_past: r"one parameter is larger.*1 items? (is|are) wanted, 2 were found",
        forgets_the_last: r"four parameters.*result: 2 items are wanted, 1 was found",
        empty_before_a_large_one: r"no parameters.*0 items are wanted, 1 was found",
        never_exactly_full: r"four parameters.*result\[0\]: 2 items are wanted, 1 was found",
    },
    "data_parallel.hooks": {
        forgets_to_divide: r"^1 micro-batch: rank 0, result\['gradients'\]\['trunk.weight'\], element 0",
        all_at_the_end: r"^1 micro-batch: rank 0, result\['sends during backward'\]: True is wanted, False was found",
        sends_every_micro_batch: r"^2 micro-batches: rank 0, result\['gradients'\]",
        waits_for_the_unused: r"^rank 0 does not use the right branch: ranks waited in a collective.*rank 1 in all_red",
        hooks_as_they_come: r"^rank 0 does not use the right branch: rank . raised MismatchError",
    },
    "zero1.owners": {
        chunks_rounded_down: r"^3 ranks.*rank 0, result\['ranges'\]\['weight'\]\[1\]: 7 is wanted, 6 was found",
        whole_parameters: r"^3 ranks.*rank 0, result\['ranges'\]: 'head' should not be there",
        empty_ranges: r"^3 ranks.*rank 0, result\['ranges'\]: 'bias' should not be there; it is \[0, 0\]",
        offsets_on_the_line: r"^3 ranks.*rank 0, result\['ranks that step'\], element 7 .*1 is wanted, 0 was",
        padding_too: r"^3 ranks.*rank 1, result\['ranges'\]\['bias'\]\[1\]: 3 is wanted, 7 was found",
    },
    "clip.global_norm": {
        local_norm: r"^2-norm.*rank 0, result: 13.0 is wanted, 5.0 was found",
        sum_of_norms: r"^2-norm.*rank 0, result: 13.0 is wanted, 17.0 was found",
        a_rank_without_shards_fails: r"^2-norm.*rank 1 raised",
        powers_of_inf: r"^inf-norm.*rank 0, result: 7.0 is wanted, 12.0 was found",
        largest_with_sign: r"^inf-norm.*rank 0, result: 7.0 is wanted, 5.0 was found",
        asks_twice: r"^2-norm.*rank 0 sent 2 messages where 1 is enough; message 1 is the first too many",
    },
    "zero3.forward": {
        not_ahead: r"^2 ranks, 4 units: rank 0, result\['events'\]\[1\]: 'gather 1' is wanted, 'use 0' was found",
        keeps_the_last: r"^2 ranks, 4 units: rank 0, result\['events'\]: 12 items are wanted, 11 were found",
        frees_one_late: r"^2 ranks, 4 units: rank 0, result\['events'\]\[3\]: 'free 0' is wanted, 'gather 2' was found",
        past_the_end: r"^3 ranks, 2 units: rank . raised IndexError",
        frees_before_use: r"^2 ranks, 4 units: rank . raised RuntimeError: unit 0 is used, but it is not gathered",
    },
    "checkpoint.reshard": {
        first_file_only: r"^4 to 3: rank 0, result\['weight'\]\[1\], element 5 .*5 is wanted, -1 was found",
        forgets_where_it_starts: r"^4 to 3: rank 2, result\['head'\]\[0\]: 3 is wanted, 0 was found",
        each_parameter_in_parts: r"^4 to 3: rank 0, result: 'bias' should not be there; it is ",
        files_handed_on: r"^4 to 3: rank 0, result: 'head' should not be there",
    },
}


def sleeps(comm, x):
    time.sleep(60)


def ends_its_process(comm, x):
    os._exit(3)
