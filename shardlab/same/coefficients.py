"""Of which ranks' gradients ours is made: one coefficient for each rank and micro-batch, by least squares.

What one process has on the rows of each rank is known, so a gradient that was reduced in a wrong way is still a sum of
these with other coefficients: 1 in place of 1/N where the mean is missing, 0 where a rank or a micro-batch is lost.
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
