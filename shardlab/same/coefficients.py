"""Of which ranks' gradients ours is made: one coefficient for each rank and micro-batch, by least squares.

What one process has on the rows of each rank is known, so a gradient that was reduced in a wrong way is still a sum of
these with other coefficients: 1 in place of 1/N where the mean is missing, 0 where a rank or a micro-batch is lost.

================================================  ======================================================
of rank r and micro-batch m, 1 where it is right  cause
================================================  ======================================================
all N, or 1/N                                     added and not divided; divided twice
all M, or 1/M                                     micro-batches not divided; divided twice
all the size of a smaller group, or 1 over it     averaged over an axis too few, or too many
N on the own rank, 0 on others                    not reduced
0 but for the last micro-batch                    only the last is left
own for all but the last micro-batch              only the last is reduced
N**(M-1-m)                                        reduced again in every micro-batch
0 for a rank                                      its rows are missing
1/N over the share of its rows                    a mean of means
================================================  ======================================================

What two of these would show alike is said as the two.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose, sqrt

import torch
from torch import Tensor

from shardlab.same.union import Gradient, Union

CLOSE = 0.02  # coefficients are numbers of ranks and micro-batches, or 0
near = partial(isclose, rel_tol=CLOSE)
Said = tuple[str, str]  # what coefficients mean, and what to do


@dataclass(frozen=True)
class Mixture:
    """Coefficients over those that are right, each 1 where nothing is wrong.

    Attributes:
        of: by rank and micro-batch.
        residual: the share of ours that they do not explain.
        is_unique: whether no other coefficients would explain as much.
    """

    of: dict[tuple[int, int], float]
    residual: float
    is_unique: bool

    @property
    def explains(self) -> bool:
        """Whether ours is such a sum."""
        return self.residual < CLOSE

    @property
    def ranks(self) -> set[int]:
        """Those that have a part in it."""
        return {rank for (rank, _), one in self.of.items() if abs(one) > CLOSE}

    @property
    def key(self) -> tuple[float, ...]:
        """Rounded, to group parameters."""
        return tuple(round(one, 1) for one in self.of.values())

    def all_near(self, value: float, keys: Collection[tuple[int, int]] | None = None) -> bool:
        """Whether those of these ranks and micro-batches, or all, are this number."""
        wanted = self.of if keys is None else keys
        return bool(wanted) and all(abs(self.of[key] - value) <= CLOSE * max(1.0, abs(value)) for key in wanted)

    def common(self, keys: Collection[tuple[int, int]] | None = None) -> float | None:
        """The number that these have in common; None if they differ."""
        wanted = [self.of[key] for key in (self.of if keys is None else keys)]
        mean = sum(wanted) / len(wanted)
        return mean if self.all_near(mean, keys) else None


def mixture(ours: dict[str, Tensor], expected: Union, names: Sequence[str]) -> Mixture:
    """The coefficients of the gradients of some parameters, taken together.

    Where these have too few elements for one of each micro-batch: of all that a rank's micro-batches bring together.
    """
    mixed = _mixture(ours, expected, names)
    if mixed.is_unique or expected.micro_batches < 2:
        return mixed
    brought: dict[tuple[int, int], Gradient] = {}
    for (rank, _), gradient in expected.brought.items():
        known = brought.setdefault((rank, 0), {})
        known.update({name: known[name] + one if name in known else one for name, one in gradient.items()})
    together = _mixture(ours, replace(expected, brought=brought), names)
    if not together.explains:
        return mixed
    return replace(together, of={key: together.of[key[0], 0] for key in mixed.of if (key[0], 0) in together.of})


def flat(gradient: Gradient, names: Sequence[str]) -> Tensor:
    """Of these parameters in a row."""
    return torch.cat([gradient[name].double().reshape(-1) for name in names])


def _mixture(ours: dict[str, Tensor], expected: Union, names: Sequence[str]) -> Mixture:
    keys = list(expected.brought)
    zeros = {name: torch.zeros_like(ours[name]) for name in names}
    columns = [flat(zeros | expected.brought[key], names) for key in keys]
    mine = flat(ours, names)
    sizes = [float(column.norm()) for column in columns]
    used = [number for number, size in enumerate(sizes) if size > 0]
    if not used:
        return Mixture(dict.fromkeys(keys, 0.0), 1.0, False)
    scaled = torch.stack([columns[number] / sizes[number] for number in used], dim=1)
    solved = torch.linalg.lstsq(scaled, mine, rcond=1e-4, driver="gelsd")
    away = float((scaled @ solved.solution - mine).norm())
    right = sum((sizes[number] * expected.share(*keys[number])) ** 2 for number in used)
    norm = sqrt(max(float(mine.square().sum()), right))
    found = {keys[number]: float(solved.solution[place]) / sizes[number] / expected.share(*keys[number])
             for place, number in enumerate(used)}  # fmt: skip
    return Mixture(found, away / norm if norm else 1.0, int(solved.rank) == len(used))


def meaning(
    mixed: Mixture, expected: Union, rank: int, num_ranks: int, sizes: Sequence[int], times_sent: int = 0
) -> Said:
    """What coefficients mean, and what to do."""
    twin, num_unlike = expected.twins[rank], len({*expected.twins})
    if not mixed.explains:
        words = f"no sum of the ranks' gradients explains them ({mixed.residual:.0%} is left): other rows, other "
        advice = "look at what changes gradients between backward and step; run with --float64 to rule out rounding"
        return f"{words}weights, or values that were changed one by one", advice
    if mixed.all_near(0.0):
        return "no gradient arrives: it is 0 or None at the step", "look where gradients are cleared, or detached"
    share = {key: expected.twins.count(key[0]) / num_ranks for key in mixed.of}
    if expected.is_counted and all(near(one * expected.share(*key), share[key]) for key, one in mixed.of.items()):
        shares = ", ".join(f"{one:.3g}" for one in expected.weights)
        words = f"a mean of means: every rank's mean weighs the same, and ranks have {shares} of the rows or tokens"
        return words, "sum over rows on each rank, and divide by the number of all ranks' rows, reduced over the ranks"
    if (common := mixed.common()) is not None:
        if times_sent > 1 and near(common, num_ranks ** (times_sent - 1)):
            return f"times {common:.4g}: reduced {times_sent} times", "reduce each gradient once, a tied one too"
        if expected.is_undivided and near(common, 1 / num_ranks):
            words = f"times {common:.4g}: losses are not divided by the micro-batches, of which one process has "
            return f"{words}{num_ranks} times as many", "divide each loss by the number of micro-batches in its step"
        if near(common, num_ranks) and near(expected.loss_times, num_ranks):
            words = f"times {common:.4g}: each loss is {common:.4g} times that of one process on the same rows"
            return words, "multiply losses by no number of ranks, or divide gradients by it once more"
        words, advice = _factor_said(common, num_ranks, expected.micro_batches, sizes)
        scaled = f" (in one process gradients are multiplied by {expected.scale:.4g} after backward, too)"
        return words + (scaled if expected.scale != 1 else ""), advice
    if not mixed.is_unique:
        words = "the ranks' gradients are too alike to be told apart: ranks have the same rows, or rows that differ"
        return f"{words} little", "give each rank rows of its own"
    others = [key for key in mixed.of if key[0] != twin]
    if mixed.all_near(0.0, others) and (kept := mixed.common(mixed.of.keys() - others)) is not None:
        scaled = "undivided" if near(kept, num_unlike) else f"times {kept / num_unlike:.3g}"
        advice = "reduce these gradients over the ranks before the step; where a wrapper does (DDP, FSDP), the last "
        advice += "backward outside no_sync(), and the wrapped model called, not the module inside"
        return f"not reduced: rank {rank} steps the gradient of its own rows alone, {scaled}", advice
    return _micro_batches_said(mixed, twin, num_unlike) or _ranks_said(mixed, num_ranks)


def _micro_batches_said(mixed: Mixture, rank: int, num_ranks: int) -> Said | None:
    """What coefficients that differ between micro-batches mean; None if they do not, or nothing that is known."""
    last = max(micro for _, micro in mixed.of)
    of = {micro: [key for key in mixed.of if key[1] == micro] for micro in range(last + 1)}
    lost = {micro for micro, keys in of.items() if mixed.all_near(0.0, keys)}
    alone = {micro for micro, keys in of.items() if mixed.all_near(0.0, [key for key in keys if key[0] != rank])} - lost
    kept = mixed.common([key for key in mixed.of if key[1] not in lost])
    if lost and kept is not None:
        words = f"only {_micro_batches(of.keys() - lost, last)} left{'' if near(kept, 1.0) else f', times {kept:.3g}'}"
        advice = "clear gradients once a step, and not before each backward"
        if last in lost:  # clearing leaves the last
            advice = "reduce what has been accumulated after the last micro-batch, and not before"
        return f"{words}: what the others brought is lost", advice
    if alone and len(alone) <= last:
        words = f"only {_micro_batches(of.keys() - alone - lost, last)} reduced: of the others, rank {rank} has "
        advice = "reduce what has been accumulated, once, after the last micro-batch; leave no_sync() before its "
        return f"{words}its own alone", f"{advice}forward"
    again = {key: mixed.of.get((key[0], last), 0.0) * num_ranks ** (last - key[1]) for key in mixed.of}
    if last and all(abs(one - again[key]) <= 0.05 * abs(again[key]) for key, one in mixed.of.items()):
        words = f"reduced again in every micro-batch: the first one counts {num_ranks}^{last} times"
        return words, "reduce once a step, after the last micro-batch"
    return None


def _micro_batches(numbers: set[int], last: int) -> str:
    """For example: the last micro-batch of 4 is."""
    if numbers == {last}:
        return f"the last micro-batch of {last + 1} is"
    words = ("micro-batch", "is") if len(numbers) == 1 else ("micro-batches", "are")
    return f"{words[0]} {listed(sorted(numbers))} of {last + 1} {words[1]}"


def _ranks_said(mixed: Mixture, num_ranks: int) -> Said:
    """What coefficients that differ between ranks mean."""
    of = {rank: [key for key in mixed.of if key[0] == rank] for rank in range(num_ranks)}
    if missing := [rank for rank, keys in of.items() if mixed.all_near(0.0, keys)]:
        kept = mixed.common([key for key in mixed.of if key[0] not in missing])
        words = f"the rows of rank {listed(missing)} are missing"
        words += "" if kept is None else f", the others count {kept:.3g} times"
        advice = "reduce over the group of all ranks that have rows of their own"
        return f"{words}: the message goes over a part of the ranks, or that rank sends zeros", advice
    counts = ", ".join(f"rank {key[0]} micro-batch {key[1]}: {one:.3g}" for key, one in list(mixed.of.items())[:6])
    return f"rows count otherwise than once: {counts}", "compare with what each line before the step multiplies by"


def _factor_said(factor: float, num_ranks: int, micro_batches: int, sizes: Sequence[int]) -> Said:
    """A factor that all have in common; what it may be of, each said."""
    of_micro, once = f"divided by the {micro_batches} micro-batches", "divide by the number of"
    known = [
        (num_ranks, f"added over {num_ranks} ranks and not divided", f"{once} ranks, once"),
        (1 / num_ranks, f"divided by the {num_ranks} ranks twice", f"{once} ranks once; DDP and FSDP do"),
        (micro_batches, f"not {of_micro}", "divide each loss by their number"),
        (1 / max(micro_batches, 1), f"{of_micro} twice", "divide by their number once"),
    ]
    for size in {*sizes} - {num_ranks}:
        known.append((size, f"not averaged over an axis of {size} ranks", "divide by its size, too"))
        which = f"averaged over an axis of {size} ranks over which it should not be"
        known.append((1 / size, which, "divide without it"))
    said = [one[1:] for one in known if one[0] != 1 and near(factor, one[0])]
    if not said:
        return f"times {factor:.4g}, all alike", "look what the loss or the gradient is multiplied by"
    return f"times {factor:.4g}: " + ", or ".join(one for one, _ in said), "; or ".join(one for _, one in said)


def listed(numbers: Sequence[int]) -> str:
    """As a sentence has them."""
    return ", ".join(map(str, numbers))
