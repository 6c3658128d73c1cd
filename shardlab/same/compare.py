"""Compares what ranks have done with what one process has: gradients, norms, steps; the first difference counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import hypot, inf, isclose, nan, sqrt
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from shardlab.same.notes import Notes, Step, UnlikeError, factor
from shardlab.same.union import Gradient, Union, union
from shardlab.same.wholes import wholes

WHAT = ("weights before", "gradient", "norm", "clipping", "weights after", "buffer")


Views = dict[str, list[Tensor | None]]  # of a whole, by name, as each rank has it


class Band(NamedTuple):
    """Relative differences up to ``same`` are rounding, and those above ``different`` are not."""

    same: float
    different: float


# Of half precision nothing is the same: what is wrong by less than it rounds cannot be told from rounding.
BANDS = {
    "float64": Band(1e-9, 1e-7), "float32": Band(2e-4, 2e-3), "float16": Band(0.0, 0.05), "bfloat16": Band(0.0, 0.15),
}  # fmt: skip
REDUCES = ("all_reduce", "reduce_scatter")
CLOSE = 1e-3  # of one number that is all in which gradients differ
FLOOR = 1e-3  # of the mean size of all gradients: one that is nothing beside the others is all rounding


class Row(NamedTuple):
    """One comparison: what, of which parameter, on which rank.

    Attributes:
        ratio: the norm of ours over that of one process.
        cosine: between both.
        difference: largest, of one element.
        relative: the norm of the difference over that of one process.
    """

    step: int
    what: str
    name: str
    rank: int
    ratio: float
    cosine: float
    difference: float
    relative: float


@dataclass
class Found:
    """What a comparison has found.

    Attributes:
        rows: all comparisons.
        band: of the dtype that is coarsest.
        dtype: that one.
        unions: of each step.
        ours: gradients of each step, by name and rank.
        unknown: why nothing can be said; empty if something can.
        num_steps: compared.
        by_sum: whether the ranks' gradients are added, of a loss that is a sum over rows.
        is_together: whether one process had the rows of all ranks at once, and not those of each rank by themselves.
        clips_by_hand: whether the script scales gradients to a largest norm without torch's function.
    """

    rows: list[Row] = field(default_factory=list)
    band: Band = BANDS["float32"]
    dtype: str = "float32"
    unions: list[Union] = field(default_factory=list)
    ours: list[Views] = field(default_factory=list)
    unknown: str = ""
    num_steps: int = 0
    by_sum: bool = False
    is_together: bool = False
    clips_by_hand: bool = False

    def differ(self, rows: Sequence[Row]) -> list[Row]:
        """Those by more than rounding."""
        return [row for row in rows if not row.relative <= self.band.different]

    @property
    def different(self) -> list[Row]:
        """Rows that differ, of the first step that has some, of what is compared first there."""
        ill = self.differ(self.rows)
        first = min(((row.step, WHAT.index(row.what)) for row in ill), default=None)
        return [row for row in ill if (row.step, WHAT.index(row.what)) == first]

    @property
    def largest(self) -> float:
        """Relative difference."""
        return max((row.relative for row in self.rows), default=0.0)

    @property
    def table(self) -> pd.DataFrame:
        """Of all rows."""
        return pd.DataFrame(self.rows, columns=list(Row._fields))


def compare(ranks: Sequence[Notes], alone: Sequence[Notes]) -> Found:
    """Compare all steps that all have taken."""
    found = Found(num_steps=min(len(one.steps) for one in (*ranks, *alone)))
    steps = [step for one in ranks for step in one.steps]
    sent = {message.dtype for step in steps for message in step.messages if message.op in REDUCES}
    dtypes = sent.union(*(step.dtypes for step in steps))
    found.dtype = next((name for name in reversed(BANDS) if name in dtypes), "float32")
    found.band = BANDS[found.dtype]
    for number in range(found.num_steps):
        steps, own = [one.steps[number] for one in ranks], [one.steps[number] for one in alone]
        try:
            _compare_step(found, number, steps, own, union(ranks, alone, number))
        except UnlikeError as error:
            found.unknown = str(error)
            break
    return found


def among(ranks: Sequence[Notes]) -> Found:
    """What all ranks should have alike, where no process can have all rows: weights, what they step, and buffers."""
    found = Found(num_steps=min(len(one.steps) for one in ranks))
    for number in range(found.num_steps):
        steps = [one.steps[number] for one in ranks]
        stepped = [[part for part in one.stepped if part.name in one.names] for one in steps]
        for what, parts in (("weights before", [one.weights for one in steps]), ("gradient", stepped)):
            views = wholes(parts)
            firsts = {name: next(one for one in some if one is not None) for name, some in views.items()}
            found.rows += _rows(number, what, views, firsts, len(ranks))
        found.rows += _buffers(number, steps)
    return found


def _compare_step(found: Found, number: int, steps: Sequence[Step], own: Sequence[Step], expected: Union) -> None:
    scales = [one.scale for one in own]
    near = partial(isclose, rel_tol=1e-5 if found.band.same else 1e-2)
    is_common = near(min(scales), max(scales))
    counts = [sum(one.number for backward in step.backwards for one in backward.counted) for step in own]
    is_divided = expected.is_summed and any(scale != 1.0 for scale in scales)
    mean = expected.over_rows(counts) if is_divided else expected
    if is_divided and all(near(scale * count, 1.0) for scale, count in zip(scales, counts, strict=True)):
        expected, is_common = mean, True
    elif is_common and scales[0] != 1.0:
        expected = expected.scaled(scales[0])
    found.unions.append(expected)
    first, num_ranks = wholes([one.weights for one in steps]), len(steps)
    begins = {name: next(one for one in views if one is not None) for name, views in first.items()}
    found.rows += _rows(number, "weights before", first, begins, num_ranks)
    ours = _stepped_gradients(steps)
    found.ours.append(ours)
    names = {name for one in steps for name in one.names}
    wanted = {name: value for name, value in expected.gradient.items() if name in names}
    if not is_common:
        found.clips_by_hand = True
        wanted = _clipped_by_hand(wanted, expected.gradient, own)
    rows = list(_rows(number, "gradient", ours, wanted, num_ranks))
    if expected.is_summed and rows and all(isclose(row.ratio, num_ranks, rel_tol=found.band.different) for row in rows):
        found.by_sum = True
        wanted = {name: value * num_ranks for name, value in wanted.items()}
        rows = list(_rows(number, "gradient", ours, wanted, num_ranks))
    elif is_divided and is_common and mean is not expected and found.differ(rows):
        wanted = {name: value for name, value in mean.gradient.items() if name in names}
        by_rows = list(_rows(number, "gradient", ours, wanted, num_ranks))
        if len(found.differ(by_rows)) < len(found.differ(rows)):
            found.unions[-1], expected, rows = mean, mean, by_rows
        elif all(row.cosine > 1 - CLOSE and isclose(row.ratio, rows[0].ratio, rel_tol=CLOSE) for row in rows):
            why = f"after backward one process divides gradients of a sum over rows by {1 / scales[0]:.4g}, and its "
            why += f"loss is of {', '.join(map(str, counts))} rows, by rank: whether it counts others is not known; "
            raise UnlikeError(f"{why}take rows from a DataLoader, whose batches it is given as the ranks had them")
    found.rows += rows
    found.rows += _norms(number, steps, expected.gradient, num_ranks if found.by_sum else 1)
    found.rows += _all_updates(number, steps, own, begins)
    found.rows += _buffers(number, steps)


def _stepped_gradients(steps: Sequence[Step]) -> Views:
    """What a rank steps without a gradient counts as 0, where it steps all of it."""
    ours = wholes([[part for part in one.gradients if part.name in one.names] for one in steps])
    in_pieces = {part.name for one in steps for part in one.gradients if part.is_flat}
    for rank, one in enumerate(steps):
        for name, part in {part.name: part for part in one.weights if part.is_whole}.items():
            if name in {*one.names} & ours.keys() - in_pieces and ours[name][rank] is None:
                ours[name][rank] = torch.zeros(part.shape, dtype=part.value.dtype)
    return ours


def _all_updates(number: int, steps: Sequence[Step], own: Sequence[Step], begins: Gradient) -> Iterator[Row]:
    """Of each rank beside one process that begins where it does."""
    after = wholes([one.after for one in steps])
    for rank, one in enumerate(own):
        expected = wholes([one.after])
        mine = {name: [views[rank]] for name, views in after.items() if name in expected}
        rests = {name: views[0] for name, views in expected.items() if views[0] is not None}
        yield from _updates(number, rank, mine, rests, begins)


def _rows(number: int, what: str, ours: Views, expected: Gradient, num_ranks: int) -> Iterator[Row]:
    numel = sum(value.numel() for value in expected.values())
    mean = hypot(*map(_norm, expected.values())) / sqrt(max(numel, 1))
    for name in expected | ours:
        # Of the ranks that step it; a gradient that no rank has is one that nobody brought, and counts as 0.
        views = ours.get(name) or [torch.zeros_like(expected[name])] * num_ranks
        for rank, view in enumerate(views):
            if view is not None:
                value = expected[name] if name in expected else torch.zeros_like(view)
                yield _row(number, what, name, rank, view, value, FLOOR * mean * sqrt(value.numel()) + 1e-300)


def _row(number: int, what: str, name: str, rank: int, ours: Tensor, expected: Tensor, least: float) -> Row:
    if ours.dtype == expected.dtype and ours.equal(expected):
        return Row(number, what, name, rank, 1.0, 1.0, 0.0, 0.0)
    away = ours.double() - expected
    norm, others, size = _norm(ours), _norm(expected), _norm(away)
    cosine = (norm**2 + others**2 - size**2) / (2 * norm * others) if norm and others else nan
    ratio = norm / others if others else inf if norm else 1.0
    return Row(number, what, name, rank, ratio, cosine, _norm(away, inf), size / max(others, least))


def _norm(tensor: Tensor, of: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(tensor, of, dtype=torch.float64)) if tensor.numel() else 0.0


def _updates(number: int, rank: int, ours: Views, expected: Gradient, begins: Gradient) -> Iterator[Row]:
    """What a step has changed, against what the same gradients change in one process."""
    for name, value in expected.items():
        view = ours.get(name, [None])[0]
        if view is None or name not in begins:
            continue
        row = _row(number, "weights after", name, rank, view, value, 1e-300)
        if row.relative:
            before = begins[name].double()
            rounding = 16 * torch.finfo(value.dtype).eps * _norm(before)
            away, wanted = _norm(view.double() - value), value.double() - before
            row = _row(number, "weights after", name, rank, view.double() - before, wanted, 1e-300)
            row = row._replace(relative=away / max(_norm(wanted), rounding, 1e-300) if not away <= rounding else 0.0)
        yield row


def _buffers(number: int, steps: Sequence[Step]) -> Iterator[Row]:
    """Those of each rank, when a module is called, against rank 0's."""
    for name, first in steps[0].buffers.items():
        if first.is_floating_point():
            for rank, step in enumerate(steps[1:], 1):
                if (own := step.buffers.get(name)) is not None and own.shape == first.shape:
                    yield _row(number, "buffer", name, rank, own, first, 1e-300)


