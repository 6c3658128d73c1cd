"""What the tensor axis of the package's GPT carries in a step, counted by hand.

Per micro-batch, in elements of b*s*h (b sequences, s tokens, h hidden) and for L blocks:

==================  =======================================  =======================================
step                tensor parallel                          with sequence parallelism
==================  =======================================  =======================================
embedding           1 all-reduce forward                     1 reduce-scatter forward, 1 all-gather
                                                             backward
block               2 all-reduces forward, 2 backward        2 all-gathers and 2 reduce-scatters
                                                             forward, as many backward
head                1 all-reduce backward                    1 all-gather forward, 1 reduce-scatter
                                                             backward
==================  =======================================  =======================================

A ring carries 2(N-1)/N of an all-reduce and (N-1)/N of the others: both columns are equal. Sequence parallelism adds
the gradients of replicated parameters (h elements each, 6 a block, 2 of the last norm) and of the position embedding
(s*h); ``regather`` an all-gather backward per input. Logits: gathered, b*s*v elements; or in parts, 3 b*s + 4 in the
loss.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from shardlab.partition.chunks import require_count
from shardlab.planner.setup import ITEMSIZES
from shardlab.records.tables import COLLECTIVES
from shardlab.vocabulary import Collective, MeshAxis, Phase
from tests.oracle.collectives import Call


@dataclass(frozen=True)
class TensorSetup:
    """A GPT on a tensor axis.

    Attributes:
        num_ranks: of the tensor axis.
        hidden: width of the residual.
        num_layers: blocks.
        vocab_size: logits a token.
        seq_len: tokens of a sequence.
        micro_batch: sequences of a micro-batch on one rank of the data axes.
        micro_batches: forwards and backwards a step.
        sequence_parallel: see ``gpt_plan``.
        regather: see ``gpt_plan``.
        gather_logits: see ``gpt_plan``; False is with ``vocab_parallel_cross_entropy``.
        dtype: of activations.
        data_ranks: ranks of the data axes together, each with a tensor axis of its own.
    """

    num_ranks: int
    hidden: int
    num_layers: int
    vocab_size: int
    seq_len: int
    micro_batch: int
    micro_batches: int = 1
    sequence_parallel: bool = False
    regather: bool = False
    gather_logits: bool = True
    dtype: str = "float32"
    data_ranks: int = 1

    def __post_init__(self) -> None:
        """Counts must be 1 or more, and options fit each other."""
        counts = ("num_ranks", "hidden", "num_layers", "vocab_size", "seq_len", "micro_batch", "micro_batches")
        for name in (*counts, "data_ranks"):
            require_count(name, getattr(self, name), 1)
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(ITEMSIZES)}")
        if self.regather and not self.sequence_parallel:
            raise ValueError(
                "regather: True is given without sequence_parallel; set sequence_parallel=True, or leave it out"
            )


def counted_tensor_collectives(setup: TensorSetup, *, run: str = "tensor") -> pd.DataFrame:
    """Table ``collectives`` with ``source='predicted'`` of the tensor axis alone, which ``seq`` counts, times NaN.

    Rank by rank of the whole mesh, in the order of issue. The norm of the gradients is in ``counted_collectives``.
    """
    calls = [call for call in _Pass(setup).calls() if call.group_size > 1] * setup.micro_batches
    ranks = range(setup.data_ranks * setup.num_ranks)
    rows = [call.row(run, rank, seq, rank % setup.num_ranks) for rank in ranks for seq, call in enumerate(calls)]
    return COLLECTIVES.frame(rows)


class _Pass:
    """One forward and backward as a list of calls."""

    def __init__(self, setup: TensorSetup) -> None:
        self.setup = setup
        self.tokens = setup.micro_batch * setup.seq_len
        self.layers = [f"blocks.{index}" for index in range(setup.num_layers)]

    def calls(self) -> Iterator[Call]:
        yield from self.leave("token_embedding")
        for layer in self.layers:
            yield from self.enter(f"{layer}.attention")
            yield from self.leave(f"{layer}.attention.out_proj")
            yield from self.enter(f"{layer}.mlp.fc1")
            yield from self.leave(f"{layer}.mlp.fc2")
        yield from self.enter("head")
        yield from self.logits()
        yield from self.enter_backward("head", norm="final_norm")
        for layer in reversed(self.layers):
            yield from self.leave_backward(f"{layer}.mlp.fc2")
            yield from self.enter_backward(f"{layer}.mlp.fc1", norm=f"{layer}.mlp_norm")
            yield from self.leave_backward(f"{layer}.attention.out_proj")
            yield from self.enter_backward(f"{layer}.attention", norm=f"{layer}.attention_norm")
        yield from self.embeddings_backward()

    def enter(self, name: str) -> Iterator[Call]:
        """Before a region, in forward: nothing is sent for activations that are whole."""
        if self.setup.sequence_parallel:
            yield self.activation(Collective.ALL_GATHER, f"input of {name}", Phase.FORWARD)

    def leave(self, name: str) -> Iterator[Call]:
        """After a region, in forward: the sum of the ranks' terms."""
        op = Collective.REDUCE_SCATTER if self.setup.sequence_parallel else Collective.ALL_REDUCE
        yield self.activation(op, f"output of {name}", Phase.FORWARD)

    def enter_backward(self, name: str, *, norm: str) -> Iterator[Call]:
        """The gradient of a region's input; with sequence parallelism then those of the norm before the region."""
        op = Collective.REDUCE_SCATTER if self.setup.sequence_parallel else Collective.ALL_REDUCE
        if self.setup.regather:
            yield self.activation(Collective.ALL_GATHER, f"input of {name} again", Phase.BACKWARD)
        yield self.activation(op, f"gradient of input of {name}", Phase.BACKWARD)
        if self.setup.sequence_parallel:
            yield from (self.parameter(f"{norm}.{key}") for key in ("weight", "bias"))

    def leave_backward(self, name: str) -> Iterator[Call]:
        """The gradient of a region's output."""
        if self.setup.sequence_parallel:
            yield self.parameter(f"{name}.bias")
            yield self.activation(Collective.ALL_GATHER, f"gradient of output of {name}", Phase.BACKWARD)

    def embeddings_backward(self) -> Iterator[Call]:
        if self.setup.sequence_parallel:
            position = self.setup.seq_len * self.setup.hidden
            tag = "gradient of output of position_embedding"
            yield self.call(Collective.ALL_GATHER, tag, Phase.BACKWARD, position)
            yield self.activation(Collective.ALL_GATHER, "gradient of output of token_embedding", Phase.BACKWARD)

    def logits(self) -> Iterator[Call]:
        if self.setup.gather_logits:
            numel = self.tokens * self.setup.vocab_size
            yield self.call(Collective.ALL_GATHER, "output of head", Phase.FORWARD, numel)
        else:
            dtype = "float32" if ITEMSIZES[self.setup.dtype] < 4 else None
            for tag, numel in (("maximum of logits", self.tokens + 4), ("sums of logits", 2 * self.tokens)):
                yield self.call(Collective.ALL_REDUCE, tag, Phase.FORWARD, numel, dtype)

    def activation(self, op: Collective, tag: str, phase: Phase) -> Call:
        return self.call(op, tag, phase, self.tokens * self.setup.hidden)

    def parameter(self, name: str) -> Call:
        return self.call(Collective.ALL_REDUCE, f"gradient of {name}", Phase.BACKWARD, self.setup.hidden)

    def call(self, op: Collective, tag: str, phase: Phase, numel: int, dtype: str | None = None) -> Call:
        dtype = dtype or self.setup.dtype
        return Call(op, MeshAxis.TENSOR, tag, phase, dtype, ITEMSIZES[dtype], numel, self.setup.num_ranks)
