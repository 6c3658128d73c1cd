"""Which cause a difference has: from weights, norms and options, from coefficients, and from what was sent."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import hypot, isclose

import torch
from torch import Tensor

from shardlab.same.coefficients import CLOSE, Mixture, flat, listed, meaning, mixture
from shardlab.same.compare import REDUCES, Found, Row
from shardlab.same.notes import Message, Notes, Step
from shardlab.same.union import Gradient
from shardlab.same.wholes import wholes

LISTED = 3
_CALLERS = {"ddp": "DDP", "autograd": "DDP", "fsdp": "FSDP"}  # C++ in a backward is DDP
_SQUARES = "add up the squares over all ranks that hold pieces, then take the root"
_OPTIONS = "give the optimizers of all ranks the same options"
Line = tuple[str, str]


Cause = tuple[str, str, str]
"""Where a difference comes from, the line of the script, and what to do."""


def causes(found: Found, ranks: Sequence[Notes]) -> list[Line]:
    """Lines CAUSE, WHERE and NEXT of the first difference."""
    rows = found.different
    of = {"gradient": _of_gradients, "norm": _of_norm, "clipping": _of_norm, "weights after": _of_update}
    known = of.get(rows[0].what, _of_what_differs_before)(found, ranks, rows)
    return [line for one in known for line in zip(("CAUSE", "WHERE", "NEXT"), one, strict=True)]


def named(rows: Sequence[Row], found: Found, ranks: Sequence[Notes]) -> str:
    """Which parameters differ, on which ranks: all, only the tied ones, only those that are whole on every rank."""
    names, on = _names(rows), {row.rank for row in rows}
    every = {row.name for row in found.rows if (row.step, row.what) == (rows[0].step, rows[0].what)}
    parts = [part for one in ranks for part in one.steps[rows[0].step].weights]
    whole = {part.name for part in parts if part.is_whole} - {part.name for part in parts if not part.is_whole}
    kinds = {"tied": {*ranks[0].tied}, "replicated": whole, "sharded": every - whole}
    kind = next((kind for kind, members in kinds.items() if {*names} == members & every), "")
    words = f"{_some(names)} ({f'only the {kind} ones' if kind else f'{len(names)} of {len(every)}'})"
    if len(names) == len(every):
        words = f"all {len(every)} parameters" if names[0] else "all gradients"
    return words if len(on) > 1 else f"{words} on rank {min(on)} only"


def short(line: str) -> str:
    """``train.py:12`` of a path and a line."""
    return line.rpartition("/")[2]


def in_forward(step: Step) -> list[Message]:
    """What the script itself sends before a backward."""
    return [one for one in step.messages if not one.caller and one.backward < len(step.backwards)]


# What is compared before or after gradients.


def _of_what_differs_before(_: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    """Weights or buffers that are not rank 0's when a module is called."""
    step, is_buffer = rows[0].step, rows[0].what == "buffer"
    kind = f"{'buffers' if is_buffer else 'parameters'} that start different"
    advice = "broadcast those of rank 0 before training, or seed ranks alike before the model is built"
    if step and is_buffer:
        kind = "buffers that drift"
        advice = "send rank 0's to all (DDP does, with broadcast_buffers), or reduce what they are computed from"
    elif step and (apart := _options_apart(ranks, step - 1)):
        kind, advice = f"{apart}, so weights drift apart", _OPTIONS
    elif step:
        kind = "stale weights"
        advice = "step all parameters on every rank, or send each rank what their owners have stepped"
    who, when = listed(sorted({row.rank for row in rows})), f"step {step}" if step else "the first step"
    reason = f"{kind}: {_some(_names(rows))} of rank {who} are not rank 0's before {when}"
    return [(reason, f"the first forward of step {step}", advice)]


