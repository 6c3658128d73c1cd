"""What one process has on the rows of all ranks, put together from what it has on the rows of each.

The gradient of a mean over all rows is the mean of the ranks' gradients, each weighing as much as it has rows or
tokens; of means of micro-batches each micro-batch weighs the same. Where a script divides its micro-batches by the
number of ranks, the single process takes those of all ranks by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isclose

import torch
from torch import Tensor

from shardlab.same.notes import Notes, Part, Step, UnlikeError, same_tensors
from shardlab.same.wholes import wholes

EQUAL = 1e-6
Gradient = dict[str, Tensor]


@dataclass
class Union:
    """One step of one process.

    Attributes:
        gradient: by name.
        micro_batches: of a rank.
        weights: of each rank.
        brought: what each rank's rows have brought in each of its backwards; the weighted sum is the gradient.
        twins: of each rank, the first one that has the same rows, as ranks that divide a model do.
        is_summed: whether the loss is a sum over rows, so that the sum over ranks is as right as their mean.
        is_counted: whether the weights are numbers of rows or tokens that differ.
        is_known: whether it is known what each loss is divided by.
        uneven: whether micro-batches of unequal numbers weigh the same.
        is_undivided: whether one process takes the micro-batches of all ranks, and adds up means that nothing divides.
        loss_times: what each loss of the ranks is of one process's on the same rows, where all are alike; else 1.
        by_micro: of rank and micro-batch, where each micro-batch weighs as much of all ranks' rows as it has of them.
        scale: by what the script multiplies gradients after backward in one process.
    """

    gradient: Gradient
    micro_batches: int
    weights: list[float]
    brought: dict[tuple[int, int], Gradient]
    twins: list[int]
    is_summed: bool = False
    is_counted: bool = False
    is_known: bool = True
    uneven: bool = False
    is_undivided: bool = False
    loss_times: float = 1.0
    by_micro: dict[tuple[int, int], float] = field(default_factory=dict)
    scale: float = 1.0

    def weight(self, rank: int, micro: int) -> float:
        """What a micro-batch of a rank counts."""
        return self.by_micro.get((rank, micro), self.weights[rank])

    def scaled(self, by: float) -> "Union":
        """The same of a script that multiplies gradients by a number after backward; sums over rows are no longer."""
        gradient, *brought = (
            {name: value * by for name, value in one.items()} for one in (self.gradient, *self.brought.values())
        )
        known = dict(zip(self.brought, brought, strict=True))
        return replace(self, gradient=gradient, brought=known, is_summed=False, is_undivided=False, scale=by)

    def over_rows(self, counts: Sequence[int]) -> "Union":
        """The same of a script that divides what sums over rows bring by how many all ranks have; each has these."""
        total, mean = sum(counts), self.scaled(len(counts) / sum(counts))
        for (rank, _), one in mean.brought.items():  # each weighs as much as it has rows
            one |= {name: value * total / len(counts) / counts[rank] for name, value in one.items()}
        weights = [count / total for count in counts]
        return replace(mean, weights=weights, is_counted=len({*counts}) > 1, scale=1 / total)

    def share(self, rank: int, micro: int) -> float:
        """The weight of a rank's micro-batch and of those with the same rows."""
        return sum(self.weight(one, micro) for one, twin in enumerate(self.twins) if twin == rank)


def union(ranks: Sequence[Notes], alone: Sequence[Notes], step: int) -> Union:
    """The step of one process.

    Raises:
        UnlikeError: what a process alone does cannot be matched with what ranks do.
    """
    theirs, own = [one.steps[step] for one in ranks], [one.steps[step] for one in alone]
    of_a_rank = [len(one.backwards) for one in theirs]
    of_one = {len(one.backwards) for one in own}
    if of_one == {sum(of_a_rank)} and len(set(of_a_rank)) == 1 and len(ranks) > 1:
        return _in_turn(own[0], of_a_rank[0], len(ranks))
    if [len(one.backwards) for one in own] != of_a_rank:
        ours, others = (", ".join(str(len(one.backwards)) for one in some) for some in (theirs, own))
        why = f"step {step} has {ours} backwards on the ranks and {others} in one process, on the same rows"
        raise UnlikeError(why)
    ratios = [_ratios(one) for one in own]
    known = [one for some in ratios for one in some]
    uneven = any(not isclose(a, b, rel_tol=EQUAL) for some in ratios for a, b in pairwise(some))
    is_counted = bool(known) and all(ratios) and not uneven and max(known) > min(known) * (1 + EQUAL)
    shares = [some[0] if is_counted else 1.0 for some in ratios]
    weights = [share / sum(shares) for share in shares]
    parts = [_gradient(one.gradients) for one in own]
    is_summed = bool(known) and all(isclose(one, 1.0, rel_tol=EQUAL) for one in known) and _several(own)
    brought = _brought(own)
    twins = _twins(brought, len(own))
    brought = {key: gradient for key, gradient in brought.items() if twins[key[0]] == key[0]}
    gradient, micro_batches = _weighted(parts, weights), max(of_a_rank, default=0)
    made = Union(gradient, micro_batches, weights, brought, twins, is_summed, is_counted, all(ratios), uneven)
    made.loss_times = _loss_times(theirs, own)
    is_cleared = any(one.cleared for one in own)
    if uneven and all(ratios) and not is_cleared and (shares_by_micro := _of_all_ranks(ratios, theirs, own)):
        if micro_batches > 1 and not (any(micro for _, micro in brought) and all(brought.values())):
            why = "each micro-batch weighs as much as it has of all ranks' rows, and what each brings is not seen"
            raise UnlikeError(f"{why}: gradients are added up where nobody else sees them")
        made.by_micro = shares_by_micro
        made.gradient = _weighted(list(brought.values()), [made.share(*key) for key in brought])
    return made


