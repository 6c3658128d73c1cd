"""A plan for a module that nobody has planned: found by structure, tried in one process, with a reason for each layer.

    suggestion = suggest_tp_plan(model, 2, lambda model: loss(model, batch))
    suggestion.plan          # {"layers.*.attention.q": Column(head_dim=64), ...}, for parallelize_module
    print(suggestion)        # every layer: its style, or why it stays whole

The flow of one forward says which layers could be columns and rows (``regions``), also of a model that brings a plan of
its own along, as those of transformers do. Nothing is suggested that has not been tried (``plan_trial``), but for what
dropout draws: it is tried with the mean of that. ``functional.dropout`` between columns and rows has no style: it draws
one mask for the parts of all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from shardlab.tensor_parallel.divisible_regions import Form, Region, alike_together, merged, regions_of, without_numbers
from shardlab.tensor_parallel.flow import DROPOUTS, END, Flow, Run, is_layer
from shardlab.tensor_parallel.plan import Plan, checked, matched, matched_names
from shardlab.tensor_parallel.plan_trial import PlanTrial, RunDivided, said
from shardlab.tensor_parallel.rng import generators_seeded
from shardlab.tensor_parallel.styles import Column, OwnDropout, Style

AUTO = "auto"
WHOLE = "whole"


@dataclass(frozen=True)
class PlannedModule:
    """What becomes of the modules that a pattern matches.

    Attributes:
        module: the pattern.
        kind: the modules' class.
        style: as it is written, or ``whole``: every rank has all of it.
        why: how it was found and tried, or why it stays whole.
    """

    module: str
    kind: str
    style: str
    why: str


@dataclass(frozen=True)
class Suggestion:
    """A plan, and what is said of every module that has a style or parameters of its own.

    Attributes:
        plan: for ``parallelize_module``; empty if nothing can be divided.
        modules: in the module's order, with dropouts of features that are in parts.
    """

    plan: dict[str, Style]
    modules: tuple[PlannedModule, ...]

    def __str__(self) -> str:
        cells = [(row.module, row.style, row.why) for row in self.modules]
        width = [max((len(row[place]) for row in cells), default=0) for place in range(2)]
        return "\n".join(f"{name:{width[0]}}  {style:{width[1]}}  {why}" for name, style, why in cells)

    @property
    def why_empty(self) -> str:
        """The first reasons, for an error."""
        whys = dict.fromkeys(f"{row.module}: {row.why}" for row in self.modules if row.why)
        return "; ".join(list(whys)[:4]) or "it has no linear layers"


def suggest_tp_plan(module: nn.Module, num_ranks: int, run: Run) -> Suggestion:
    """Suggest how the layers of a module are divided over tensor-parallel ranks.

    Args:
        module: is not changed. On the meta device, or with very many parameters, plans are tried by shapes alone, and
            a fused projection, whose layout only values tell, stays whole.
        num_ranks: of the tensor axis.
        run: calls the module as training does and returns the loss or the outputs; it is called several times, with
            copies of the module on the CPU.

    Raises:
        ValueError: ``run`` fails with the whole module.
    """
    # So the same module always gets the same answer.
    with generators_seeded():
        trial = PlanTrial(module, num_ranks, run)
        try:
            flow = trial.flow()
        except Exception as error:
            raise ValueError(f"run: it cannot be called with a copy of the module: {said(error)}") from error
        regions = alike_together(module, regions_of(module, flow))
        _decide(trial, module, regions)
    chosen: Form = {}
    whys: dict[str, str] = {}
    for region in regions:
        chosen |= region.form
        whys |= dict.fromkeys(region.layers, region.why_not or _tried(trial))
    dropouts, why_dropouts = _own_dropouts(module, flow, chosen, num_ranks)
    chosen, whys = chosen | dropouts, whys | why_dropouts
    plan = _by_pattern(module, chosen)
    return Suggestion(plan, tuple(_rows(module, flow, plan, whys)))


def check_tp_plan(
    module: nn.Module, plan: Plan, num_ranks: int, run: Run | None, run_divided: RunDivided | None = None
) -> Suggestion:
    """Try a plan that was given, without ranks; where it cannot be tried, the reasons say so.

    Args:
        module: is not changed.
        plan: as ``parallelize_module`` takes it.
        num_ranks: of the tensor axis.
        run: as for ``suggest_tp_plan``; None checks sizes only.
        run_divided: of a tensor axis, what calls the divided module; None for ``run``.

    Raises:
        ValueError: the plan does not fit the module, or the divided module does not compute what the whole one does.
    """
    checked(plan, module, num_ranks)
    why = "sizes fit"
    if run is not None:
        with generators_seeded():
            why = _given(PlanTrial(module, num_ranks, run, run_divided), plan)
    whys = dict.fromkeys(matched(plan, module), f"given, {why}")
    return Suggestion(dict(plan), tuple(_rows(module, None, plan, whys)))


def _decide(trial: PlanTrial, module: nn.Module, regions: list[Region]) -> None:
    """Leave each region the one form that holds, or none and the reason."""
    for region in regions:
        for form in list(region.forms):
            if why_not := _unfit(form, module, trial.num_ranks):
                region.refuse(form, why_not)
    # All together first: mostly every likeliest form holds, and one pass is enough.
    fails = trial.fails(merged(region.form for region in regions))
    for region in regions:
        # Without values the one form of several that can be computed is the right one, so each is tried.
        for form in list(region.forms) if fails or (len(region.forms) > 1 and not trial.has_values) else ():
            if why_not := trial.fails(form):
                region.refuse(form, why_not)
            elif trial.has_values:
                break
    for region in regions if not trial.has_values else ():
        if len(region.forms) > 1:
            region.forms.clear()
            region.reasons = [
                "makes several projections at once, and how they lie in its output cannot be told without values: "
                f"{trial.why_no_values}; give tp_plan with Column(parts=...)"
            ]


def _own_dropouts(module: nn.Module, flow: Flow, form: Form, num_ranks: int) -> tuple[Form, dict[str, str]]:
    """The styles of dropouts whose input a form leaves in parts, and what is to be said of each, also without a style.

    Alike on all ranks, H features would share H/N masks. It is no reason not to divide the layers around.
    """
    columns = {name for name, style in form.items() if isinstance(style, Column) and not style.gather_output}
    styles: Form = {}
    whys = {}
    for name, feeders in flow.dropouts.items():
        if not feeders & columns:
            continue
        own: Form = {name: OwnDropout()}
        # An activation that is whole has to be dropped alike on all ranks.
        elsewhere = "it is also called where features are whole; use another one there"
        if why_not := _unfit(own, module, num_ranks) if feeders <= columns else elsewhere:
            whys[name] = f"draws one mask for the parts of all ranks: {why_not}"
        else:
            styles |= own
            whys[name] = "its input is in parts: each rank drops other features"
    return styles, whys


def _unfit(form: Form, module: nn.Module, num_ranks: int) -> str:
    try:
        checked(form, module, num_ranks)
    except ValueError as error:
        return str(error).removeprefix("plan: ")  # it is said in a sentence, of a plan that nobody has given
    return ""


def _given(trial: PlanTrial, plan: Plan) -> str:
    """How a plan was tried that the user gives, which is refused only if it fails where the whole module does not."""
    try:
        trial.flow()  # finds whether shapes say anything: they do not if the forward depends on values
        why_not = trial.fails(plan)
    except Exception as error:
        return f"sizes fit (not tried, for the whole module fails here: {said(error)})"
    if why_not and trial.why_unsure:
        return f"sizes fit (not tried: {trial.why_unsure})"
    if why_not:
        raise ValueError(f"tp_plan: tried in one process, it fails: {why_not}")
    return _tried(trial)


def _tried(trial: PlanTrial) -> str:
    if trial.has_values:
        where = f" in evaluation mode only, as {trial.why_no_training}" if trial.why_no_training else ""
        return f"tried{where}: outputs and gradients are the whole model's"
    return f"tried: shapes fit (values were not tried: {trial.why_no_values})"


def _by_pattern(module: nn.Module, form: Form) -> dict[str, Style]:
    """The same plan with one pattern for all layers that are alike."""
    groups: dict[tuple[str, Style], list[str]] = {}
    for name, style in form.items():
        groups.setdefault((without_numbers(name), style), []).append(name)
    plan: dict[str, Style] = {}
    for (_, style), names in groups.items():
        pattern = _common(names)
        alike = set(matched_names(pattern, module)) == set(names)
        plan |= dict.fromkeys([pattern] if alike else names, style)
    return plan


def _common(names: Iterable[str]) -> str:
    """One pattern for names that differ in numbers only."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def _rows(module: nn.Module, flow: Flow | None, plan: Plan, whys: Mapping[str, str]) -> Iterator[PlannedModule]:
    """A row for each module with a style or parameters of its own, and for dropouts of features in parts.

    There is one for all that differ in numbers only.
    """
    styles = matched(plan, module)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, part in module.named_modules():
        is_said = name in styles or (isinstance(part, DROPOUTS) and name in whys)
        if is_said or any(param is not None for param in part._parameters.values()):
            style = written(styles[name]) if name in styles else WHOLE
            groups.setdefault((without_numbers(name), type(part).__name__, style), []).append(name)
    for (_, kind, style), names in groups.items():
        why = whys.get(names[0]) or _why_whole(module, names[0], flow)
        yield PlannedModule(_common(names), kind, style, why)


def written(style: Style) -> str:
    """A style as it is written in a plan, without the arguments that have their defaults."""
    every: Any = style  # a dataclass, as all styles are
    given = [
        f"{field.name}={value!r}" for field in fields(every) if (value := getattr(style, field.name)) != field.default
    ]
    return f"{type(style).__name__}({', '.join(given)})"


def _why_whole(module: nn.Module, name: str, flow: Flow | None) -> str:
    part = module.get_submodule(name)
    if flow is None:
        return "not in the plan"
    if not (is_layer(part, nn.Linear) or is_layer(part, nn.Embedding)):
        return f"a {type(part).__name__}: only nn.Linear and nn.Embedding are divided"
    if name not in flow.feeders:
        return "the forward does not call it"
    if isinstance(part, nn.Embedding):
        return "no vocabulary: it is small, or has no more rows than columns"
    # Those that differ in numbers only once.
    users = list(dict.fromkeys(one if one == END else without_numbers(one) for one in sorted(flow.consumers(name))))
    few = ", ".join(users[:3]) + (", ..." if len(users) > 3 else "")
    return f"all of its output is needed, by {few}" if users else "nothing depends on its output"
