"""What users may not do to the tensors that an engine owns: one table.

A change that no rule names is allowed: the engine goes on with what it finds. Each rule says at which of the engine's
verbs a change is looked for, where it counts, and what to write instead. The table of habits in
notebooks/guide/loop.md has the same rows. Behind it: which rules are for an engine (``where_of``), and when what the
engine has changed itself is remembered as it is.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from shardlab.engines.engine import Engine
from shardlab.engines.hpz import HostShards
from shardlab.engines.moments import GradientState, Moment
from shardlab.vocabulary import MeshAxis


class Where(Enum):
    """Which strategies a rule is for."""

    ALL = "all"
    PIECES = "stepped in pieces"  # the mean is elsewhere than at the parameter
    FLAT = "stepped in pieces, not sharded"  # what is sharded refuses by itself, or when it is resharded
    NOT_IN_PLACE = "sharded or rounded"  # what is written into a parameter does not reach what is stepped
    ELSEWHERE = "sums of no_sync() may add up elsewhere than at the parameter"  # in more bits, or summed in part
    SPREAD = "stepped in pieces, which are gathered after the step"
    WHOLE = "neither sharded nor rounded, on several ranks, and not of the reader's own, which may step in backward"
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
LOCAL = (GradientState.LOCAL, GradientState.MEANS_AND_LOCAL)
"""Where some gradients are this rank's own sums, which are still to be reduced."""
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
        "parameter", "version", frozenset(BACKWARD_OVER), Where.WHOLE,
        "parameter {name!r}: it was written to while backward ran, as by an optimizer that steps in a hook, with this "
        "rank's own gradient; step with engine.step(), when gradients are means",
    ),
    Rule(
        "parameter", "gradient_version", frozenset({Moment.BACKWARD, Moment.REDUCE, Moment.STEP}), Where.ALL,
        "gradient of {name!r}: it was changed in place after a backward inside no_sync(), when it was this rank's own "
        "sum and not yet the mean; " + _CLIP + ", or engine.finish_gradients() before what changes gradients",
        gradients=LOCAL,
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

# When gradients are others by what the engine or autograd has done. (Not where a backward ends and sends: nobody comes
# between that and the means.)
AFTER_GRADIENTS = {Moment.BACKWARD_ENDED, Moment.MEANS, Moment.ZERO_GRAD, Moment.FAILED}
# After which of the engine's moments what the engine, autograd or the optimizer has changed is remembered as it is.
_REMEMBERED = {
    ("parameter", "place"): {Moment.FULL_LEFT, Moment.LOADED},
    ("parameter", "version"): {Moment.STEPPED, Moment.FULL_LEFT, Moment.LOADED},
    ("piece", "place"): {Moment.FULL_LEFT, Moment.LOADED},
    ("piece", "version"): {Moment.STEPPED, Moment.LOADED},
    ("piece", "trains"): {Moment.STEPPED, Moment.LOADED},
}
# Sharded parameters are gathered anew for each forward.
_OF_SHARDED = {
    ("parameter", "version"): {*BACKWARD_OVER, Moment.FORWARDED, Moment.FAILED, Moment.FULL},
    ("piece", "version"): {Moment.FULL},
}
# Whole ones may be written to at any time but in backward.
_OF_OTHERS = {("parameter", "version"): {Moment.BACKWARD}}


def remembered(chosen: Sequence[Rule], *, is_sharded: bool) -> dict[Moment, list[tuple[str, str]]]:
    """What is remembered after each moment, as far as rules look at it: of which tensors which field."""
    looked_at = {(rule.of, rule.change) for rule in chosen}
    tables = (_REMEMBERED, _OF_SHARDED if is_sharded else _OF_OTHERS)
    keys = [key for key in _REMEMBERED if key in looked_at]
    return {moment: [key for key in keys if any(moment in table.get(key, ()) for table in tables)] for moment in Moment}


def where_of(engine: Engine) -> set[Where]:
    """Which rules are for an engine."""
    strategy, is_sharded = engine.strategy, bool(engine.strategy.units)
    is_flat = strategy.steps_pieces and not is_sharded
    is_ours = type(strategy).__module__.startswith("shardlab.")
    # Where other ranks see what was written into a piece only when a step has ended.
    is_late = any(one.is_split or isinstance(one, HostShards) for unit in strategy.units for one in unit.shards)
    holds = {
        Where.ALL: True,
        Where.PIECES: strategy.steps_pieces,
        Where.FLAT: is_flat,
        Where.SPREAD: is_late or (is_flat and (engine.num_data_ranks > 1 or strategy.full_gathers)),
        Where.NOT_IN_PLACE: strategy.full_gathers,
        Where.WHOLE: not strategy.full_gathers and engine.num_data_ranks > 1 and is_ours,
        Where.ELSEWHERE: strategy.sends_in_no_sync or (strategy.full_gathers and not is_sharded),
        Where.SHARDED: is_sharded,
        Where.SLICED: MeshAxis.PIPE in engine.mesh.axes or any(one.num_ranks > 1 for one in engine.slices.values()),
    }
    return {where for where, is_so in holds.items() if is_so}
