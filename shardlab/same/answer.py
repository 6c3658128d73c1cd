"""The answer in lines, each with its word: SAME or DIFFERENT SINCE, CAUSE, WHERE, NEXT, and LOST."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import hypot, isclose, isnan

import pandas as pd
import torch

from shardlab.same.causes import Line, causes, in_forward, named, short
from shardlab.same.coefficients import listed
from shardlab.same.compare import Found, compare
from shardlab.same.notes import Cleared, Notes, Step, UnlikeError, same_tensors
from shardlab.same.wholes import place_by_hand

SAME, DIFFERENT, UNKNOWN, LOST = "SAME", "DIFFERENT SINCE", "CANNOT BE SAID", "LOST"
DEAD = "all gradients are 0 in one process too"


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        lines: (word, text).
        table: of all comparisons; see ``compare.Row``.
    """

    lines: list[Line]
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
    where = f"in one process{' with the rows of all ranks at once' if is_together else ''}: "
    if lines := _unfit(alone, where) or _ended(alone, where):
        return Answer(lines)
    shapes = {part.name: part.shape for one in alone for step in one.steps for part in (*step.gradients, *step.after)}
    divided, found = False, Found()
    try:
        divided = place_by_hand(ranks, shapes)
        found = compare(ranks, alone)
        found.is_together = is_together
        lines = list(_verdict(found, ranks, alone, divided))
    except UnlikeError as error:
        lines = [(UNKNOWN, str(error))]
    lost = list(_lost(ranks, divided))
    if lost and lines[0][0] == SAME:  # one process loses as much
        lines = [*lost, ("NOTE", f"what is left is the same: {lines[0][1]}"), *lines[1:]]
    elif lost:
        lines = [*lost, ("NOTE", f"nothing is left: {DEAD}")] if lines[0][1] == DEAD else lines + lost
    return Answer([*lines, *_notes(found, ranks, alone, divided)], found.table)


def early(ranks: Sequence[Notes]) -> Answer | None:
    """What is known without one process; None if that is needed."""
    lines = _apart(ranks) or _unfit(ranks) or _skipped(ranks) or _ended(ranks)
    return Answer([*lines, *_lost(ranks, divided=False)]) if lines else None


def _unfit(processes: Sequence[Notes], where: str = "") -> list[Line]:
    """Why processes cannot be compared."""
    for one in processes:
        if one.refused:
            return [(UNKNOWN, where + one.refused)]
        if any(not name for step in one.steps for name in step.names):
            words = "an optimizer steps tensors that no module has that was called, so their gradients have no names"
            advice = "give the optimizer the parameters of the model, as they are when all wrappers are in place"
            return [(UNKNOWN, where + words), ("NEXT", advice)]
    for rank, one in enumerate(processes):
        if one.error and not one.left_by_others:
            lines = [(UNKNOWN, f"{where}rank {rank} ends after {len(one.steps)} steps: {one.error}")]
            is_of_arguments = where and one.error.startswith("AssertionError")
            advice = "give the arguments of one process by --alone, for example --alone '--tp 1'"
            return [*lines, ("NEXT", advice)] if is_of_arguments else lines
    if any(step.backwards for one in processes for step in one.steps):
        return []
    if any(one.steps for one in processes):
        words = "no backward() was seen before a step, so rows and losses are not known: what torch.autograd.grad or "
        return [(UNKNOWN, f"{where}{words}torch.func.grad return is not compared"), ("NEXT", "call backward()")]
    words = "no step of an optimizer was seen: the script has none, or starts processes itself (mp.spawn); "
    words += "let torchrun or --ranks start them"
    return [(UNKNOWN, where + next((one.error for one in processes if one.error), words))]


def _ended(processes: Sequence[Notes], where: str = "") -> list[Line]:
    """A process that has not come to its last step, though all have done the same so far."""
    ends = [(rank, one) for rank, one in enumerate(processes) if one.error]
    gone = [str(rank) for rank, one in enumerate(processes) if not one.error and not one.has_enough]
    if gone and ends and ends[0][1].left_by_others and ends[0][1].has_ended:
        rank, one = ends[0]
        words = f"after {len(one.steps)} steps rank {rank} waits for rank {', '.join(gone)}, whose script has ended"
        advice = "give all ranks as many batches, or let them decide alike when to end, by a flag that they reduce"
        return [(UNKNOWN, where + words), ("NEXT", advice)]
    return [(UNKNOWN, f"{where}rank {rank}, after {len(one.steps)} steps: {one.error}") for rank, one in ends[:1]]


