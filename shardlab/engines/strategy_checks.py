"""What is wrong with a strategy that an engine is given, told once and before anything is trained."""

from collections.abc import Mapping

import torch

from shardlab.engines.holdings import owned_in
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


def laid_out_by(strategy: Strategy, given: Given) -> LaidOut:
    """What a strategy makes of a model.

    Raises:
        ValueError: it leaves out ``super().lay_out(given)`` or ``super().__init__()``, its units are none, or what it
            returns is not a tensor of the size that its divisions say for each parameter.
    """
    shapes = {name: param.shape for name, param in given.params.items()}  # before others take the place of meta ones
    try:
        laid_out = strategy.lay_out(given)
        is_laid_out = isinstance(laid_out, LaidOut) and laid_out.stepped.keys() == shapes.keys()
        _ = strategy.num_ranks if is_laid_out else None  # which the base's lay_out() has set
    except AttributeError as error:
        if error.obj is not strategy:
            raise
        raise ValueError(
            f"strategy: {strategy.name!r} has no {error.name!r}; in its own lay_out(), call super().lay_out(given) "
            "first, and in its own __init__(), super().__init__()"
        ) from error
    if not is_laid_out:
        raise ValueError(f"strategy: lay_out() of {strategy.name!r} must return a LaidOut with a tensor per parameter")
    if wrong := [unit for unit in strategy.units if not hasattr(unit, "shards")]:
        raise ValueError(
            f"strategy: units of {strategy.name!r} has {wrong[0]!r:.40}; a unit is a unit.Unit, and only a "
            "strategy that gathers some has units: leave it out"
        )
    _check_sizes(strategy, laid_out, shapes)
    for division in laid_out.divisions:
        # Else nobody knows which of an axis' ranks have copies, and a checkpoint would lose what is on some.
        parts = [set(comm.ranks) & set(division.comm.ranks) for comm in given.comms]
        if division.is_spread and any(
            1 < len(part) < comm.num_ranks for part, comm in zip(parts, given.comms, strict=True)
        ):
            raise ValueError(
                f"strategy: lay_out() of {strategy.name!r} divides what is stepped over {division.comm.axis!r}, a part "
                "of one of its axes; name two axes, axes = ('replica', 'shard'), and divide over one or both"
            )
    return laid_out


def _check_sizes(strategy: Strategy, laid_out: LaidOut, shapes: Mapping[str, torch.Size]) -> None:
    spans = {name: (0, shape.numel()) for name, shape in shapes.items()}
    if any(division.is_spread for division in laid_out.divisions):
        spans = owned_in(laid_out.divisions, shapes)
    for name, tensor in laid_out.stepped.items():
        start, stop = spans.get(name, (0, 0))
        if tensor.numel() != stop - start:
            raise ValueError(
                f"strategy: lay_out() of {strategy.name!r} lets this rank step {tensor.numel()} elements of {name!r}, "
                f"and its divisions say {stop - start}; norms and checkpoints are made by the divisions"
            )
