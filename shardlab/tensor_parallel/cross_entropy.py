"""Cross-entropy of logits that are in parts along the vocabulary: no rank ever has a whole row of them.

With l the logits of a token, m their maximum, y the target, V the vocabulary and a the label smoothing:

    loss = log(sum exp(l - m)) - (1 - a)(l_y - m) - a/V sum(l - m)

So besides m each token needs two sums over the ranks (three with smoothing), which travel together. Forward two
all-reduces of T and 2T (3T) elements for T tokens, where gathered logits were V elements a token; backward nothing.
Source: Shoeybi et al., arXiv 1909.08053, section 3 (the end).
"""

import torch
from torch import Tensor

from shardlab.comm import Communicator
from shardlab.comm.autograd import reduce

REDUCTIONS = ("mean", "sum", "none")
_HALF = (torch.float16, torch.bfloat16)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    comm: Communicator,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """What ``torch.nn.functional.cross_entropy`` gives for the gathered logits, equal on all ranks.

    Args:
        logits: (..., V / N), this rank's part; half precision is raised to float32.
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
    """
    _check(logits, targets, label_smoothing, reduction)
    if logits.dtype in _HALF:
        logits = logits.float()
    counts = targets != ignore_index
    peak = logits.detach().amax(-1)
    comm.all_reduce(peak, reduction="max", tag="maximum of logits").wait()
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
        raise ValueError(f"label_smoothing: {label_smoothing} is not within 0 and 1")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: shape {tuple(logits.shape[:-1])} is needed beside logits {tuple(logits.shape)}, "
            f"not {tuple(targets.shape)}"
        )
