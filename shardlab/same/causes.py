"""Which cause a difference has: from the coefficients of the ranks' gradients, and from what was sent.

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

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.same.coefficients import Mixture, mixture
from shardlab.same.compare import REDUCES, Found, Row
from shardlab.same.notes import Message, Notes, Step, wholes
from shardlab.same.union import Gradient, Union

LISTED = 3
_CALLERS = {"ddp": "DDP", "autograd": "DDP", "fsdp": "FSDP"}  # C++ in a backward is DDP


class Cause(NamedTuple):
    """Where a difference comes from, the line of the script, and what to do."""

    reason: str
    where: str
    advice: str


def causes(found: Found, ranks: Sequence[Notes]) -> list[tuple[str, str]]:
    """Lines CAUSE, WHERE and NEXT of the first difference."""
    rows = found.different
    of = {"gradient": _of_gradients, "norm": _of_norm, "clipping": _of_norm, "weights after": _of_update}
    known = of.get(rows[0].what, _of_what_differs_before)(found, ranks, rows)
    return [line for one in known for line in zip(("CAUSE", "WHERE", "NEXT"), one, strict=True)]


def _of_what_differs_before(_: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    """Weights or buffers that are not rank 0's when a module is called."""
    step, is_buffer = rows[0].step, rows[0].what == "buffer"
    kind = f"{'buffers' if is_buffer else 'parameters'} that start different"
    advice = "broadcast those of rank 0 before training, or seed ranks alike before the model is built"
    if step and is_buffer:
        kind = "buffers that drift"
        advice = "send rank 0's to all (DDP does, with broadcast_buffers), or reduce what they are computed from"
    elif step and (apart := _options_apart(ranks, step - 1)):
        kind, advice = f"{apart}, so weights drift apart", "give the optimizers of all ranks the same options"
    elif step:
        kind = "stale weights"
        advice = "step all parameters on every rank, or send each rank what their owners have stepped"
    when = "before the first step" if step == 0 else f"before step {step}"
    who = _listed(sorted({row.rank for row in rows}))
    reason = f"{kind}: {_first(rows)} of rank {who} are not rank 0's {when}"
    return [Cause(reason, f"the first forward of step {step}", advice)]


def named(rows: Sequence[Row], found: Found, ranks: Sequence[Notes]) -> str:
    """Which parameters differ, on which ranks: all, only the tied ones, only those that are whole on every rank."""
    names = list(dict.fromkeys(row.name for row in rows))
    every = list(dict.fromkeys(row.name for row in found.rows if (row.step, row.what) == (rows[0].step, rows[0].what)))
    on = sorted({row.rank for row in rows})
    ranks_in_words = "" if len(on) == len(ranks) or len(on) > 1 else f" on rank {on[0]} only"
    if not names[0]:
        return f"the norm of all gradients{ranks_in_words}"
    parts = [part for one in ranks for part in one.steps[rows[0].step].weights]
    whole = {part.name for part in parts if part.is_whole} - {part.name for part in parts if not part.is_whole}
    tied = set(ranks[0].tied)
    kinds = {"tied": tied, "replicated": whole, "sharded": set(every) - whole}
    if len(names) == len(every):
        return f"all {len(every)} parameters{ranks_in_words}"
    kind = next((kind for kind, members in kinds.items() if set(names) == members & set(every)), "")
    listed = _first(rows)
    return f"{listed}{f' (only the {kind} ones)' if kind else f' ({len(names)} of {len(every)})'}{ranks_in_words}"


