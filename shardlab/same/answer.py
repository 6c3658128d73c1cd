"""The answer in lines, each with its word: SAME or DIFFERENT SINCE, CAUSE, WHERE, NEXT, and LOST."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose, isnan

import pandas as pd
import torch

from shardlab.same.causes import causes, in_forward, named, short
from shardlab.same.compare import Found, compare
from shardlab.same.notes import Cleared, Notes, Step, place_by_hand

SAME, DIFFERENT, UNKNOWN, LOST = "SAME", "DIFFERENT SINCE", "CANNOT BE SAID", "LOST"


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        lines: (word, text).
        table: of all comparisons; see ``compare.Row``.
    """

    lines: list[tuple[str, str]]
    table: pd.DataFrame = field(default_factory=lambda: Found().table)

    @property
    def word(self) -> str:
        """The first one: ``SAME``, ``DIFFERENT SINCE`` or ``CANNOT BE SAID``."""
        return self.lines[0][0]

    def __str__(self) -> str:
        return "\n".join(f"{word:<16}{text}" for word, text in self.lines)


def answer(ranks: Sequence[Notes], alone: Sequence[Notes], *, is_together: bool = False) -> Answer:
    """Judge what all processes have noted.

    Args:
        ranks: of each rank.
        alone: of one process on the rows of each.
        is_together: whether that had the rows of all ranks at once; then it is here once for each rank.
    """
    if (said := early(ranks)) is not None:
        return said
    if lines := _unfit(alone, "in one process: ") or _ended(alone, "in one process: "):
        return Answer(lines)
    lost = list(_lost(ranks, place_by_hand(ranks, _shapes(alone))))
    found = compare(ranks, alone)
    found.is_together = is_together
    lines = list(_verdict(found, ranks, alone))
    if lost and lines[0][0] == SAME:  # one process loses as much
        lines = [*lost, ("NOTE", f"what is left is the same: {lines[0][1]}"), *lines[1:]]
    else:
        lines += lost
    return Answer([*lines, *_notes(found, ranks)], found.table)


def early(ranks: Sequence[Notes]) -> Answer | None:
    """What is known without one process; None if that is needed."""
    lines = _apart(ranks) or _unfit(ranks) or _skipped(ranks) or _ended(ranks)
    return Answer([*lines, *_lost(ranks, divided=False)]) if lines else None


def _unfit(processes: Sequence[Notes], where: str = "") -> list[tuple[str, str]]:
    """Why processes cannot be compared."""
    for one in processes:
        if one.refused:
            return [(UNKNOWN, where + one.refused)]
        if any(not name for step in one.steps for name in step.names):
            words = "an optimizer steps tensors that no module has that was called, so their gradients have no names"
            return [(UNKNOWN, where + words), ("NEXT", "give the optimizer the parameters of the model")]
    failed = [(rank, one) for rank, one in enumerate(processes) if one.error and not one.left_by_others]
    for rank, one in failed:
        lines = [(UNKNOWN, f"{where}rank {rank} ends after {len(one.steps)} steps: {one.error}")]
        if where and one.error.startswith("AssertionError"):
            lines.append(("NEXT", "give the arguments that fit one process by --alone, for example --alone '--tp 1'"))
        return lines
    if processes and not any(one.steps for one in processes):
        told = next((one.error for one in processes if one.error), "") or (
            "no step of an optimizer was seen: the script has none, or starts processes itself (mp.spawn); let "
            "torchrun or --ranks start them"
        )
        return [(UNKNOWN, where + told)]
    return []


def _ended(processes: Sequence[Notes], where: str = "") -> list[tuple[str, str]]:
    """A process that has not come to its last step, though all have done the same so far."""
    for rank, one in enumerate(processes):
        if one.error:
            return [(UNKNOWN, f"{where}rank {rank}, after {len(one.steps)} steps: {one.error}")]
    return []


def _apart(ranks: Sequence[Notes]) -> list[tuple[str, str]]:
    """Where ranks do not train the same parameters."""
    shapes = [one.shapes for one in ranks]
    for rank, own in enumerate(shapes):
        # A rank that has failed before its first step may not have come to all of its modules.
        known = own.keys() | shapes[0].keys() if ranks[rank].steps and ranks[0].steps else own.keys() & shapes[0].keys()
        unlike = [name for name in known if own.get(name) != shapes[0].get(name)]
        if unlike:
            name = min(unlike)
            told = " and ".join(
                f"{list(some[name])} on rank {number}" if name in some else f"none on rank {number}"
                for number, some in ((0, shapes[0]), (rank, own))
            )
            why = (
                f"ranks train different parameters, first {name!r}: {told}. One process cannot be both; of stages of a "
                "pipeline, and of modules that are chosen by rank, nothing can be said"
            )
            return [
                (UNKNOWN, why),
                ("NEXT", "let all ranks build the same module, of which DTensor or FSDP divides each"),
            ]
    trained = {name: [name in one.trainable for one in ranks] for name in shapes[0]}
    if frozen := [name for name, on in trained.items() if any(on) and not all(on)]:
        on = ", ".join(str(rank) for rank, trains in enumerate(trained[frozen[0]]) if not trains)
        return [
            (DIFFERENT, f"step 0, in the parameters that train: {frozen[0]} is frozen on rank {on} only"),
            ("CAUSE", f"{len(frozen)} parameters train on some ranks, and are frozen on others"),
            ("NEXT", "freeze on all ranks or on none"),
        ]
    return []


