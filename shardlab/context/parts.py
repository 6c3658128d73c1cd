"""Which tokens of a sequence are on which rank, what their attention costs there, and what it sends; arithmetic alone.

Contiguous parts are unequal work under a causal mask: the last rank's queries see all keys, the first rank's only its
own, so that the slowest rank does 2 - 1/N times the mean. In a zigzag the sequence is cut into 2N pieces, and rank r
has pieces r and 2N - 1 - r: all do the same.

Elements that a rank sends for the attention of one layer, forward; as many again backward:

=========  =============================================  ==============================================
way        elements                                       messages
=========  =============================================  ==============================================
ulysses    (2h + 2k) d b (s/N) (N-1)/N                    4 all-to-all: queries, keys, values, output
gathered   2 k d b (s/N) (N-1)                            2 all-gathers (backward: reduce-scatters)
ring       2 k d b (s/N) (N-1)                            N - 1 to the next rank, keys and values together
=========  =============================================  ==============================================

b sequences of s tokens on N ranks, h heads and k key-value heads of d elements. So Ulysses sends less if N > h/k + 1.
Keys and values that autograd keeps for the backward of one layer, in elements: 2 k d b s/N under Ulysses, all tokens of
k/N heads; 2 k d b s, all of them, in the other two. Without a backward a ring holds two parts at a time beside its own.
Sources: Jacobs et al., arXiv 2309.14509 (Ulysses); Liu et al., arXiv 2310.01889 (ring); Dubey et al., arXiv 2407.21783,
section 3.3.2 (gathered keys and values); the zigzag is of the ring-flash-attention and Megatron-LM projects.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.vocabulary import Collective

WAYS = ("ulysses", "gathered", "ring")


def positions_of(seq_len: int, num_ranks: int, rank: int, *, zigzag: bool = False) -> Tensor:
    """Where the tokens of a rank are in the sequence, int64 (seq_len / num_ranks,).

    Raises:
        ValueError: the ranks do not divide the sequence, or twice their number not that of a zigzag.
    """
    pieces = num_ranks * (2 if zigzag else 1)
    if seq_len < 1 or seq_len % pieces:
        raise ValueError(
            f"seq_len: {seq_len} tokens do not divide into {pieces} pieces on {num_ranks} ranks; give a multiple of "
            f"{pieces}"
        )
    found = torch.arange(seq_len).chunk(pieces)
    return torch.cat([found[rank], found[-1 - rank]]) if zigzag else found[rank]


def require_fit(
    way: str, num_ranks: int, *, seq_len: int, heads: int, kv_heads: int, zigzag: bool = False
) -> None:  # fmt: skip
    """Refuse what the ranks cannot compute; arithmetic alone, so that it can be asked before they start.

    Raises:
        ValueError: an unknown way; a sequence that the parts do not divide; heads that the key-value heads do not
            divide; of Ulysses, heads that the ranks do not divide, or a zigzag.
    """
    require_way(way, zigzag=zigzag)
    positions_of(seq_len, num_ranks, 0, zigzag=zigzag)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} do not divide the {heads} heads; give a divisor")
    for field, number in (("heads", heads), ("kv_heads", kv_heads)):
        if way == "ulysses" and number % num_ranks:
            raise ValueError(
                f"{field}: {number} are not divided by the {num_ranks} ranks; use 'gathered' or 'ring', or another "
                "number of ranks"
            )


def require_way(way: str, *, zigzag: bool) -> None:
    """Refuse a way that there is not, and a zigzag of Ulysses."""
    if way not in WAYS:
        raise ValueError(f"way: {way!r} is not one of {', '.join(WAYS)}")
    if zigzag and way == "ulysses":
        raise ValueError("zigzag: ulysses computes whole sequences, which are equal work as they are; leave it out")


def share_of_work(seq_len: int, num_ranks: int, *, zigzag: bool = False) -> float:
    """The pairs of query and key that the busiest rank computes under a causal mask, over the mean of the ranks."""
    pairs = [int((positions_of(seq_len, num_ranks, rank, zigzag=zigzag) + 1).sum()) for rank in range(num_ranks)]
    return max(pairs) * num_ranks / sum(pairs)


class Sent(NamedTuple):
    """A message of one layer's attention on each rank, forward."""

    op: Collective
    numel: int  # of the whole buffer
    num_sent: int  # elements that a rank sends


def messages_of(
    way: str, num_ranks: int, *, batch: int, seq_len: int, heads: int, kv_heads: int, head_dim: int
) -> list[Sent]:
    """What the attention of one layer sends, forward; backward sends as much, a reduce-scatter for each all-gather.

    Raises:
        ValueError: as ``require_fit``.
    """
    require_fit(way, num_ranks, seq_len=seq_len, heads=heads, kv_heads=kv_heads)
    own = batch * (seq_len // num_ranks) * head_dim  # elements of one head on one rank
    if num_ranks == 1:
        return []
    if way == "ulysses":
        sizes = [own * count for count in (heads, kv_heads, kv_heads, heads)]
        return [Sent(Collective.ALL_TO_ALL, size, size * (num_ranks - 1) // num_ranks) for size in sizes]
    size = own * kv_heads
    if way == "gathered":
        return [Sent(Collective.ALL_GATHER, size * num_ranks, size * (num_ranks - 1))] * 2
    return [Sent(Collective.SEND, 2 * size, 2 * size)] * (num_ranks - 1)
