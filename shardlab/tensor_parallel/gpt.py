"""The plan for the package's GPT.

Per block 2 all-reduces of b*s*h elements forward and 2 backward: behind and before the attention, whose heads are
divided, and the MLP. The embedding adds one forward, the head one backward, and gathered logits an all-gather. With
sequence parallelism each all-reduce is a reduce-scatter and an all-gather, which send as much together; then
dropout, LayerNorm and the residual are in parts too.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.

Legend: b micro-batch, s sequence, h hidden.
"""

from typing import Protocol

from shardlab.tensor_parallel.plan import Plan
from shardlab.tensor_parallel.sequence import SEQUENCE_DIM
from shardlab.tensor_parallel.styles import Column, OnSequence, OwnDropout, Row, Scatter, Style, Vocabulary


class GPTSizes(Protocol):
    """The part of ``GPTConfig`` that is used here."""

    @property
    def head_dim(self) -> int: ...  # noqa: D102


def gpt_plan(
    sizes: GPTSizes, *, sequence_parallel: bool = False, regather: bool = False, gather_logits: bool = True
) -> Plan:
    """The plan for a ``shardlab.models.GPT``.

    Args:
        sizes: its config.
        sequence_parallel: divide the sequence where the model treats each token by itself; the ranks must divide its
            length.
        regather: with ``sequence_parallel``: keep the inputs of attention and MLP in parts for backward.
        gather_logits: give every rank all logits; False leaves them in parts along the vocabulary, for
            ``vocab_parallel_cross_entropy``.

    Raises:
        ValueError: ``regather`` without ``sequence_parallel``.
    """
    if regather and not sequence_parallel:
        raise ValueError(
            "regather: True is given without sequence_parallel; set sequence_parallel=True, or leave it out"
        )
    along = SEQUENCE_DIM if sequence_parallel else None
    column, row = Column(sequence_dim=along, regather=regather), Row(sequence_dim=along)
    plan: dict[str, Style] = {
        "token_embedding": Vocabulary(along),
        "blocks.*.attention.[qkv]_proj": Column(head_dim=sizes.head_dim, sequence_dim=along, regather=regather),
        "blocks.*.attention.out_proj": row,
        "blocks.*.mlp.fc1": column,
        "blocks.*.mlp.fc2": row,
        "head": Column(gather_output=gather_logits, sequence_dim=along, regather=regather),
    }
    if sequence_parallel:
        plan |= {
            "position_embedding": Scatter(SEQUENCE_DIM),
            "dropout": OwnDropout(),
            "blocks.*.dropout": OwnDropout(),
            "blocks.*.*_norm": OnSequence(),
            "final_norm": OnSequence(),
        }
    return plan