def _skipped(ranks: Sequence[Notes]) -> list[tuple[str, str]]:
    """Where ranks have called backward or step unequally often."""
    for number in range(max(len(one.steps) for one in ranks)):
        counts = [len(one.steps[number].backwards) if number < len(one.steps) else None for one in ranks]
        if len(set(counts)) > 1:
            told = ", ".join("none" if one is None else f"{one}" for one in counts)
            rank = next(rank for rank, one in enumerate(counts) if one != counts[0])
            line = next((short(one.steps[number].line) for one in ranks if number < len(one.steps)), "")
            return [
                (DIFFERENT, f"step {number}, in the number of backwards before it: {told}, by rank"),
                ("CAUSE", f"rank {rank} skips a step or takes micro-batches that others do not"),
                ("WHERE", f"the step at {line}"),
                ("NEXT", "let all ranks decide alike, for example by a flag that is reduced over them"),
            ]
    return []


def _verdict(found: Found, ranks: Sequence[Notes], alone: Sequence[Notes]) -> Iterator[tuple[str, str]]:
    rows = found.different
    # Weights that differ explain other losses; else these say that the process alone had other rows.
    is_by_weights = bool(rows) and rows[0].what == "weights before"
    why = "" if found.unknown or is_by_weights else _other_losses(found, ranks, alone, rows[0].step if rows else None)
    if rows and not why:
        micro = _first_micro_batch(found, rows[0].step)
        worst = max(rows, key=lambda row: row.relative)
        yield (
            DIFFERENT,
            f"step {rows[0].step}{micro}: {rows[0].what} of {named(rows, found, ranks)}; ratio {_ratios(rows)}",
        )
        yield from causes(found, ranks)
        if worst.what == "gradient" and found.dtype in ("bfloat16", "float16"):
            yield "NEXT", "run with --float64 to see it without rounding"
    elif found.unknown:
        yield UNKNOWN, found.unknown
    elif why:
        yield UNKNOWN, why
    elif all(float(value.abs().max()) == 0 for one in found.unions for value in one.gradient.values() if value.numel()):
        yield UNKNOWN, "all gradients are 0 in one process too"
        yield "CAUSE", "a dead run: nothing that trains reaches the loss, or the loss is constant"
        yield "NEXT", "look where the loss is detached from the model"
    elif found.largest > found.band.same:
        yield UNKNOWN, f"differences up to {found.largest:.1e} are within what {found.dtype} may round"
        yield "NEXT", "run with --float64"
    else:
        names = {row.name for row in found.rows if row.name}
        what = f"gradients and steps of {len(names)} parameters in {found.num_steps} steps, to {found.largest:.1e}"
        yield SAME, f"{what}, in {found.dtype}, as in one process on the rows of all {len(ranks)} ranks"


def _ratios(rows: Sequence) -> str:  # type: ignore[type-arg]
    low, high = min(row.ratio for row in rows), max(row.ratio for row in rows)
    cosine = min((row.cosine for row in rows if not isnan(row.cosine)), default=0.0)
    ratios = f"{low:.4g}" if isclose(low, high, rel_tol=1e-3) else f"{low:.4g} to {high:.4g}"
    return f"{ratios}, cosine {cosine:.3f}"


def _first_micro_batch(found: Found, step: int) -> str:
    count = found.unions[step].micro_batches
    return f" ({count} micro-batches)" if count > 1 else ""


def _other_losses(found: Found, ranks: Sequence[Notes], alone: Sequence[Notes], last: int | None) -> str:
    """Why rows or forwards were others in one process; empty if each loss there was the rank's, or a known share."""
    num_ranks = len(ranks)
    tolerance = max(found.band.same, 1e-6) if found.band.same else found.band.different
    for number in range(found.num_steps if last is None else last + 1):
        theirs = torch.tensor([[each.loss for each in one.steps[number].backwards] for one in ranks]).double()
        own = torch.tensor([[each.loss for each in one.steps[number].backwards] for one in alone]).double()
        own = own[:, : theirs.shape[1]]
        shares = torch.tensor(found.unions[number].weights).double()[:, None]
        scales = (1.0, num_ranks, 1 / num_ranks, shares, shares * num_ranks)
        may_be = [own * scale for scale in scales]
        if found.is_together:  # the loss of all rows at once
            theirs, may_be = theirs.sum(0), [own[0], own[0] * num_ranks]
        else:  # or a loss that ranks have reduced before backward
            may_be += [own.sum(0).expand_as(own), own.mean(0).expand_as(own)]
        if not any(torch.allclose(theirs, one, rtol=tolerance, atol=0.0) for one in may_be):
            ratios = (theirs / may_be[0]).reshape(len(theirs), -1)
            rank = int((ratios - 1).abs().amax(1).argmax())
            return (
                f"in step {number} the loss of rank {rank} is {float(ratios[rank][0]):.6g} times that of one process "
                "on the same rows: rows that were not seen, noise, a loss that reads the rank, or a forward in which "
                "ranks exchange activations"
            )
    return ""


