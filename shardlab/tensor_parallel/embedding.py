"""An embedding whose rows, the vocabulary, are divided: each rank looks up the tokens it holds, zeros for the others.

Forward one all-reduce of the looked-up activations (with ``sequence_dim`` a reduce-scatter), backward nothing (an
all-gather). All terms but one are zero, so the sum is exactly the full embedding. A head tied to it divides its output
features in the same way. Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlab.comm import Communicator
from shardlab.comm.autograd import reduce, reduce_scatter
from shardlab.partition.slices import TensorSlice, even_slice, require_divisible
from shardlab.tensor_parallel.slicing import equalise, sliced


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of a full embedding.

    Args:
        embedding: the full one; its weight becomes that of the axis' first rank, of which this layer keeps a slice.
        comm: the tensor axis.
        sequence_dim: dim of the output along which it is in parts; None where every rank gets all of it.
        name: in tags and errors.

    Raises:
        ValueError: the ranks do not divide the vocabulary, or an option that needs whole rows' history.
    """

    def __init__(
        self, embedding: nn.Embedding, comm: Communicator, *, sequence_dim: int | None = None, name: str = "embedding"
    ) -> None:
        super().__init__()
        check_embedding(name, embedding, comm.num_ranks)
        equalise(embedding, comm, name)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.comm, self.sequence_dim, self.name = comm, sequence_dim, name
        rows = even_slice(tuple(embedding.weight.shape), 0, comm.rank, comm.num_ranks)
        self.tensor_slices: dict[str, TensorSlice] = {"weight": rows}
        self.start, self.stop = rows.ranges[0]
        self.weight = sliced(embedding.weight, rows)
        self.padding_idx = embedding.padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., H) of int64 tokens (...), or their part along ``sequence_dim``.

        Raises:
            IndexError: on all ranks, where a token is outside the vocabulary (on CUDA torch's device-side assertion).
        """
        elsewhere = ((tokens < self.start) | (tokens >= self.stop)) & (tokens >= 0) & (tokens < self.num_embeddings)
        # A token outside the vocabulary stays outside the slice, so that the look-up refuses it.
        own = torch.where(elsewhere, 0, tokens - self.start)
        term = functional.embedding(own, self.weight, self._own_padding()).masked_fill(elsewhere.unsqueeze(-1), 0)
        tag = f"output of {self.name}"
        if self.sequence_dim is None:
            return reduce(term, self.comm, tag=tag)
        return reduce_scatter(term, self.comm, self.sequence_dim, tag=tag)

    def extra_repr(self) -> str:
        """Full sizes and the share."""
        return f"{self.num_embeddings} / {self.comm.num_ranks}, {self.embedding_dim}"

    def _own_padding(self) -> int | None:
        inside = self.padding_idx is not None and self.start <= self.padding_idx < self.stop
        return self.padding_idx - self.start if inside and self.padding_idx is not None else None


def check_embedding(name: str, embedding: nn.Embedding, num_ranks: int) -> None:
    """Refuse what a vocabulary-parallel embedding cannot do.

    Raises:
        ValueError: see ``VocabParallelEmbedding``.
    """
    require_divisible(f"{name}: num_embeddings", embedding.num_embeddings, num_ranks)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise ValueError(f"{name}: an embedding with {option} cannot be divided; build it without")
