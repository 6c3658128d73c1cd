"""What users may not do to the tensors that an engine owns: one table.

A change that no rule names is allowed: the engine goes on with what it finds. Each rule says at which of the engine's
verbs a change is looked for, where it counts, and what to write instead. The table of habits in
notebooks/guide/loop.md has the same rows.
"""

from enum import Enum
from typing import NamedTuple

from shardlab.engines.moments import GradientState, Moment


class Where(Enum):
    """Which strategies a rule is for."""

    ALL = "all"
    PIECES = "stepped in pieces"  # the mean is elsewhere than at the parameter
    FLAT = "stepped in pieces, not sharded"  # what is sharded refuses by itself, or when it is resharded
    NOT_IN_PLACE = "sharded or rounded"  # what is written into a parameter does not reach what is stepped
    ELSEWHERE = "sums of no_sync() may add up elsewhere than at the parameter"  # in more bits, or summed in part
    SPREAD = "stepped in pieces, which are gathered after the step"
    SHARDED = "sharded"
    SLICED = "sliced by tensor parallelism, or a stage of a pipeline"


class Rule(NamedTuple):
    """A row.

    Attributes:
        of: 'parameter' or 'piece': which tensors.
        change: a field of a ``Snapshot``.
        at: when it is looked for.
        where: for which strategies.
        text: what the user is told; ``{name}`` is the parameter's.
        gradients: the states of the gradients in which it counts; empty for all.
    """

    of: str
    change: str
    at: frozenset[Moment]
    where: Where
    text: str
    gradients: tuple[GradientState, ...] = ()


_VERBS = frozenset({Moment.FORWARD, Moment.BACKWARD, Moment.STEP, Moment.FULL, Moment.SAVE, Moment.CLOSE})
BACKWARD_OVER = (Moment.BACKWARD_ENDED, Moment.BACKWARD_SENDS)
_LOCAL = (GradientState.LOCAL, GradientState.MEANS_AND_LOCAL)
_KEEP = "write inside 'with engine.full_params(keep_changes=True):'"
_CLIP = "call engine.zero_grad(), and from then on write engine.clip_grad_norm_(max_norm)"

LOST = (
    "parameter {name!r}: its data was replaced by .data =, by module.to() or the like, and the engine keeps what was "
    "there; " + _KEEP + ", and leave it before engine.step(), or convert the module before the engine is built"
)
GATHERED = "parameter {name!r} is still gathered {when}; free it there, as when the engine was built"
DROPPED = (
    "{op} {tag!r}, sent at {line}: nobody has waited for it, and nobody can any more; keep the Pending that the "
    "communicator returns, and call its wait() before what it brings is used"
)
FROZEN = (
    "it is given frozen parameters too, such as {name!r}, since they may be unfrozen later; leave them out with "
    "tensors.where(lambda name: model.get_parameter(name).requires_grad)"
)
HALF_STEPPED = (
    "parameter {name!r}: it was used inside engine.step(), by the optimizer or a hook of it, where other ranks "
    "have stepped the rest of it; use it before or after engine.step()"
)
REPLACED = (
    "parameter {name!r}: it was taken out of the module or replaced, and the engine trains what was there; put it "
    "back, or engine.close(), change the module, and build another engine"
)
RULES = (
    Rule(
        "piece", "place", _VERBS | {Moment.STEPPED, Moment.LOAD}, Where.PIECES,
        "engine.step_tensors(): the data of the piece of {name!r} was replaced by .data =; write into it in place, "
        "before engine.step(), or in the optimizer's step",
    ),
    Rule(
        "piece", "version", frozenset({Moment.FORWARD, Moment.BACKWARD, Moment.FULL, Moment.CLOSE}), Where.SPREAD,
        "engine.step_tensors(): this rank's piece of {name!r} was written to, and nobody has gathered it; write before "
        "engine.step(), on all ranks, or, always and where it is frozen, into the parameter, inside 'with "
        "engine.full_params(keep_changes=True):'",
    ),
    Rule(
        "piece", "version", frozenset({Moment.FORWARD, Moment.FULL, Moment.FULL_LEFT}), Where.SHARDED,
        "engine.step_tensors(): the piece of {name!r} was written to inside full_params(), which shows what was there "
        "before; write into the parameter there, with keep_changes=True, or into pieces outside of it",
    ),
    Rule(
        "piece", "trains", frozenset({Moment.STEP}), Where.PIECES,
        "engine.step_tensors(): the piece of {name!r} was frozen or thawed, which has no effect; write "
        "model.get_parameter({name!r}).requires_grad_(...), on all ranks",
    ),
    Rule("parameter", "place", _VERBS | {Moment.LOAD}, Where.FLAT, LOST),
    Rule(
        "parameter", "version", _VERBS | {Moment.FORWARDED, *BACKWARD_OVER}, Where.NOT_IN_PLACE,
        "parameter {name!r}: it was written to, which does not reach what this rank keeps of it; " + _KEEP + ", or use "
        "a buffer for what forward changes",
    ),
    Rule(
        "parameter", "gradient_version", frozenset({Moment.BACKWARD, Moment.REDUCE, Moment.STEP}), Where.ALL,
        "gradient of {name!r}: it was changed in place after a backward inside no_sync(), when it was this rank's own "
        "sum and not yet the mean; " + _CLIP + ", or engine.finish_gradients() before what changes gradients",
        gradients=_LOCAL,
    ),
    Rule(
        "parameter", "gradient_version", frozenset({Moment.BACKWARD, Moment.MEANS_ALREADY}), Where.SLICED,
        "gradient of {name!r}: it was changed in place, and it is a part: torch's clip_grad_norm_ would scale it by "
        "another norm on each rank; " + _CLIP + ", or assign a new tensor where each element is changed by "
        "itself, as in param.grad = param.grad.clamp(-1, 1)",
        gradients=(GradientState.MEANS,),
    ),
    Rule(
        "parameter", "gradient", frozenset({Moment.BACKWARD, Moment.STEP}), Where.PIECES,
        "gradient of {name!r}: it was set or cleared at the parameter (by a submodule's zero_grad() or by '.grad ='), "
        "but the mean is in engine.step_tensors(); write engine.zero_grad()",
        gradients=(GradientState.MEANS,),
    ),
    Rule(
        "parameter", "gradient", frozenset({Moment.BACKWARD, Moment.REDUCE, Moment.STEP}), Where.PIECES,
        "gradient of {name!r}: what no_sync() has left there was cleared or replaced, and earlier means are in "
        "engine.step_tensors(); write engine.zero_grad()",
        gradients=(GradientState.MEANS_AND_LOCAL,),
    ),
    Rule(
        "parameter", "gradient", frozenset({Moment.BACKWARD, Moment.REDUCE, Moment.STEP}), Where.ELSEWHERE,
        "gradient of {name!r}: what no_sync() has left was cleared or replaced at the parameter, and it is "
        "elsewhere; write engine.zero_grad()",
        gradients=(GradientState.LOCAL,),
    ),
)  # fmt: skip