def _shapes(alone: Sequence[Notes]) -> dict[str, tuple[int, ...]]:
    return {part.name: part.shape for one in alone for step in one.steps for part in (*step.gradients, *step.after)}


def _lost(ranks: Sequence[Notes], divided: bool) -> Iterator[tuple[str, str]]:
    """Gradients that were brought and never stepped."""
    for rank, one in enumerate(ranks):
        lost = [
            (number, each)
            for number, step in enumerate(one.steps)
            for each in _cleared(step, ranks, number, of_another=False)
        ]
        if lost:
            number, first = lost[0]
            names = {each.name for _, each in lost}
            norm = sum(each.norm**2 for at, each in lost if at == number) ** 0.5
            where = f" at {short(first.line)}" if first.line else ""
            what = f"gradients of {len(names)} parameters, of norm {norm:.4g} on rank {rank}, are cleared{where}"
            yield LOST, f"step {number}: {what} after micro-batch {first.backward}, before any optimizer steps them"
            break
    if not divided and _same_rows(ranks):
        yield LOST, f"all {len(ranks)} ranks are given the same rows: {len(ranks) - 1} of {len(ranks)} are repeated"
    stepped = {name for one in ranks for step in one.steps for name in step.names}
    if stepped and (left := [name for name in ranks[0].trainable if name not in stepped]):
        yield LOST, f"{len(left)} parameters train and no optimizer steps them, first {left[0]!r}"


def _cleared(step: Step, ranks: Sequence[Notes], number: int, *, of_another: bool) -> list[Cleared]:
    """What is cleared before a step, without what other ranks have stepped meanwhile."""
    stepped = {name for one in ranks for known in one.steps[max(number - 1, 0) : number] for name in known.names}
    wanted = [one for one in step.cleared if one.is_of_another == of_another]
    return [one for one in wanted if not (of_another and one.name in stepped)]


def _notes(found: Found, ranks: Sequence[Notes]) -> Iterator[tuple[str, str]]:
    """What one process would do alike, and what is told as what it is."""
    if found.is_together and (gathered := _gathered_alone(ranks[0])):
        yield "NOTE", f"what is gathered at {gathered} brings back no gradient, in one process neither"
    if found.by_sum:
        yield "NOTE", "the loss is a sum over rows, and the ranks' gradients are added: as one process does on all rows"
    elif any(one.is_summed for one in found.unions):
        yield (
            "NOTE",
            (
                "the loss is a sum over rows, of which ranks take the mean: one process on all rows has "
                f"{len(ranks)} times it"
            ),
        )
    if not all(one.is_known for one in found.unions):
        yield (
            "NOTE",
            "of how many rows or tokens each loss is the mean was not seen: all ranks are taken to weigh the same",
        )
    if any(one.uneven for one in found.unions):
        yield "NOTE", "micro-batches with unequal numbers of rows or tokens weigh the same, in one process too"
    kept = [(number, step) for one in ranks for number, step in enumerate(one.steps) for each in step.backwards[:1]
            if each.grew_from]  # fmt: skip
    if kept:
        yield "NOTE", f"gradients of the step before are still there in step {kept[0][0]}: nothing clears them"
    every = [(one.steps[number], number) for one in ranks for number in range(len(one.steps))]
    discarded = {each.name for step, number in every for each in _cleared(step, ranks, number, of_another=True)}
    if discarded:
        yield "NOTE", f"gradients of {len(discarded)} parameters, brought by another optimizer's loss, are discarded"


def _gathered_alone(one: Notes) -> str:
    """The line that gathers in a forward, of whose backward nothing is sent; empty if there is none."""
    for step in one.steps:
        sent = in_forward(step)
        if all(message.op == "all_gather" for message in sent):
            return ", ".join({short(message.line): None for message in sent})
    return ""


def _same_rows(ranks: Sequence[Notes]) -> bool:
    # Ranks that divide a model by DTensor share rows by design.
    steps = [step for one in ranks for step in one.steps]
    if any(one.caller == "dtensor" and one.backward < len(step.backwards) for step in steps for one in step.messages):
        return False  # those after the last backward are of the gradients' norm

    def given(one: Notes) -> list[torch.Tensor]:
        calls = [call for step in one.steps for some in step.calls.values() for call in some]
        return [tensor for call in calls for tensor in call.given if tensor is not None]

    first = given(ranks[0])
    return bool(first) and all(
        len(other := given(one)) == len(first) and all(map(torch.equal, first, other)) for one in ranks[1:]
    )
