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


RIGHT = {
    "collectives.ring_all_reduce": [right_ring],
    "buckets.assign": [right_buckets],
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
}


def sleeps(comm, x):
    time.sleep(60)


def ends_its_process(comm, x):
    os._exit(3)
