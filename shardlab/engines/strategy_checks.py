"""What is wrong with a strategy that an engine is given, told once and before anything is trained."""

from collections.abc import Set as AbstractSet

from shardlab.engines.strategy import Given, LaidOut, Strategy
from shardlab.vocabulary import class_of


def check_strategy(strategy: object) -> None:
    """Refuse what is no strategy.

    Raises:
        ValueError: it is a class of strategies, or something else.
    """
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ValueError(f"strategy: the class {strategy.__name__} was given; give one of it, {strategy.__name__}()")
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy: {class_of(strategy)} was given; give a Strategy, such as ZeRO1()")


def laid_out_by(strategy: Strategy, given: Given, names: AbstractSet[str]) -> LaidOut:
    """What a strategy makes of a model.

    Args:
        strategy: one that no engine has yet.
        given: see ``Strategy.lay_out``.
        names: of all parameters.

    Raises:
        ValueError: it leaves out ``super().lay_out(given)`` or ``super().__init__()``, returns no tensor for some
            parameter, or its units are none.
    """
    try:
        laid_out = strategy.lay_out(given)
        _ = strategy.num_ranks  # which the base's lay_out() has set
    except AttributeError as error:
        if error.obj is not strategy:
            raise
        raise ValueError(
            f"strategy: {strategy.name!r} has no {error.name!r}; in its own lay_out(), call super().lay_out(given) "
            "first, and in its own __init__(), super().__init__()"
        ) from error
    if not isinstance(laid_out, LaidOut) or laid_out.stepped.keys() != names:
        raise ValueError(f"strategy: lay_out() of {strategy.name!r} must return a LaidOut with a tensor per parameter")
    if wrong := [unit for unit in strategy.units if not hasattr(unit, "shards")]:
        raise ValueError(
            f"strategy: units of {strategy.name!r} has {wrong[0]!r:.40}; a unit is a sharded_params.Unit, and "
            "only a strategy that gathers some has units: leave it out"
        )
    return laid_out
