"""Exercise: an all-reduce from send and recv, around a ring.

collectives_ring_all_reduce(comm, x): add up x over all ranks, in place, with comm.send and comm.recv alone.

x is a vector of any length, comm.rank this rank's number, comm.num_ranks the number N of ranks. Divide x into N
chunks, which need not be equal and may be empty. First every chunk travels around the ring and is added to at every
rank, then the finished chunks travel around once more: a rank sends at most 2(N - 1) messages, of one chunk each.
comm.send(tensor, rank) and comm.recv(tensor, rank) return at once; call .wait() on each of what they return, before you
use or change the tensor.

Hints:
- torch.tensor_split(x, N) gives N chunks for any length, some of them empty; each is a view of x.
- In step k rank r sends chunk (r - k) % N and receives chunk (r - k - 1) % N into a buffer, which it adds.
- After N - 1 steps rank r holds the finished chunk (r + 1) % N. Go on with k: the same chunks follow; copy now.
- Start the send, then wait for the receive, then for the send: if all ranks wait for a receive first, none sends.
"""

import torch

from shardlab.course.exercises.exercise import Case, Exercise, Message, Traffic, call_in_place
from shardlab.partition.chunks import chunk_sizes

SIZES = ((2, 8), (3, 7), (4, 3), (1, 5))  # ranks, elements

STARTER = """def collectives_ring_all_reduce(comm, x):
    pass  # your code: the next rank around the ring is (comm.rank + 1) % comm.num_ranks
"""


def cases() -> list[Case]:
    """Any length: divisible, not divisible, fewer elements than ranks; and one rank alone."""
    return [_case(num_ranks, numel) for num_ranks, numel in SIZES]


def _case(num_ranks: int, numel: int) -> Case:
    inputs = [torch.arange(numel, dtype=torch.float64) * 10**rank + rank for rank in range(num_ranks)]
    words = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, {numel} elements"
    wanted = torch.stack(inputs).sum(0)
    traffic = _traffic(num_ranks, numel, wanted.element_size())
    return Case(words, tuple((x,) for x in inputs), (wanted,) * num_ranks, traffic)


def _traffic(num_ranks: int, numel: int, itemsize: int) -> Traffic:
    """All ranks send 2(N - 1)S together, however chunks are cut; one rank at most 2(N - 1) of the largest."""
    sizes = [size * itemsize for size in chunk_sizes(numel, num_ranks)]
    wanted = tuple(tuple(_messages(rank, sizes)) for rank in range(num_ranks))
    most = 2 * (num_ranks - 1)
    return Traffic(wanted, most, most * sizes[0], most * numel * itemsize)


def _messages(rank: int, sizes: list[int]) -> list[Message]:
    count, messages = len(sizes), []
    for step in range(2 * (count - 1)):
        out, back = sizes[(rank - step) % count], sizes[(rank - step - 1) % count]
        messages += [Message("send", out, out), Message("recv", back, 0)]
    return messages


RING = Exercise.from_file(
    "collectives.ring_all_reduce", __doc__, STARTER, cases, "01_collectives_by_hand", num_references=1, num_wrong=6,
    attempt=call_in_place, drawn_words="an element of x", result_words="x after the call",
)  # fmt: skip
