"""The vocabulary in parts: an embedding of which each rank has some rows, and the loss of logits divided alike.

``VocabParallelEmbedding``: each rank looks up the tokens it holds, zeros for the others. Forward one all-reduce of the
looked-up activations (with ``sequence_dim`` a reduce-scatter), backward nothing (an all-gather). All terms but one are
zero, so the sum is exactly the full embedding. A head tied to it divides its output features in the same way.

``vocab_parallel_cross_entropy``: no rank ever has a whole row of logits. With l the logits of a token, m their maximum,
y the target, V the vocabulary and a the label smoothing:

    loss = log(sum exp(l - m)) - (1 - a)(l_y - m) - a/V sum(l - m)

So besides m each token needs two sums over the ranks (three with smoothing), which travel together. Forward two
all-reduces of T + 4 and 2T (3T) elements for T tokens, where gathered logits were V elements a token; backward nothing.
The four beside the maxima show whether all ranks were given the same logits.
Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlab.comm import Communicator
from shardlab.comm.autograd_collectives import reduce, reduce_scatter, untraced
from shardlab.partition.slices import TensorSlice, even_slice, require_divisible
from shardlab.tensor_parallel.linear import equalise, sliced

REDUCTIONS = ("mean", "sum", "none")
_HALF = (torch.float16, torch.bfloat16)
_TOKENS = 8  # that are compared


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of a full embedding.

    Args:
        embedding: the full one; its weight becomes that of the axis' first rank, of which this layer keeps a slice.
        comm: the tensor axis.
        sequence_dim: dim of the output along which it is in parts; None where every rank gets all of it.
        name: in tags and errors.

    Raises:
        ValueError: the ranks do not divide the vocabulary, or the embedding has ``max_norm``, ``scale_grad_by_freq`` or
            ``sparse`` set.
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
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        self.own_padding = padding - self.start if self.start <= padding < self.stop else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., H) of int64 tokens (...), or their part along ``sequence_dim``.

        Raises:
            IndexError: on all ranks, where a token is outside the vocabulary (on CUDA torch's device-side assertion).
        """
        elsewhere = ((tokens < self.start) | (tokens >= self.stop)) & (tokens >= 0) & (tokens < self.num_embeddings)
        # A token outside the vocabulary stays outside the slice, so that the look-up refuses it.
        own = torch.where(elsewhere, 0, tokens - self.start)
        # Tokens of other ranks have looked up the first row here, and must add nothing to the sum.
        term = functional.embedding(own, self.weight, self.own_padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        tag = f"output of {self.name}"
        if self.sequence_dim is None:
            return reduce(term, self.comm, tag=tag)
        return reduce_scatter(term, self.comm, self.sequence_dim, tag=tag)

    def extra_repr(self) -> str:
        """Full sizes and the share."""
        return f"{self.num_embeddings} / {self.comm.num_ranks}, {self.embedding_dim}"


def check_embedding(name: str, embedding: nn.Embedding, num_ranks: int) -> None:
    """Refuse what a vocabulary-parallel embedding cannot do.

    Raises:
        ValueError: see ``VocabParallelEmbedding``.
    """
    require_divisible(f"{name}: num_embeddings", embedding.num_embeddings, num_ranks)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise ValueError(f"{name}: an embedding with {option} cannot be divided; build it without")


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, comm: Communicator, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """What ``torch.nn.functional.cross_entropy`` gives for the gathered logits, equal on all ranks.

    Args:
        logits: (..., V / N), this rank's part, the vocabulary last; half precision is raised to float32.
        targets: int64, (...), numbers in the whole vocabulary, equal on all ranks.
        comm: the tensor axis.
        ignore_index: a target that does not count.
        label_smoothing: 0 to 1.
        reduction: 'mean' over the targets that count, 'sum' or 'none'.

    Returns:
        0-d, or of the targets' shape with 'none'.

    Raises:
        ValueError: shapes that do not fit, or an option outside its range.
        IndexError: on all ranks, where a target is outside the vocabulary.
        RuntimeError: on all ranks, if each was given all logits (on CUDA torch's device-side assertion), as the first
            tokens tell. Parts that are equal bit for bit there look the same if they hold all targets and are not
            constant where they are not -inf. Gathered logits that are so constant are not refused.
    """
    _check(logits, targets, label_smoothing, reduction)
    if logits.dtype in _HALF:
        logits = logits.float()
    counts = targets != ignore_index
    # Detached: the maximum cancels out of the loss, so no gradient flows through it.
    peak, are_whole = _peaks(logits.detach(), targets, counts, comm)
    if comm.num_ranks > 1:
        # The loss of gathered logits would be too large by log N; all ranks see the same, and so all refuse. (Private,
        # but torch has no public assertion that leaves the host unsynchronized on CUDA.)
        torch._assert_async(
            ~are_whole,
            f"logits: all ranks were given the same {logits.shape[-1]} a token; give each rank its part of the "
            "vocabulary, as a head without gather_output leaves it (gpt_plan: gather_logits=False)",
        )
    shifted = logits - peak.unsqueeze(-1)
    terms = [shifted.exp().sum(-1), _of_target(shifted, targets, counts, comm)]
    if label_smoothing:
        terms.append(shifted.sum(-1))
    exp_sum, at_target, *rest = reduce(torch.stack(terms), comm, tag="sums of logits").unbind()
    losses = exp_sum.log() - (1 - label_smoothing) * at_target
    if rest:
        losses = losses - label_smoothing / (logits.shape[-1] * comm.num_ranks) * rest[0]
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


@untraced
def _peaks(logits: Tensor, targets: Tensor, counts: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The maximum of each token over all ranks, and whether all ranks were given the same logits, the whole ones.

    The answer, a bool tensor, is the same on all ranks: a refusal on one of them would leave the others waiting.
    """
    own, first = logits.amax(-1), _first(logits)
    has_targets = ((targets < logits.shape[-1]) | ~counts).all() & counts.any()
    may_be_whole = _varies(first) & has_targets & own.isfinite().all()
    # A rank whose logits cannot be the whole ones sends a mark that no other has, so that no rank finds them alike.
    marks = torch.where(may_be_whole, _checksum(first), -1 - comm.rank)
    reduced = torch.cat([own.flatten(), marks, -marks])
    comm.all_reduce(reduced, reduction="max", tag="maximum of logits").wait()
    peak, largest, negated_smallest = reduced.split([own.numel(), 2, 2])
    return peak.view_as(own), (largest == -negated_smallest).all()


def _first(logits: Tensor) -> Tensor:
    """A view of a few tokens' logits, (tokens, V / N): whoever was given all logits was given those of each token."""
    while logits.dim() > 2:
        logits = logits[:1].flatten(0, 1)
    return logits.view(-1, logits.shape[-1])[:_TOKENS] if logits.dim() == 1 else logits[:_TOKENS]


def _varies(logits: Tensor) -> Tensor:
    """Whether some token's logits differ where they are not masked.

    Constant ones, as at the start of a head of zeros, are alike in parts too.
    """
    return (logits.nan_to_num(neginf=inf).amin(-1) < logits.amax(-1)).any()


def _checksum(logits: Tensor) -> Tensor:
    """Of the logits that are not masked, and of their places: two numbers, equal for equal logits."""
    shown = logits.masked_fill(logits.isneginf(), 0)
    places = torch.arange(1, shown.numel() + 1, dtype=shown.dtype, device=shown.device).view_as(shown)
    return torch.stack([shown.sum(), (shown * places.sqrt()).sum()])


def _of_target(shifted: Tensor, targets: Tensor, counts: Tensor, comm: Communicator) -> Tensor:
    """The target's logit where this rank has it, else 0."""
    width = shifted.shape[-1]
    start = comm.rank * width
    elsewhere = ((targets < start) | (targets >= start + width)) & (targets >= 0) & (targets < width * comm.num_ranks)
    elsewhere = elsewhere | ~counts
    # A target outside the vocabulary stays outside the part, so that gather refuses it.
    own = torch.where(elsewhere, 0, targets - start)
    return shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)


def _check(logits: Tensor, targets: Tensor, label_smoothing: float, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: {label_smoothing} is given; it must be within 0 and 1")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: shape {tuple(targets.shape)} is given; beside logits {tuple(logits.shape)} it must be "
            f"{tuple(logits.shape[:-1])}"
        )