def _of_gradients(found: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    step, expected = rows[0].step, found.unions[rows[0].step]
    names, on = list(dict.fromkeys(row.name for row in rows)), sorted({row.rank for row in rows})
    if clipped := _clipped_apart(found, ranks, step):
        return clipped
    said: list[Cause] = []
    for group, mixed in _grouped(found, expected, step, names, on[0]):
        messages = [one for one in ranks[on[0]].steps[step].messages if set(group) & set(one.names)]
        reason, advice = _said(mixed, expected, on[0], len(ranks), _group_sizes(ranks, step), _times_sent(messages))
        if found.is_together and not mixed.explains:
            messages = in_forward(ranks[on[0]].steps[step])
            reason = "what ranks exchange in forward brings back no gradient, or another one than in one process"
            advice = "exchange by torch.distributed.nn.functional, which has a backward; let each row's loss count once"
        only = "" if len(group) == len(names) else f" ({_some(group)})"
        said.append(Cause(reason + only, _where(ranks, step, on[0], group, messages), advice))
    return said


def _clipped_apart(found: Found, ranks: Sequence[Notes], step: int) -> list[Cause]:
    """Where each rank scales what it has by the norm of that alone; empty if none does."""
    noted = [one.steps[step] for one in ranks]
    reason = advice = ""
    stepped = wholes([one.stepped for one in noted])
    if stepped and not _agree(found.ours[step]) and _agree(stepped):
        reason = "clipped before they are reduced: each rank scales its own gradient by the norm of that alone"
        advice = "reduce gradients first, then clip"
    elif found.clips_by_hand and (norm := _own_norm(noted, found.unions[step].gradient)):
        reason = f"the norm of its own pieces: every rank scales these to a norm of {norm:.4g}"
        advice = "add up the squares over all ranks that hold pieces, then take the root"
    where = f"between backward and the step at {short(noted[0].line)}"
    return [Cause(reason, where, advice)] if reason else []


def _agree(views: dict[str, list[Tensor | None]]) -> bool:
    """Whether all ranks have the same."""
    held = [[one for one in some if one is not None] for some in views.values()]
    return all(torch.allclose(one, some[0], rtol=1e-4) for some in held for one in some[1:])


def _own_norm(noted: Sequence[Step], expected: Gradient) -> float:
    """The norm to which each rank has scaled its pieces of the right gradient; 0 if they are nothing of the kind."""
    reached = []
    for step in noted:
        own = [(part.value.double(), part.of(expected[part.name])) for part in step.gradients if part.name in expected]
        size = sum(float(right.square().sum()) for _, right in own)
        factor = sum(float((mine * right).sum()) for mine, right in own) / size if size else 0.0
        away = sum(float((mine - factor * right).square().sum()) for mine, right in own)
        if away > 1e-4 * factor**2 * size:
            return 0.0
        reached.append(factor * size**0.5)
    return reached[0] if max(reached) < min(reached) * 1.01 else 0.0


def _grouped(
    found: Found, expected: Union, step: int, names: Sequence[str], rank: int
) -> Iterator[tuple[list[str], Mixture]]:
    """Parameters whose gradients are made alike: together if one mixture explains all, else each by its own."""
    ours = {name: value for name in names if (value := _view(found, step, name, rank)) is not None}
    known = [name for name in names if name in ours]
    absent = [name for name in names if name not in ours]
    if known:
        together = mixture(ours, expected, known)
        if together.explains or len(known) == 1:
            yield known, together
        else:
            groups: dict[tuple[float, ...], list[str]] = {}
            for name in known:
                groups.setdefault(mixture(ours, expected, [name]).key, []).append(name)
            # Small parameters have too few elements to be told apart: they go with the group that explains them.
            for group in sorted(groups.values(), key=len, reverse=True)[:LISTED]:
                yield group, mixture(ours, expected, group)
    if absent:
        yield absent, Mixture(dict.fromkeys(expected.brought, 0.0), 0.0, True)


def _view(found: Found, step: int, name: str, rank: int) -> Tensor | None:
    views = found.ours[step].get(name)
    return None if views is None else views[rank]


def in_forward(step: Step) -> list[Message]:
    """What the script itself sends before a backward."""
    return [one for one in step.messages if not one.caller and one.backward < len(step.backwards)]


def _times_sent(messages: Sequence[Message]) -> int:
    """How often the script reduces a gradient after one backward, at most."""
    counts = Counter((name, one.backward) for one in messages if one.op in REDUCES for name in one.names)
    return max(counts.values(), default=0)


def _said(
    mixed: Mixture, expected: Union, rank: int, num_ranks: int, sizes: Sequence[int], times_sent: int = 0
) -> tuple[str, str]:
    """What coefficients mean, and what to do."""
    keys = list(mixed.of)
    own = [key for key in keys if key[0] == rank]
    others = [key for key in keys if key[0] != rank]
    if not mixed.explains:
        return (
            f"no sum of the ranks' gradients explains them ({mixed.residual:.0%} is left): other rows, other weights, "
            "or values that were changed one by one",
            "look at what changes gradients between backward and step; run with --float64 to rule out rounding",
        )
    if mixed.all_near(0.0):
        return "no gradient arrives: it is 0 or None at the step", "look where gradients are cleared, or detached"
    if expected.is_counted and _is_mean_of_means(mixed, expected, num_ranks):
        shares = ", ".join(f"{one:.3g}" for one in expected.weights)
        return (
            f"a mean of means: every rank's mean weighs the same, and ranks have {shares} of the rows or tokens",
            "sum over rows on each rank, and divide by the number of all ranks' rows, reduced over the ranks",
        )
    common = mixed.common()
    if common is not None:
        if times_sent > 1 and isclose(common, num_ranks ** (times_sent - 1), rel_tol=0.02):
            return f"times {common:.4g}: reduced {times_sent} times", "reduce each gradient once, a tied one too"
        return _factor_said(common, num_ranks, expected.micro_batches, sizes)
    if not mixed.is_unique:
        return (
            "the ranks' gradients are too alike to be told apart: ranks have the same rows, or rows that differ little",
            "give each rank rows of its own",
        )
    if others and mixed.all_near(0.0, others) and (kept := mixed.common(own)) is not None:
        scaled = "undivided" if isclose(kept, num_ranks, rel_tol=0.02) else f"times {kept / num_ranks:.3g}"
        return (
            f"not reduced: rank {rank} steps the gradient of its own rows alone, {scaled}",
            "reduce these gradients over the ranks before the step: the last backward outside no_sync(), and the "
            "wrapped model called, not the module inside",
        )
    return _micro_batches_said(mixed, rank, num_ranks) or _ranks_said(mixed, num_ranks)


def _micro_batches_said(mixed: Mixture, rank: int, num_ranks: int) -> tuple[str, str] | None:
    """What coefficients that differ between micro-batches mean; None if they do not, or nothing that is known."""
    keys = list(mixed.of)
    count = max(micro for _, micro in keys) + 1
    lost = {micro for micro in range(count) if mixed.all_near(0.0, [key for key in keys if key[1] == micro])}
    others = {micro: [key for key in keys if key[1] == micro and key[0] != rank] for micro in range(count)}
    alone = {micro for micro in range(count) if mixed.all_near(0.0, others[micro])} - lost
    kept = mixed.common([key for key in keys if key[1] not in lost])
    if lost and kept is not None:
        words = "" if isclose(kept, 1.0, rel_tol=0.02) else f", times {kept:.3g}"
        return (
            f"only {_micro_batches(set(range(count)) - lost, count)} left{words}: what the others brought is lost",
            "clear gradients once a step, and not before each backward",
        )
    if alone and len(alone) < count:
        return (
            f"only {_micro_batches(set(range(count)) - alone - lost, count)} reduced: of the others, rank {rank} has "
            "its own alone",
            "reduce what has been accumulated, once, after the last micro-batch; leave no_sync() before its forward",
        )
    last = count - 1
    if last and all(
        isclose(mixed.of[key], mixed.of.get((key[0], last), 0.0) * num_ranks ** (last - key[1]), rel_tol=0.05)
        for key in keys
    ):
        return (
            f"reduced again in every micro-batch: the first one counts {num_ranks}^{last} times",
            "reduce once a step, after the last micro-batch",
        )
    return None


def _micro_batches(numbers: set[int], count: int) -> str:
    """For example: the last micro-batch of 4 is."""
    if numbers == {count - 1}:
        return f"the last micro-batch of {count} is"
    words = "micro-batch" if len(numbers) == 1 else "micro-batches"
    return f"{words} {_listed(sorted(numbers))} of {count} {'is' if len(numbers) == 1 else 'are'}"


def _ranks_said(mixed: Mixture, num_ranks: int) -> tuple[str, str]:
    """What coefficients that differ between ranks mean."""
    keys = list(mixed.of)
    missing = [one for one in range(num_ranks) if mixed.all_near(0.0, [key for key in keys if key[0] == one])]
    if missing:
        rest = [key for key in keys if key[0] not in missing]
        kept = mixed.common(rest)
        others_count = "" if kept is None else f", the others count {kept:.3g} times"
        return (
            f"the rows of rank {_listed(missing)} are missing{others_count}: "
            "the message goes over a part of the ranks, or that rank sends zeros",
            "reduce over the group of all ranks that have rows of their own",
        )
    listed = ", ".join(f"rank {key[0]} micro-batch {key[1]}: {one:.3g}" for key, one in list(mixed.of.items())[:6])
    return f"rows count otherwise than once: {listed}", "compare with what each line before the step multiplies by"


def _factor_said(factor: float, num_ranks: int, micro_batches: int, sizes: Sequence[int]) -> tuple[str, str]:
    """A factor that all have in common; what it may be of, each said."""
    may_be = []
    if isclose(factor, num_ranks, rel_tol=0.02):
        may_be.append((f"added over {num_ranks} ranks and not divided", "divide by the number of ranks, once"))
    if isclose(factor, 1 / num_ranks, rel_tol=0.02):
        may_be.append(
            (f"divided by the {num_ranks} ranks twice", "divide by the number of ranks once; DDP and FSDP do")
        )
    if micro_batches > 1 and isclose(factor, micro_batches, rel_tol=0.02):
        may_be.append((f"not divided by the {micro_batches} micro-batches", "divide each loss by their number"))
    if micro_batches > 1 and isclose(factor, 1 / micro_batches, rel_tol=0.02):
        may_be.append((f"divided by the {micro_batches} micro-batches twice", "divide by their number once"))
    for size in sizes:
        if size != num_ranks and isclose(factor, size, rel_tol=0.02):
            may_be.append((f"not averaged over an axis of {size} ranks", "divide by its size, too"))
        if size != num_ranks and isclose(factor, 1 / size, rel_tol=0.02):
            may_be.append((f"averaged over an axis of {size} ranks over which it should not be", "divide without it"))
    if not may_be:
        return f"times {factor:.4g}, all alike", "look what the loss or the gradient is multiplied by"
    return f"times {factor:.4g}: " + ", or ".join(one for one, _ in may_be), "; or ".join(one for _, one in may_be)


def _is_mean_of_means(mixed: Mixture, expected: Union, num_ranks: int) -> bool:
    return all(
        isclose(one * expected.weights[rank], 1 / num_ranks, rel_tol=0.02) for (rank, _), one in mixed.of.items()
    )


def _group_sizes(ranks: Sequence[Notes], step: int) -> list[int]:
    return sorted({len(one.ranks) for rank in ranks for one in rank.steps[step].messages})


def _where(ranks: Sequence[Notes], step: int, rank: int, names: Sequence[str], messages: Sequence[Message]) -> str:
    """The line that sent, or that should have."""
    noted = ranks[rank].steps[step]
    if messages:
        lines = dict.fromkeys(
            f"{short(one.line)} ({one.op} over {len(one.ranks)} ranks, {one.dtype})" for one in messages
        )
        return "; ".join(lines)
    backward = short(noted.backwards[-1].line) if noted.backwards else short(noted.line)
    reduced = [one for one in noted.messages if one.op in REDUCES]
    sent = [one for one in reduced if one.caller in _CALLERS]
    if any(set(names) & set(one.names) for other in ranks for one in other.steps[step].messages):
        return f"rank {rank} sends no message with them; others do; backward at {backward}"
    if sent:
        callers = ", ".join(dict.fromkeys(_CALLERS[one.caller] for one in sent))
        return f"backward at {backward}, which reduces by {len(sent)} messages of {callers}"
    others = [one for one in reduced if not one.caller]
    if others:
        return f"{short(others[0].line)} ({others[0].op}); backward at {backward}, step at {short(noted.line)}"
    return f"no message between backward at {backward} and the step at {short(noted.line)}"


def _of_norm(found: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    row = rows[0]
    step = ranks[row.rank].steps[row.step]
    own = sum(float(part.value.double().square().sum()) for part in step.gradients) ** 0.5
    whole = found.unions[row.step].gradient
    norm = sum(float(whole[name].square().sum()) for name in set(step.clipped) & whole.keys()) ** 0.5
    holds_pieces = any(not part.is_whole for part in step.gradients)
    used = step.norm if step.norm is not None else norm * row.ratio
    reason = f"the norm that gradients are clipped to is {row.ratio:.4g} times that of all of them"
    if holds_pieces and step.norm is not None and isclose(used, own, rel_tol=1e-3):
        reason = f"the norm of its own pieces: rank {row.rank} clips to {used:.4g}, and all of them have {norm:.4g}"
    elif row.what == "clipping":
        reason = f"clipping scales by {row.ratio:.4g} times what the norm of all gradients, {norm:.4g}, asks for"
    advice = "reduce the sum of squares over the ranks that hold pieces, then take the root"
    return [Cause(reason, f"before the step at {short(step.line)}", advice)]


def _options_apart(ranks: Sequence[Notes], step: int) -> str:
    """Which option of the optimizers the ranks have stepped by that is not the same on all; empty if none."""
    for groups in zip(*(one.steps[step].options for one in ranks), strict=False):
        for key in groups[0]:
            known = [group.get(key) for group in groups]
            if any(one != known[0] for one in known):
                return f"ranks step by different options ({key}: {', '.join(map(str, known))}, by rank)"
    return ""


def _of_update(_: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    on = sorted({row.rank for row in rows})
    step = ranks[on[0]].steps[rows[0].step]
    if all(row.ratio < 1e-3 for row in rows):
        reason = f"stale weights: {_first(rows)} of rank {_listed(on)} are after the step what they were before it"
        advice = "step these parameters on that rank, or send it what their owner has stepped"
    else:
        size = f"{rows[0].ratio:.3g} times as large in {rows[0].name}"
        reason = f"the same gradients make another step on rank {_listed(on)}: {size}"
        advice = "look at optimizer state, learning rate, and what writes parameters after the step"
    return [Cause(reason, f"after the step at {short(step.line)}", advice)]


def short(line: str) -> str:
    """``train.py:12`` of a path and a line."""
    return line.rpartition("/")[2]


def _first(rows: Sequence[Row]) -> str:
    return _some(list(dict.fromkeys(row.name for row in rows)))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
