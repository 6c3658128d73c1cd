"""Decides in which form each region is divided: the first one that works; keeps the reason why others do not.

Regions that differ in numbers only, such as those of a transformer's layers, are decided together. Sizes come first,
since they cost nothing, then shapes, then values (``plan_trial``). At last, by what is divided, the dropouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from shardlab.tensor_parallel.flow import Flow
from shardlab.tensor_parallel.plan import checked
from shardlab.tensor_parallel.plan_trial import PlanTrial
from shardlab.tensor_parallel.regions import Form, Region
from shardlab.tensor_parallel.styles import Column, OwnDropout


@dataclass
class Kind:
    """Regions that differ in numbers only.

    Attributes:
        layers: names of all their layers.
        forms: those that have not been refused, the likeliest first.
        reasons: why others were.
    """

    layers: list[str]
    forms: list[Form]
    reasons: list[str]

    @property
    def form(self) -> Form:
        """The likeliest; nothing if none is left."""
        return self.forms[0] if self.forms else {}

    @property
    def why_not(self) -> str:
        """Why none is left: what was said of the likeliest."""
        return self.reasons[0] if self.reasons and not self.forms else ""

    def refuse(self, form: Form, why_not: str) -> None:
        """Remove a form, and keep the reason."""
        self.forms.remove(form)
        self.reasons.append(why_not)

    def refuse_all(self, why_not: str) -> None:
        """None is left, for this reason."""
        self.forms, self.reasons = [], [why_not]


def kinds_of(module: nn.Module, regions: list[Region]) -> list[Kind]:
    """Regions sorted by kind."""
    kinds: dict[object, list[Region]] = {}
    for region in regions:
        sizes = tuple(tuple(param.shape for param in module.get_submodule(name).parameters()) for name in region.layers)
        key = (tuple(map(without_numbers, region.layers)), sizes, len(region.forms), region.why_not)
        kinds.setdefault(key, []).append(region)
    return [
        Kind(
            [name for region in alike for name in region.layers],
            [_merged(forms) for forms in zip(*(region.forms for region in alike), strict=True)],
            [alike[0].why_not] if alike[0].why_not else [],
        )
        for alike in kinds.values()
    ]


def decide(trial: PlanTrial, module: nn.Module, kinds: list[Kind]) -> None:
    """Leave each kind the one form that holds, or none and the reason."""
    for kind in kinds:
        for form in list(kind.forms):
            if why_not := _unfit(form, module, trial.num_ranks):
                kind.refuse(form, why_not)
    _refuse_by_shapes(trial, kinds)
    if trial.has_values:
        _refuse_by_values(trial, kinds)
        return
    for kind in kinds:
        if kind.forms and trial.why_no_shapes:
            kind.refuse_all(f"could not be tried: {trial.why_no_shapes}")
        elif len(kind.forms) > 1:
            kind.refuse_all(
                "makes several projections at once, and how they lie in its output cannot be told without values: "
                f"{trial.why_no_values}; give tp_plan with Column(parts=...)"
            )


def own_dropouts(module: nn.Module, flow: Flow, form: Form, num_ranks: int) -> tuple[Form, dict[str, str]]:
    """The styles of dropouts whose input a form leaves in parts, and what is to be said of each, also without a style.

    Alike on all ranks, H features would share H/N masks. It is no reason not to divide the layers around.
    """
    columns = {name for name, style in form.items() if isinstance(style, Column) and not style.gather_output}
    styles: Form = {}
    whys = {}
    for name, calls in flow.dropouts.items():
        in_parts = [bool(feeders) and feeders <= columns for feeders in calls]
        if not any(in_parts):
            continue
        own: Form = {name: OwnDropout()}
        # An activation that is whole has to be dropped alike on all ranks.
        elsewhere = "it is also called where features are whole; use another one there"
        if why_not := _unfit(own, module, num_ranks) if all(in_parts) else elsewhere:
            whys[name] = f"draws one mask for the parts of all ranks: {why_not}"
        else:
            styles |= own
            whys[name] = "its input is in parts: each rank drops other features"
    return styles, whys


def _refuse_by_shapes(trial: PlanTrial, kinds: list[Kind]) -> None:
    """Every form that cannot be computed; kinds with one form are tried together first, which mostly is enough."""
    clear = [kind for kind in kinds if len(kind.forms) == 1]
    if trial.shapes(_merged(kind.form for kind in clear)):
        # One of them cannot be computed; tried alone, each says whether it is the one.
        clear = []
    for kind in kinds:
        for form in list(kind.forms) if kind not in clear else ():
            if why_not := trial.shapes(form):
                kind.refuse(form, why_not)


def _refuse_by_values(trial: PlanTrial, kinds: list[Kind]) -> None:
    """Refuse the forms of each kind, one by one, until one computes what the whole module computes."""
    # All together first: mostly every likeliest form holds, and one pass is enough.
    if not trial.values(_merged(kind.form for kind in kinds)):
        return
    for kind in kinds:
        while kind.forms and (why_not := trial.values(kind.form)):
            kind.refuse(kind.form, why_not)


def _unfit(form: Form, module: nn.Module, num_ranks: int) -> str:
    try:
        checked(form, module, num_ranks)
    except ValueError as error:
        return str(error).removeprefix("plan: ")  # it is said in a sentence, of a plan that nobody has given
    return ""


def _merged(forms: Iterable[Form]) -> Form:
    return {name: style for form in forms for name, style in form.items()}


def without_numbers(name: str) -> str:
    """A name with ``*`` for each number in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
