"""Causal attention among tokens of which each rank has a part, in three ways; each equals attention over the whole.

``ulysses`` exchanges: before, each rank has all heads of its tokens, and then all tokens of its heads; afterwards back.
``gathered`` brings all keys and values to each rank, whose queries stay. ``ring`` lets them travel around, a part at a
time, and adds up what each part gives: two results merge by the logarithms of their sums of exponentials, so that no
rank has to have all keys at once; the next part travels while this one computes, in backward its gradient likewise.

Legend of shape suffixes: b batch, a heads, g key-value heads, s tokens of this rank, t tokens of the whole sequence, d
head dim. Sources: see ``parts.py``; the merge is that of Milakov and Gimelshein, arXiv 1805.02867.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shardlab.comm.autograd_collectives import all_gather, begin_shift, end_shift, exchange
from shardlab.comm.communicator import Communicator
from shardlab.context.parts import positions_of, require_fit


class _Given(NamedTuple):
    """Queries (B, A, S, D), keys and values (B, G, S, D) of this rank, and where its tokens are."""

    q_basd: Tensor
    k_bgsd: Tensor
    v_bgsd: Tensor
    comm: Communicator
    zigzag: bool

    def positions(self, rank: int) -> Tensor:
        seq_len = self.q_basd.shape[2] * self.comm.num_ranks
        return positions_of(seq_len, self.comm.num_ranks, rank, zigzag=self.zigzag)


def attention(
    way: str, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, comm: Communicator, *, zigzag: bool = False
) -> Tensor:
    """Attention of this rank's queries to all keys before them, (B, A, S, D).

    Args:
        way: 'ulysses', 'gathered' or 'ring'.
        q_basd: queries of this rank's tokens, (B, A, S, D).
        k_bgsd: keys, (B, G, S, D), where G divides A.
        v_bgsd: values, likewise.
        comm: the ranks that have the other parts.
        zigzag: whether parts are as in ``positions_of(..., zigzag=True)``.

    Raises:
        ValueError: other dims, keys of other tokens than the queries; as ``require_fit``.
    """
    if not q_basd.ndim == k_bgsd.ndim == 4 or q_basd.shape[2] != k_bgsd.shape[2]:
        raise ValueError(
            f"attention: queries {tuple(q_basd.shape)} and keys {tuple(k_bgsd.shape)}; over ranks both are (batch, "
            "heads, tokens, elements of a head), of the same tokens"
        )
    if way == "ring" and k_bgsd.shape != v_bgsd.shape:
        raise ValueError(
            f"attention: keys {tuple(k_bgsd.shape)} and values {tuple(v_bgsd.shape)} travel together in a ring, in one "
            "shape; use 'gathered' or 'ulysses'"
        )
    require_fit(
        way, comm.num_ranks, seq_len=q_basd.shape[2] * comm.num_ranks, heads=q_basd.shape[1],
        kv_heads=k_bgsd.shape[1], zigzag=zigzag,
    )  # fmt: skip
    return _COMPUTED[way](_Given(q_basd, k_bgsd, v_bgsd, comm, zigzag))


def _ulysses(given: _Given) -> Tensor:
    comm = given.comm
    queries, keys, values = (
        _heads_for_tokens(tensor, comm, name)
        for name, tensor in (("queries", given.q_basd), ("keys", given.k_bgsd), ("values", given.v_bgsd))
    )
    output = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    parts = output.unflatten(2, (comm.num_ranks, -1)).movedim(2, 0)  # by the rank whose tokens they are
    return exchange(parts, comm, tag="attention").movedim(0, 1).flatten(1, 2)


def _heads_for_tokens(x_basd: Tensor, comm: Communicator, name: str) -> Tensor:
    """All tokens of this rank's heads, (B, A/N, T, D)."""
    parts = x_basd.unflatten(1, (comm.num_ranks, -1)).movedim(1, 0)  # by the rank whose heads they will be
    return exchange(parts, comm, tag=name).movedim(0, 2).flatten(2, 3)


def _gathered(given: _Given) -> Tensor:
    comm = given.comm
    k_bgtd, v_bgtd = (
        all_gather(tensor, comm, 2, tag=name) for name, tensor in (("keys", given.k_bgsd), ("values", given.v_bgsd))
    )
    positions_t = torch.cat([given.positions(rank) for rank in range(comm.num_ranks)])
    mask_st = (given.positions(comm.rank)[:, None] >= positions_t).to(given.q_basd.device)
    return functional.scaled_dot_product_attention(given.q_basd, k_bgtd, v_bgtd, mask_st, enable_gqa=True)


def _ring(given: _Given) -> Tensor:
    q_basd, comm = given.q_basd, given.comm
    own_s, travelling = given.positions(comm.rank), torch.stack([given.k_bgsd, given.v_bgsd])
    found: tuple[Tensor, Tensor] | None = None  # the output so far, and the logarithm of its sum of exponentials
    for hop in range(comm.num_ranks):
        is_last = hop == comm.num_ranks - 1
        # Before the block is computed, so that the next part travels meanwhile.
        ahead = None if is_last else begin_shift(travelling, comm, tag=f"keys and values, hop {hop + 1}")
        theirs_s = given.positions((comm.rank - hop) % comm.num_ranks)
        if found is None:
            found = _block(q_basd, travelling, own_s, theirs_s)
        elif int(own_s.max()) < int(theirs_s.min()):
            # No query sees any of it; but its gradient travels back as all do. And autograd keeps something of it, so
            # that a checkpoint, which computes up to what was kept last, sends on all ranks as much, and as early.
            found = found[0] + travelling[..., :0].clone().square().sum(), found[1]
        else:
            found = _merged(found, _block(q_basd, travelling, own_s, theirs_s))
        if ahead is not None:
            travelling = end_shift(*ahead)
    assert found is not None
    return found[0]


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to two parts of the keys together, from that to each."""
    both = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - both).exp() + other[0] * (other[1] - both).exp(), both


def _block(q_basd: Tensor, keys_and_values: Tensor, own_s: Tensor, theirs_s: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to one part of the keys, and the logarithm of its sum of exponentials, (B, A, S, 1)."""
    keys, values = keys_and_values
    # The queries of all heads that share a key-value head are rows of one matrix: no key is copied for each of them.
    per_key = q_basd.shape[1] // keys.shape[1]
    rows = q_basd.unflatten(1, (-1, per_key)).flatten(2, 3)
    scores = rows @ keys.mT / q_basd.shape[-1] ** 0.5
    # Finite: a query that sees nothing here gets numbers whose weight in the merge is zero, and no NaN.
    is_later = (own_s.to(scores.device)[:, None] < theirs_s.to(scores.device)).repeat(per_key, 1)
    scores = scores.masked_fill(is_later, torch.finfo(scores.dtype).min / 2)
    log_sum = scores.logsumexp(-1, keepdim=True)
    output = (scores - log_sum).exp() @ values
    return output.reshape(*q_basd.shape[:3], -1), log_sum.reshape(*q_basd.shape[:3], 1)


_COMPUTED: Mapping[str, Callable[[_Given], Tensor]] = {"ulysses": _ulysses, "gathered": _gathered, "ring": _ring}
