"""Which rules of the table are for an engine, and when what it has changed itself is remembered as it is."""

from collections.abc import Sequence

from shardlab.engines.engine import Engine
from shardlab.engines.guards.rules import BACKWARD_OVER, Rule, Where
from shardlab.engines.hpz import HostShards
from shardlab.engines.moments import Moment
from shardlab.vocabulary import MeshAxis

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


def remembered(rules: Sequence[Rule], *, is_sharded: bool) -> dict[Moment, list[tuple[str, str]]]:
    """What is remembered after each moment, as far as rules look at it: of which tensors which field."""
    looked_at = {(rule.of, rule.change) for rule in rules}
    tables = (_REMEMBERED, _OF_SHARDED) if is_sharded else (_REMEMBERED,)
    keys = [key for key in _REMEMBERED if key in looked_at]
    return {moment: [key for key in keys if any(moment in table.get(key, ()) for table in tables)] for moment in Moment}


def where_of(engine: Engine) -> set[Where]:
    """Which rules are for an engine."""
    strategy, is_sharded = engine.strategy, bool(engine.strategy.units)
    is_flat = strategy.steps_pieces and not is_sharded
    # Where other ranks see what was written into a piece only when a step has ended.
    is_late = any(one.is_split or isinstance(one, HostShards) for unit in strategy.units for one in unit.shards)
    holds = {
        Where.ALL: True,
        Where.PIECES: strategy.steps_pieces,
        Where.FLAT: is_flat,
        Where.SPREAD: is_late or (is_flat and (engine.num_data_ranks > 1 or strategy.full_gathers)),
        Where.NOT_IN_PLACE: strategy.full_gathers,
        Where.ELSEWHERE: strategy.sends_in_no_sync or (strategy.full_gathers and not is_sharded),
        Where.SHARDED: is_sharded,
        Where.SLICED: MeshAxis.PIPE in engine.mesh.axes or any(one.num_ranks > 1 for one in engine.slices.values()),
    }
    return {where for where, is_so in holds.items() if is_so}