def _apart(ranks: Sequence[Notes]) -> list[Line]:
    """Where ranks do not train the same parameters."""
    shapes = [one.shapes for one in ranks]
    for rank, own in enumerate(shapes):
        # A rank that has failed before its first step may not have come to all of its modules.
        known = own.keys() | shapes[0].keys() if ranks[rank].steps and ranks[0].steps else own.keys() & shapes[0].keys()
        if unlike := [name for name in known if own.get(name) != shapes[0].get(name)]:
            name = min(unlike)
            first, other = (list(some[name]) if name in some else "none" for some in (shapes[0], own))
            why = f"ranks train different parameters, first {name!r}: {first} on rank 0 and {other} on rank {rank}. "
            why += "One process cannot be both; of stages of a pipeline, and of modules that are chosen by rank, "
            advice = "let all ranks build the same module, of which DTensor or FSDP divides each"
            return [(UNKNOWN, f"{why}nothing can be said"), ("NEXT", advice)]
    called = [name for name in shapes[0] if all(name in own for own in shapes)]
    trained = {name: [name in one.trainable for one in ranks] for name in called}
    if frozen := [name for name, on in trained.items() if any(on) and not all(on)]:
        on = ", ".join(str(rank) for rank, trains in enumerate(trained[frozen[0]]) if not trains)
        since = f"step 0, in the parameters that train: {frozen[0]} is frozen on rank {on} only"
        cause = f"{len(frozen)} parameters train on some ranks, and are frozen on others"
        return [(DIFFERENT, since), ("CAUSE", cause), ("NEXT", "freeze on all ranks or on none")]
    return []


def _skipped(ranks: Sequence[Notes]) -> list[Line]:
    """Where ranks have called backward or step unequally often."""
    if idle := [rank for rank, one in enumerate(ranks) if not one.steps]:
        words = f"rank {listed(idle)} takes no step, and others do: where these send it their weights that may be right"
        return [(UNKNOWN, words), ("NEXT", "let each rank step gradients that are reduced over all")]
    for number in range(max(len(one.steps) for one in ranks)):
        steps = [one.steps[number] if number < len(one.steps) else None for one in ranks]
        counts = ["none" if one is None else str(len(one.backwards)) for one in steps]
        if len(set(counts)) > 1:
            rank = next(rank for rank, one in enumerate(counts) if one != counts[0])
            return [
                (DIFFERENT, f"step {number}, in the number of backwards before it: {', '.join(counts)}, by rank"),
                ("CAUSE", f"rank {rank} skips a step, takes one more, or takes micro-batches that others do not"),
                ("WHERE", f"the step at {next(short(one.line) for one in steps if one is not None)}"),
                ("NEXT", "let all ranks decide alike, for example by a flag that is reduced over them"),
            ]
        which = [one.optimizer for one in steps if one is not None]
        if other := next((rank for rank, one in enumerate(which) if one != which[0]), 0):
            return [
                (DIFFERENT, f"step {number}, in the number of the optimizer that steps: {listed(which)}, by rank"),
                ("CAUSE", f"rank {other} steps by another optimizer than rank 0: one that is made anew has no state"),
                ("WHERE", f"the step at {short(ranks[other].steps[number].line)}"),
                ("NEXT", "make, load and step optimizers alike on all ranks"),
            ]
    return []


def _verdict(found: Found, ranks: Sequence[Notes], alone: Sequence[Notes], divided: bool) -> Iterator[Line]:
    rows, why = found.different, found.unknown
    # Weights that differ explain other losses; else these say that the process alone had other rows.
    if not why and not (rows and rows[0].what == "weights before"):
        last = rows[0].step if rows else found.num_steps - 1
        why = next(filter(None, (_other_losses(found, ranks, alone, one, divided) for one in range(last + 1))), "")
    if rows and why == found.unknown:
        count = found.unions[rows[0].step].micro_batches
        since = f"step {rows[0].step}{f' ({count} micro-batches)' if count > 1 else ''}: {rows[0].what}"
        yield DIFFERENT, f"{since} of {named(rows, found, ranks)}; ratio {_ratios(rows)}"
        yield from causes(found, ranks)
        if rows[0].what == "gradient" and found.dtype in ("bfloat16", "float16"):
            yield "NEXT", "run with --float64 to see it without rounding"
    elif why:
        yield UNKNOWN, why
    elif all(float(value.abs().max()) == 0 for one in found.unions for value in one.gradient.values() if value.numel()):
        yield UNKNOWN, DEAD
        yield "CAUSE", "a dead run: nothing that trains reaches the loss, or the loss is constant"
        yield "NEXT", "look where the loss is detached from the model"
    elif found.largest > found.band.same:
        yield UNKNOWN, f"differences up to {found.largest:.1e} are within what {found.dtype} may round"
        yield "NEXT", "run with --float64"
    else:
        names = {row.name for row in found.rows if row.what == "gradient"}
        compared = "gradients and steps" if any(row.what == "weights after" for row in found.rows) else "gradients"
        what = f"{compared} of {len(names)} parameters in {found.num_steps} steps, to {found.largest:.1e}"
        yield SAME, f"{what}, in {found.dtype}, as in one process on the rows of all {len(ranks)} ranks"