def _norms(number: int, steps: Sequence[Step], expected: Gradient, scale: int) -> Iterator[Row]:
    """The norm that gradients were clipped to, and what clipping made of them."""
    clips = next((step for step in steps if step.max_norm is not None), None)
    for rank, own in enumerate(steps):
        # A rank that does not clip, though others do, should have.
        step = own if own.clipped or clips is None else clips
        if step.max_norm is None:
            continue
        norm = scale * hypot(*(_norm(expected[name]) for name in {*step.clipped} & expected.keys()))
        if own.norm is not None:
            yield _ratio(number, "norm", rank, own.norm, norm)
        scaled = factor(own.gradients, own.stepped)
        if scaled != 1.0 or not own.clipped:
            yield _ratio(number, "clipping", rank, scaled, min(1.0, step.max_norm / (norm + 1e-6)))


def _ratio(number: int, what: str, rank: int, ours: float, expected: float) -> Row:
    away = abs(ours - expected)
    return Row(number, what, "", rank, ours / (expected or ours or 1.0), 1.0, away, away / (expected or inf))


def _clipped_by_hand(gradient: Gradient, every: Gradient, own: Sequence[Step]) -> Gradient:
    """The gradient scaled as the script scales that of one process: to a largest norm, if that is what it does.

    Raises:
        UnlikeError: it is not.
    """
    norms = [one.scale * hypot(*(_norm(part.value) for part in one.gradients)) for one in own]
    largest = [norm for norm, one in zip(norms, own, strict=True) if one.scale < 1]
    is_clip = all(one.scale <= 1 and not one.clipped for one in own)
    if not is_clip or not isclose(min(largest), max(largest), rel_tol=1e-4):
        why = "between backward and step one process changes gradients unlike on the rows of each rank, about times "
        why += f"{', '.join(f'{one.scale:.4g}' for one in own)}: neither by one number, by one over the rows of a sum, "
        raise UnlikeError(f"{why}nor to a largest norm, so that what it would step on all rows is not known")
    norm = hypot(*map(_norm, every.values()))
    return {name: value * min(1.0, largest[0] / norm) for name, value in gradient.items()}