def _in_turn(one: Step, micro_batches: int, num_ranks: int) -> Union:
    brought = {
        divmod(number, micro_batches): {name: value * num_ranks for name, value in _gradient(backward.brought).items()}
        for number, backward in enumerate(one.backwards)
    }
    weights = [1 / num_ranks] * num_ranks
    counted = [(backward.loss, each) for backward in one.backwards for each in backward.counted]
    is_undivided = bool(counted) and all(isclose(at * one.number, one.summed, rel_tol=EQUAL) for at, one in counted)
    gradient, twins = _weighted([_gradient(one.gradients)], [1.0]), list(range(num_ranks))
    return Union(gradient, micro_batches, weights, brought, twins, is_undivided=is_undivided)


def _ratios(step: Step) -> list[float]:
    """By what each loss is divided, of its sum over rows; empty where that is not known."""
    found = []
    for backward in step.backwards:
        if len(backward.counted) != 1 or not backward.loss:
            return []
        found.append(backward.counted[0].summed / backward.loss)
    return found


def _loss_times(theirs: Sequence[Step], own: Sequence[Step]) -> float:
    """See ``Union``."""
    every = ([backward.loss for one in steps for backward in one.backwards] for steps in (theirs, own))
    times = [rank / alone if alone else 0.0 for rank, alone in zip(*every, strict=True)]
    return times[0] if times and all(isclose(one, times[0], rel_tol=1e-4) for one in times) else 1.0


def _of_all_ranks(
    ratios: Sequence[Sequence[float]], theirs: Sequence[Step], own: Sequence[Step]
) -> dict[tuple[int, int], float]:
    """The share of each rank in each micro-batch, if that is what the script divides losses by; else nothing."""
    totals = [sum(some) for some in zip(*ratios, strict=True)]
    shares = {(r, m): one / totals[m] for r, some in enumerate(ratios) for m, one in enumerate(some)}
    scales = [theirs[r].backwards[m].loss / own[r].backwards[m].loss / share for (r, m), share in shares.items()]
    known = any(all(isclose(one, scale, rel_tol=1e-4) for one in scales) for scale in (1.0, len(own)))
    return shares if known else {}


def _several(steps: Sequence[Step]) -> bool:
    """Whether they are of more than a row each: else a sum is a mean."""
    return any(one.number > 1 for step in steps for backward in step.backwards for one in backward.counted)


def _gradient(parts: Sequence[Part]) -> Gradient:
    """Of a process alone, which holds all of it; it stays where it lies, in a file if it is large."""
    return {name: one for name, views in wholes([parts]).items() for one in views if one is not None}


def _brought(own: Sequence[Step]) -> dict[tuple[int, int], Gradient]:
    found = {
        (rank, number): _gradient(backward.brought)
        for rank, step in enumerate(own)
        for number, backward in enumerate(step.backwards)
    }
    # Engines of ours show gradients at the step alone, when all micro-batches are together.
    if not any(found.values()):
        return {(rank, 0): _gradient(step.gradients) for rank, step in enumerate(own)}
    return found


def _twins(brought: dict[tuple[int, int], Gradient], num_ranks: int) -> list[int]:
    of: list[dict[tuple[int, str], Tensor]] = [{} for _ in range(num_ranks)]
    for (rank, micro), gradient in brought.items():
        of[rank] |= {(micro, name): value for name, value in gradient.items()}
    return [next(one for one in range(num_ranks) if same_tensors(of[one], own)) for own in of]


def _weighted(parts: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    found: Gradient = {}
    for one, weight in zip(parts, weights, strict=True):
        for name, value in one.items():
            known = found.setdefault(name, torch.zeros(value.shape, dtype=torch.float64))
            known.add_(value, alpha=weight)
    return found