def _ratios(rows: Sequence) -> str:  # type: ignore[type-arg]
    low, high = min(row.ratio for row in rows), max(row.ratio for row in rows)
    cosine = min((row.cosine for row in rows if not isnan(row.cosine)), default=0.0)
    return f"{low:.4g}{'' if isclose(low, high, rel_tol=1e-3) else f' to {high:.4g}'}, cosine {cosine:.3f}"


def _other_losses(found: Found, ranks: Sequence[Notes], alone: Sequence[Notes], number: int, divided: bool) -> str:
    """Why rows or forwards were others in one process; empty if each loss there was the rank's, or a known share."""
    losses = [[[each.loss for each in one.steps[number].backwards] for one in some] for some in (ranks, alone)]
    theirs, own = (torch.tensor(some, dtype=torch.float64) for some in losses)
    own = own[:, : theirs.shape[1]]
    known = found.unions[number]
    shares = torch.tensor([[known.weight(r, m) for m in range(own.shape[1])] for r in range(len(ranks))]).double()
    may_be = [own * scale for scale in (1.0, len(ranks), len(ranks) ** 2, 1 / len(ranks), shares, shares * len(ranks))]
    if found.is_together:  # the loss of all rows at once
        theirs, may_be = theirs.sum(0), [own[0] * len(ranks) ** power for power in (0, 1, 2)]
    else:  # or a loss that ranks have reduced before backward
        may_be += [own.sum(0).expand_as(own), own.mean(0).expand_as(own)]
    tolerance = max(found.band.same, 1e-6) if found.band.same else found.band.different
    # Of each micro-batch all ranks' by the same rule: what scales one rank's alone is no known share.
    near = torch.stack([torch.isclose(theirs, one, tolerance, 0.0) for one in may_be])
    if (near if found.is_together else near.all(1)).any(0).all():
        return ""
    ratios = (theirs / may_be[0]).reshape(len(theirs), -1)
    rank, micro = divmod(int((ratios - 1).abs().argmax()), ratios.shape[1])
    may = "rows that were not seen, noise, a loss that reads the rank, or a forward in which ranks exchange activations"
    if (other := 1 if divided else _divides_by_dtensor(ranks)) and not all(_given_alike([ranks[0], ranks[other]])):
        may = f"ranks 0 and {other} divide parameters and are given different rows, or {may}"
    elif divided:
        lines = dict.fromkeys(short(one.line) for step in ranks[0].steps for one in in_forward(step))
        may += f" at {', '.join(lines)} (a bias that each of them adds counts several times)"
    if any(one.steps[number].is_moved for one in ranks):
        may = f"weights that the script moves between two backwards by a rank's own gradients, as SAM does, or {may}"
    times = f"{float(ratios[rank][micro]):.6g} times that of one process on the same rows"
    return f"in step {number} the loss of rank {rank} is {times}: {may}"


def _lost(ranks: Sequence[Notes], divided: bool) -> Iterator[Line]:
    """Gradients that were brought and never stepped."""
    every = [(rank, number, step) for rank, one in enumerate(ranks) for number, step in enumerate(one.steps)]
    for rank, number, step in every:
        if lost := _cleared(step, ranks, number, of_another=False):
            where = f" at {short(lost[0].line)}" if lost[0].line else ""
            what = _norm_of([(each.name, each.norm) for each in lost], rank)
            when = f"are cleared{where} after micro-batch {lost[0].backward}, before any optimizer steps them"
            yield LOST, f"step {number}: {what}, {when}"
            break
    for rank, number, step in every:
        if step.unreduced:
            why = "are not reduced when they are stepped: set_requires_gradient_sync(True) has to come before"
            yield LOST, f"step {number}: {_norm_of(list(step.unreduced.items()), rank)}, {why}"
            break
    repeated = [] if divided else _repeated(ranks)
    if repeated and all(repeated):
        yield LOST, f"all {len(ranks)} ranks are given the same rows: {len(ranks) - 1} of {len(ranks)} add nothing"
    stepped = {name for _, _, step in every for name in step.names}
    if stepped and (left := [name for name in ranks[0].trainable if name not in stepped]):
        yield LOST, f"{len(left)} parameters train and no optimizer steps them, first {left[0]!r}"


def _norm_of(norms: Sequence[tuple[str, float]], rank: int) -> str:
    norm = hypot(*(one for _, one in norms))
    return f"gradients of {len(dict(norms))} parameters, of norm {norm:.4g} on rank {rank}"


