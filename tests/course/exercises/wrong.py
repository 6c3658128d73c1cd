"""Wrong answers to every exercise, those that people write; ``reasons`` says for what each must fail."""

from functools import partial

import torch

from tests.course.exercises.right import (  # isort: skip
    ranges_within, right_buckets, right_forward, right_hooks, right_norm, right_owners, right_reshard, right_ring,
)  # fmt: skip

# ``chunk`` makes fewer chunks than ranks when there are few elements.
ring_in_ceil_chunks = partial(right_ring, cut=torch.chunk)
half_a_ring = partial(right_ring, rounds=1)
# Copies are sent, so the sums are right; but nobody knows when the copies may go.
lets_sends_go = partial(right_ring, waits=False)


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


closed_when_past = partial(right_buckets, is_full=lambda filled, size, capacity: filled >= capacity)


def buckets_of_forward(sizes, capacity):
    return [[len(sizes) - 1 - index for index in bucket] for bucket in right_buckets(sizes[::-1], capacity)]


def forgets_the_last(sizes, capacity):
    return right_buckets(sizes, capacity)[:-1]


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


def chunks_rounded_down(sizes, num_ranks, rank):
    chunk = sum(sizes.values()) // num_ranks
    return ranges_within(sizes, rank * chunk, (rank + 1) * chunk)


def whole_parameters(sizes, num_ranks, rank):
    return {name: (0, size) for place, (name, size) in enumerate(sizes.items()) if place % num_ranks == rank}


def lengths_in_place_of_ranges(sizes, num_ranks, rank):
    return {name: stop - start for name, (start, stop) in right_owners(sizes, num_ranks, rank).items()}


empty_ranges = partial(right_owners, keep_empty=True)
offsets_on_the_line = partial(right_owners, flat=True)
padding_too = partial(right_owners, past_the_end=True)


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


def sends_float32(comm, shards, norm_type):
    """Torch's default: half of the digits are lost on the way."""
    total = torch.tensor(local_norm(comm, shards, norm_type).item() ** 2)
    comm.all_reduce(total).wait()
    return total**0.5


def asks_twice(comm, shards, norm_type):
    comm.all_reduce(torch.tensor([float(len(shards))], dtype=torch.float64)).wait()
    return right_norm(comm, shards, norm_type)


def hooks_as_they_come(comm, model, num_micro_batches, *, divisor=0, every_time=False, hooked=True):
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

    for param in model.parameters() if hooked else ():
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


forgets_to_divide = partial(hooks_as_they_come, divisor=1)
waits_for_the_unused = partial(right_hooks, sends_rest=False)
sends_every_micro_batch = partial(hooks_as_they_come, every_time=True)
all_at_the_end = partial(hooks_as_they_come, hooked=False)


def waits_at_once(comm, model, num_micro_batches):
    class Waits:
        num_ranks = comm.num_ranks

        def all_reduce(self, tensor):
            comm.all_reduce(tensor).wait()
            return self

        def wait(self):
            pass

    return right_hooks(Waits(), model, num_micro_batches)


def sends_one_of_six(comm, model, num_micro_batches):
    """A message during backward, for the look of it."""
    *others, token = model.parameters()
    counts, pending = [0], []

    def hook(param):
        counts[0] += 1
        if counts[0] == num_micro_batches:
            pending.append(comm.all_reduce(param.grad))

    token.register_post_accumulate_grad_hook(hook)
    finish_others = all_at_the_end(comm, torch.nn.ParameterList(others), num_micro_batches)

    def finish():
        if not pending:
            hook(token)
        finish_others()
        pending[0].wait()
        token.grad /= comm.num_ranks

    return finish


def not_ahead(units, x):
    for unit in units:
        unit.gather()
        x = unit.use(x)
        unit.free()
    return x


keeps_the_last = partial(right_forward, last_free=False)


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


def first_file_only(saved, sizes, num_ranks, rank):
    return right_reshard(saved[:1], sizes, num_ranks, rank)


def forgets_where_it_starts(saved, sizes, num_ranks, rank):
    return {name: (0, values) for name, (_, values) in right_reshard(saved, sizes, num_ranks, rank).items()}


def each_parameter_in_parts(saved, sizes, num_ranks, rank):
    def in_parts(sizes, num_ranks, rank):
        chunks = {name: -(-size // num_ranks) for name, size in sizes.items()}
        parts = {name: (rank * part, min((rank + 1) * part, sizes[name])) for name, part in chunks.items()}
        return {name: (start, stop) for name, (start, stop) in parts.items() if start < stop}

    return right_reshard(saved, sizes, num_ranks, rank, in_parts)


def in_the_order_of_saving(saved, sizes, num_ranks, rank):
    """Puts all that was saved end to end, and never looks at where it starts."""
    whole = {name: torch.cat([pieces[name][1] for pieces in saved if name in pieces]) for name in sizes}
    ranges = right_owners(sizes, num_ranks, rank)
    return {name: (start, whole[name][start:stop]) for name, (start, stop) in ranges.items()}


def files_handed_on(saved, sizes, num_ranks, rank):
    """Rank r reads the old files r, r + N, ... and keeps what is in them."""
    return {name: piece for pieces in saved[rank::num_ranks] for name, piece in pieces.items()}