def _of_norm(found: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    row = rows[0]
    step = ranks[row.rank].steps[row.step]
    own = hypot(*(float(part.value.double().norm()) for part in step.gradients))
    whole = found.unions[row.step].gradient
    norm = hypot(*(float(whole[name].norm()) for name in {*step.clipped} & whole.keys()))
    used = step.norm if step.norm is not None else norm * row.ratio
    reason, advice = f"the norm that gradients are clipped to is {row.ratio:.4g} times that of all of them", _SQUARES
    if not step.clipped:
        reason, advice = f"rank {row.rank} does not clip, and others do", "let all ranks clip, or none"
    elif left := sorted({*step.clipped} - {*step.names}):
        reason += f", and counts gradients that no optimizer steps, of {_some(left)}: nobody reduces or clears them"
        advice = "give the optimizer all parameters that train, as they are when modules are wrapped"
    elif step.norm and isclose(used, own, rel_tol=1e-3) and any(not part.is_whole for part in step.gradients):
        reason = f"the norm of its own pieces: rank {row.rank} clips to {used:.4g}, and all of them have {norm:.4g}"
    elif row.what == "clipping":
        reason = f"clipping scales by {row.ratio:.4g} times what the norm of all gradients, {norm:.4g}, asks for"
    return [(reason, f"before the step at {short(step.line)}", advice)]


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
    reason = f"the same gradients make another step on rank {listed(on)}: "
    reason += f"{rows[0].ratio:.3g} times as large in {rows[0].name}"
    advice = "look at optimizer state, learning rate, and what writes parameters after the step"
    if apart := _options_apart(ranks, rows[0].step):
        reason, advice = apart, _OPTIONS
    elif all(row.ratio < 1e-3 for row in rows):
        reason = f"stale weights: {_some(_names(rows))} of rank {listed(on)} are after the step what they were before"
        advice = "step these parameters on that rank, or send it what their owner has stepped"
    return [(reason, f"after the step at {short(ranks[on[0]].steps[rows[0].step].line)}", advice)]


# Gradients.


def _of_gradients(found: Found, ranks: Sequence[Notes], rows: Sequence[Row]) -> list[Cause]:
    step, names, apart = rows[0].step, _names(rows), sorted({row.rank for row in rows})
    on = apart[0]
    if known := _clipped_apart(found, ranks, step) or _divided_apart(found, ranks, step, names):
        return known
    said, expected, sent = list[Cause](), found.unions[step], ranks[on].steps[step].messages
    if found.is_together:  # its loss is of other rows than a rank's
        expected = replace(expected, loss_times=1.0)
    sizes = sorted({len(one.ranks) for rank in ranks for one in rank.steps[step].messages})
    for group, mixed in _grouped(found, step, names, on):
        messages = [one for one in sent if {*group} & {*one.names}]
        counts = Counter((name, one.backward) for one in messages if one.op in REDUCES for name in one.names)
        reason, advice = meaning(mixed, expected, on, len(ranks), sizes, max(counts.values(), default=0))
        if found.is_together and not mixed.explains:
            messages = in_forward(ranks[on].steps[step])
            reason = "what ranks exchange in forward brings back no gradient, or another one than in one process"
            advice = "exchange by torch.distributed.nn.functional, which has a backward; let each row's loss count once"
        elif not mixed.explains and len(apart) < len(ranks) and any(one.op == "reduce" for one in messages):
            reason = f"reduce gives the sum to one rank alone, and leaves something else on rank {listed(apart)}"
            return [
                (reason, _where(ranks, step, on, names[:1], messages), "call all_reduce, or step on that rank alone")
            ]
        elif not mixed.explains and (times := _of_step_before(found, step, names, on)):
            reason = f"what the step before brought is still in them, {times:.3g} times"
            where = _where(ranks, step, on, names, messages)
            return [(reason, where, "clear what gradients are added up in, after each step")]
        elif not mixed.explains and (op := _chosen_by(found, step, group, on)):
            reason = f"each element is one rank's, chosen by ReduceOp.{op}, and not the sum of all ranks'"
            where = _where(ranks, step, on, names, messages)
            return [(reason, where, "reduce by ReduceOp.SUM, and divide by the number of ranks")]
        elif not mixed.explains:
            reason += _some_elements(found, step, group, on)
        elif len(mixed.ranks) == 1 < len({*expected.twins}) and _agree({one: found.ours[step][one] for one in group}):
            reason = f"all ranks step the gradient of rank {listed([*mixed.ranks])}: the rows of the others are missing"
            advice = "call all_reduce in place of what sends it, and divide by the number of ranks"
        only = "" if len(group) == len(names) else f" ({_some(group)})"
        said.append((reason + only, _where(ranks, step, on, group, messages), advice))
    return said


def _clipped_apart(found: Found, ranks: Sequence[Notes], step: int) -> list[Cause]:
    """Where each rank scales what it has by the norm of that alone; empty if none does."""
    noted = [one.steps[step] for one in ranks]
    where = f"between backward and the step at {short(noted[0].line)}"
    is_clipped = any(one.clipped for one in noted)
    if is_clipped and not _agree(found.ours[step]) and _agree(wholes([one.stepped for one in noted])):
        reason = "clipped before they are reduced: each rank scales its own gradient by the norm of that alone"
        return [(reason, where, "reduce gradients first, then clip")]
    if found.clips_by_hand and (norm := _own_norm(noted, found.unions[step].gradient)):
        reason = f"the norm of its own pieces: every rank scales these to a norm of {norm:.4g}"
        return [(reason, where, _SQUARES)]
    return []


def _divided_apart(found: Found, ranks: Sequence[Notes], step: int, names: Sequence[str]) -> list[Cause]:
    """What goes wrong with parameters that ranks divide; empty if it is something else."""
    parts = [part for one in ranks for part in one.steps[step].weights]
    places = {name: [part.place for part in parts if part.name == name] for name in names}
    sent = [one for noted in ranks for one in noted.steps[step].messages if one.op in REDUCES]
    added = [(name, one.ranks, [one]) for one in sent for name in {*one.names} & places.keys()
             if len(places[name]) == len(ranks) and len({places[name][rank] for rank in one.ranks}) > 1]  # fmt: skip
    added += [
        (name, by, in_forward(ranks[by[0]].steps[step])) for name in names if (by := _adds_up(found, ranks, step, name))
    ]
    for name, by, messages in added:
        reason = f"unlike pieces are added up: ranks {listed(by)} hold different pieces of {name}"
        advice = "reduce over the ranks that hold the same piece, and not over the others"
        return [(reason, _where(ranks, step, by[0], [name], messages), advice)]
    twins, apart = found.unions[step].twins, list[str]()
    for name, views in found.ours[step].items():
        if name in names and len({*places[name]}) == 1:
            alike = ([view for view, twin in zip(views, twins, strict=True) if twin == one] for one in {*twins})
            apart += [] if all(_agree({name: some}) for some in alike) else [name]
    if not apart or all(part.is_whole for part in parts):
        return []
    reason = f"ranks that divide parameters have different gradients of {_some(apart)}: each a part, not added up"
    advice = "add up the gradient of the input over the ranks that divide a layer, in its backward (Megatron's f), "
    advice += "and gradients of parameters that each of them uses on a part of the sequence"
    return [(reason, _where(ranks, step, 0, apart, []), advice)]


def _adds_up(found: Found, ranks: Sequence[Notes], step: int, name: str) -> tuple[int, ...]:
    """Ranks whose pieces of the right gradient, added up, are what each has; none if it is something else.

    What a hook of a tensor sends lies in no gradient's memory, and no message has its name.
    """
    parts = {part.place: (rank, part) for rank, one in enumerate(ranks) for part in one.steps[step].gradients
             if part.name == name and not part.is_flat}  # fmt: skip
    every, right = [part for _, part in parts.values()], found.unions[step].gradient.get(name)
    if right is None or len(every) < 2 or len({part.value.shape for part in every}) > 1:
        return ()
    total = torch.stack([part.of(right) for part in every]).sum(0)
    scales = [scale * total for scale in (1.0, 1 / len(every), 1 / len(ranks))]
    mine = [part.value.to(total.dtype) for part in every]
    is_sum = any(all(float((one - scaled).norm()) < CLOSE * float(scaled.norm()) for one in mine) for scaled in scales)
    return tuple(sorted(rank for rank, _ in parts.values())) if is_sum else ()


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
        if sum(float((mine - factor * right).square().sum()) for mine, right in own) > 1e-4 * factor**2 * size:
            return 0.0
        reached.append(factor * size**0.5)
    return reached[0] if max(reached) < min(reached) * 1.01 else 0.0


def _grouped(found: Found, step: int, names: Sequence[str], rank: int) -> Iterator[tuple[list[str], Mixture]]:
    """Parameters whose gradients are made alike: together if one mixture explains all, else each by its own."""
    ours, expected = _held(found, step, names, rank), found.unions[step]
    if ours:
        groups: dict[tuple[float, ...], list[str]] = {(): list(ours)}
        if len(ours) > 1 and not mixture(ours, expected, list(ours)).explains:
            groups = {}
            for name in ours:
                groups.setdefault(mixture(ours, expected, [name]).key, []).append(name)
        # Small parameters have too few elements to be told apart: they go with the group that explains them.
        for group in sorted(groups.values(), key=len, reverse=True)[:LISTED]:
            yield group, mixture(ours, expected, group)
    if absent := [name for name in names if name not in ours]:
        yield absent, Mixture(dict.fromkeys(expected.brought, 0.0), 0.0, True)


def _of_step_before(found: Found, step: int, names: Sequence[str], rank: int) -> float:
    """How many times the gradients of the step before are in what is too much; 0 if it is something else."""
    known = [(found.ours[number], found.unions[number].gradient) for number in (step - 1, step)] if step else []
    views = [[(ours[name][rank], right[name]) for name in names if name in ours] for ours, right in known]
    if not views or len(views[0]) != len(views[1]) or any(view is None for some in views for view, _ in some):
        return 0.0
    before = torch.cat([view.double().reshape(-1) for view, _ in views[0] if view is not None])
    away = torch.cat([(view - right).reshape(-1) for view, right in views[1] if view is not None])
    times = float(before @ away / before.square().sum().clamp(min=1e-300))
    return times if float((away - times * before).norm()) < CLOSE * float(away.norm()) else 0.0


def _chosen_by(found: Found, step: int, names: Sequence[str], rank: int) -> str:
    """By which operation a reduction takes each element from one of the ranks; empty if by none."""
    mine, brought = _held(found, step, names, rank), found.unions[step].brought
    zeros = {name: torch.zeros_like(one) for name, one in mine.items()}
    of = [[flat(zeros | one, names) for key, one in brought.items() if key[0] == owner] for owner, _ in brought]
    every, ours = torch.stack([torch.stack(some).sum(0) for some in of]), flat(mine, names)
    chosen = {"MAX": every.amax(0), "MIN": every.amin(0)}
    return next((op for op, one in chosen.items() if (ours - one).norm() < found.band.different * one.norm()), "")


def _some_elements(found: Found, step: int, names: Sequence[str], rank: int) -> str:
    """How many elements differ, where they are the lesser part."""
    mine = _held(found, step, names, rank)
    right = flat({name: torch.zeros_like(one) for name, one in mine.items()} | found.unions[step].gradient, names)
    away = (flat(mine, names) - right).abs()
    number = int((away > found.band.different * right.abs().max()).sum())
    return f"; {number} of {len(away)} elements differ" if 0 < number < len(away) / 2 else ""


def _held(found: Found, step: int, names: Sequence[str], rank: int) -> Gradient:
    """What a rank has of these."""
    return {name: view for name in names if (view := found.ours[step].get(name, [None] * (rank + 1))[rank]) is not None}


def _where(ranks: Sequence[Notes], step: int, rank: int, names: Sequence[str], messages: Sequence[Message]) -> str:
    """The line that sent, or that should have."""
    noted = ranks[rank].steps[step]
    if messages:
        sent = (f"{short(one.line)} ({one.op} over {len(one.ranks)} ranks, {one.dtype})" for one in messages)
        return "; ".join(dict.fromkeys(sent))
    backward = f"backward at {short(noted.backwards[-1].line if noted.backwards else noted.line)}"
    if any({*names} & {*one.names} for other in ranks for one in other.steps[step].messages):
        return f"rank {rank} sends no message with them; others do; {backward}"
    reduced = [one for one in noted.messages if one.op in REDUCES]
    callers = [_CALLERS[one.caller] for one in reduced if one.caller in _CALLERS]
    if callers:
        count = "1 message" if len(callers) == 1 else f"{len(callers)} messages"
        return f"{backward}, which reduces in {count} of {', '.join(dict.fromkeys(callers))}"
    others = [one for one in reduced if not one.caller]
    # Those after the last backward rather than in forwards.
    for one in [one for one in others if one.backward == len(noted.backwards)] or others:
        return f"{short(one.line)} ({one.op}); {backward}, step at {short(noted.line)}"
    return f"no message between {backward} and the step at {short(noted.line)}"


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