def _cleared(step: Step, ranks: Sequence[Notes], number: int, *, of_another: bool) -> list[Cleared]:
    """What is cleared before a step, without what other ranks have stepped meanwhile."""
    stepped = {name for one in ranks for known in one.steps[max(number - 1, 0) : number] for name in known.names}
    wanted = [one for one in step.cleared if one.is_of_another == of_another]
    return [one for one in wanted if not (of_another and one.name in stepped)]


def _notes(found: Found, ranks: Sequence[Notes], alone: Sequence[Notes], divided: bool) -> Iterator[Line]:
    """What one process would do alike, and what is told as what it is."""
    every = [(step, number) for one in ranks for number, step in enumerate(one.steps)]
    discarded = {each.name for step, number in every for each in _cleared(step, ranks, number, of_another=True)}
    # Of what another optimizer steps the gradients may be cleared before its next backward.
    kept = [number for step, number in every for one in step.backwards[:1] if one.grew_from.keys() & set(step.names)]
    sent = next(filter(None, (in_forward(step) for step in ranks[0].steps)), [])
    gathers = found.is_together and all(one.op == "all_gather" for one in sent)
    lines = ", ".join(dict.fromkeys(short(one.line) for one in sent))
    added = "the loss is a sum over rows, "
    is_mean_of_sums = any(one.is_summed for one in found.unions)
    is_mean_of_sums &= not (found.by_sum or found.unknown or found.different)
    unseen, uneven = not all(one.is_known for one in found.unions), any(one.uneven for one in found.unions)
    repeated = [] if divided else _repeated(ranks)
    told = {
        f"in {repeated.count(True)} of {len(repeated)} forwards all ranks are given the same rows: do they draw by "
        "one seed?": len({*repeated}) == 2,
        f"what is gathered at {lines} brings back no gradient, in one process neither": gathers and lines,
        f"{added}and the ranks' gradients are added: as one process does on all rows": found.by_sum,
        f"{added}of which ranks take the mean: one process on all rows has {len(ranks)} times it": is_mean_of_sums,
        "of how many rows or tokens each loss is the mean was not seen: all ranks are taken to weigh the same": unseen,
        "micro-batches with unequal numbers of rows or tokens weigh the same, in one process too": uneven,
        f"gradients of the step before are still there in step {min(kept, default=0)}: nothing clears them": kept,
        f"gradients of {len(discarded)} parameters, brought by another optimizer's loss, are discarded": discarded,
        _other_options(ranks[0], alone[0]): True,
    }
    yield from (("NOTE", text) for text, holds in told.items() if holds and text)


def _other_options(rank: Notes, alone: Notes) -> str:
    """An option by which one process would have stepped and ranks do not, as after a scheduler's step for each rank."""
    for number, steps in enumerate(zip(rank.steps, alone.steps, strict=False)):
        for theirs, own in zip(*(one.options for one in steps), strict=False):
            for key in (one for one in theirs if one in own and own[one] != theirs[one]):
                known = f"{key} is {theirs[key]} on rank 0 and {own[key]} in one process in step {number}"
                return f"{known}: it depends on the number of ranks, and steps are compared with that of rank 0"
    return ""


def _repeated(ranks: Sequence[Notes]) -> list[bool]:
    """As ``_given_alike``; empty where ranks divide a model by DTensor, and share rows by design."""
    return [] if _sends_by_dtensor(ranks) else _given_alike(ranks)


def _sends_by_dtensor(ranks: Sequence[Notes]) -> bool:
    """Whether DTensor sends in forward or backward; what it sends after these is of the gradients' norm."""
    every = ((step, sent) for one in ranks for step in one.steps for sent in step.messages)
    return any(sent.caller == "dtensor" and sent.backward < len(step.backwards) for step, sent in every)


def _divides_by_dtensor(ranks: Sequence[Notes]) -> int:
    """The first rank that computes with other pieces than rank 0; 0 if there is none."""
    places = [{part.key for part in one.steps[0].weights} for one in ranks]
    return next((rank for rank, own in enumerate(places) if own != places[0] and _sends_by_dtensor(ranks)), 0)


def _given_alike(ranks: Sequence[Notes]) -> list[bool]:
    """Of each forward that is given tensors, whether all ranks are given the same."""
    calls = [[call for step in one.steps for some in step.calls.values() for call in some] for one in ranks]
    given = [[{at: one for at, one in enumerate(call.given) if one is not None} for call in some] for some in calls]
    rows = [[one for one in some if one] for some in given]
    first, *others = rows
    if any(len(one) != len(first) for one in others):
        return []
    return [all(same_tensors(one, other) for other in some) for one, *some in zip(first, *others, strict=True)]
