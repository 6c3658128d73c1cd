"""What torch's gloo groups move: the bytes that each rank sends, by the algorithms of gloo and of torch around it.

==============  =========================  ===================================================
collective      bytes one rank sends       how
==============  =========================  ===================================================
all-reduce      2 (N - 1) / N * S          ring
reduce-scatter  2 (N - 1) / N * S          an all-reduce of the whole buffer, of which each rank keeps its chunk
all-gather      (N - 1) / N * S            ring
all-to-all      (N - 1) / N * S            every rank to every other; of uneven parts, all but its own
broadcast       S for each child           binomial tree: rank r, counted from the root, sends to r + 2^i for 2^i > r
reduce          S; root (N - 1) / N * S    ring reduce-scatter, then every rank sends its chunk to the root
gather          S / N; root 0              every rank to the root
scatter         0; root (N - 1) / N * S    the root to every rank
send, recv      S, 0
barrier         0                          empty messages
==============  =========================  ===================================================

Legend: N ranks in the group, S bytes of the whole (unsharded) buffer; headers of messages are left out. Source: gloo's
``allreduce.cc``, ``broadcast.cc``, ``reduce.cc`` and torch's ``ProcessGroupGloo.cpp`` (2.11 to 2.13). A test counts
what the sockets send at 2, 3 and 4 ranks. On average over ranks only reduce-scatter and reduce move more than the ring
formula of ``wire`` says.
"""

from math import nan

from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.vocabulary import Collective

GLOO = "gloo"


def moved_bytes(
    backend: str,
    op: Collective,
    num_bytes: int,
    group_size: int,
    rank: int = 0,
    root: int | None = None,
    *,
    own_chunk_bytes: int | None = None,
) -> float:
    """Bytes that one rank sends when a group of torch runs the collective.

    Args:
        backend: what the group sends with; NaN for any but gloo, since NCCL does not say which algorithm it takes.
        op: the collective.
        num_bytes: bytes of the whole (unsharded) buffer.
        group_size: ranks that take part.
        rank: position in the group.
        root: position of the rank that sends to all or receives from all; None if not known: then the average.
        own_chunk_bytes: of an uneven all-to-all, what the rank keeps.

    Raises:
        ValueError: see ``ring_wire_bytes``.
    """
    if backend != GLOO:
        return nan
    ring_bytes = ring_wire_bytes(op, num_bytes, group_size, own_chunk_bytes)
    chunk_bytes = num_bytes / group_size if group_size > 1 else 0.0
    if op == Collective.REDUCE_SCATTER:
        return 2 * ring_bytes
    if op == Collective.REDUCE:
        share = (group_size - 1) / group_size if root is None else float(rank != root)
        return ring_bytes + share * chunk_bytes
    if root is None:
        return ring_bytes
    if op == Collective.BROADCAST:
        return float(_num_children((rank - root) % group_size, group_size) * num_bytes)
    if op == Collective.GATHER:
        return 0.0 if rank == root else chunk_bytes
    if op == Collective.SCATTER:
        return (group_size - 1) * chunk_bytes if rank == root else 0.0
    return ring_bytes


def _num_children(place: int, group_size: int) -> int:
    """To how many ranks the one at ``place``, counted from the root, sends in a binomial tree."""
    steps = (1 << level for level in range(group_size.bit_length()))
    return sum(step > place and place + step < group_size for step in steps)
