"""What is wrong with what a strategy has made of a model, told before anything is trained."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from math import prod
from typing import Any

import torch

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending
from shardlab.engines.any_engine import owned_in
from shardlab.engines.precision import Precision
from shardlab.engines.sharded_params import Placements
from shardlab.engines.strategy import Given, LaidOut, Strategy
from shardlab.vocabulary import MeshAxis, class_of

_MISSPELT = 0.8  # of ``difflib``: "redcue" and "reduces" for "reduce", and not "reduce_all"
_OF_CLASS = 0.9  # the same of what a class says of itself: "round" for "rounds"; there a reader has names of their own
_RENAMED = {"keeps_pieces": "full_gathers", "rests_partial": "sends_in_no_sync"}
_OF_SOME = {"reduce": "Bucketed", "scatter": "ZeRO1 or ZeRO2", "divide": "ZeRO1, ZeRO2 or ZeRO3"}
_CONTEXTS = ("in_forward", "in_backward", "stepping", "visiting", "full", "kept_gathered")
_PENDING = "the Pending that the communicator returned, or Pending() where nothing is left to wait for"
_CONTEXT = "a context manager, as a function with one yield does under @contextlib.contextmanager"
_RETURNED: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("reduce", "scatter"), (Pending, _PENDING)),
    **dict.fromkeys(_CONTEXTS, (AbstractContextManager, _CONTEXT)),
}


def check_strategy(strategy: object) -> None:
    """Refuse what is no strategy.

    Raises:
        ValueError: it is a class of strategies, something else, or its ``axes`` are one name or
            have that of sequences.
    """
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ValueError(f"strategy: the class {strategy.__name__} was given; give one of it, {strategy.__name__}()")
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy: {class_of(strategy)} was given; give a Strategy, such as ZeRO1()")
    axes: object = strategy.axes
    if isinstance(axes, str):
        raise ValueError(f"strategy: axes of {strategy.name!r} is {axes!r}; give a tuple, axes = ('data',)")
    if MeshAxis.CONTEXT in strategy.axes:
        raise ValueError("axes: leave 'context' out: a mesh that has it counts it with the strategy's last axis")


def _check_methods(kind: type[Strategy]) -> None:
    """Refuse a method that nobody would call: a misspelt one, or one of other strategies."""
    for one in kind.__mro__[: kind.__mro__.index(Strategy)]:
        if one.__module__.startswith("shardlab."):
            continue  # a name of ours may well be like another
        above, own = {name for base in one.__mro__[1:] for name in _public_methods(base)}, _public_methods(one)
        said = {name for name in dir(Strategy) if not name.startswith("_")} - above
        for name in vars(one).keys() - own - said:
            if meant := get_close_matches(_RENAMED.get(name, name), said, n=1, cutoff=_OF_CLASS):
                raise ValueError(
                    f"strategy: {one.__name__}.{name} is read by nobody; write {meant[0]}, or _{name} if it is your own"
                )
        for name in own - above:
            begun = [method for method in sorted(above) if method.startswith(name)]
            if meant := get_close_matches(name, above, n=1, cutoff=_MISSPELT) or begun:
                raise ValueError(
                    f"strategy: {one.__name__}.{name}() is no method of a strategy, so nobody calls it; write "
                    f"{meant[0]}(), or _{name}() if it is a helper of your own"
                )
            if name in _OF_SOME and Strategy not in one.__bases__:
                raise ValueError(
                    f"strategy: nobody calls {one.__name__}.{name}(), which strategies made from {_OF_SOME[name]} may "
                    f"have; make it from one of these, or write _{name}() if it is a helper of your own"
                )


def _public_methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


def laid_out_by(strategy: Strategy, given: Given) -> LaidOut:
    """What a strategy makes of a model.

    Raises:
        ValueError: a method that nobody calls, such as one with nearly the name of another; ``super().lay_out(given)``
            or ``super().__init__()`` left out; ``divide()`` or ``units`` that are none; or what it returns is not, for
            each parameter, a tensor of the size that its divisions say.
    """
    _check_methods(type(strategy))
    _check_what_methods_return(strategy)
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
    held = {name for bucket in getattr(strategy, "buckets", ()) for name in getattr(bucket, "params", ())}
    if held and (left_out := sorted(shapes.keys() - held)):
        raise ValueError(
            f"strategy: make_buckets() of {strategy.name!r} leaves out {left_out[0]!r}; each parameter is in one bucket"
        )
    if wrong := [unit for unit in strategy.units if not hasattr(unit, "shards")]:
        raise ValueError(
            f"strategy: units of {strategy.name!r} has {wrong[0]!r:.40}; a unit is a unit.Unit, and only a "
            "strategy that gathers some has units: leave it out"
        )
    if not strategy.steps_pieces and any(laid_out.stepped[name] is not one for name, one in given.params.items()):
        raise ValueError(
            f"strategy: lay_out() of {strategy.name!r} lets the optimizer step other tensors than the module's "
            "parameters; say so, steps_pieces = True"
        )
    _check_sizes(strategy, laid_out, shapes)
    _check_axes(strategy, laid_out, given)
    return laid_out


def _check_axes(strategy: Strategy, laid_out: LaidOut, given: Given) -> None:
    """Refuse to divide over a part of an axis.

    Nobody would know which of the axis' ranks have copies, and a checkpoint would lose what is on some.
    """
    for division in laid_out.divisions:
        parts = [set(comm.ranks) & set(division.comm.ranks) for comm in given.comms]
        if division.is_spread and any(
            1 < len(part) < comm.num_ranks for part, comm in zip(parts, given.comms, strict=True)
        ):
            raise ValueError(
                f"strategy: lay_out() of {strategy.name!r} divides what is stepped over {division.comm.axis!r}, a part "
                "of one of its axes; name two axes, axes = ('replica', 'shard'), and divide over one or both"
            )


def _check_what_methods_return(strategy: Strategy) -> None:
    """From now on, at each call of a method of the reader's own."""
    checks = {name: functools.partial(_check_returned, name, *wanted) for name, wanted in _RETURNED.items()}
    for name, check in {**checks, "divide": functools.partial(_check_division, strategy.name)}.items():
        method = getattr(strategy, name, None)
        if method is not None and not str(method.__module__).startswith("shardlab."):
            setattr(strategy, name, _checked(method, check))


def _checked(method: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    """A strategy's own method, with a check of what it returns."""

    @functools.wraps(method)
    def checked(*args: Any, **options: Any) -> Any:
        returned = method(*args, **options)
        check(returned)
        return returned

    return checked


def _check_returned(method: str, kind: type, advice: str, returned: object) -> None:
    if not isinstance(returned, kind):
        raise ValueError(f"strategy: {method}() returned {class_of(returned)}; return {advice}")


def _check_division(strategy: str, returned: object) -> None:
    """Refuse what nothing can be cut by."""
    match returned:
        case (Communicator() as comm, Placements(precision=Precision(), replicas=replicas, axes=axes)):
            if all(isinstance(one, Communicator) for some in (replicas, axes) for one in some):
                if axes and (product := prod(axis.num_ranks for axis in axes)) != comm.num_ranks:
                    raise ValueError(
                        f"strategy: what is stepped is divided over {comm.num_ranks} ranks, and its axes have "
                        f"{product}; for both axes divide over given.mesh.flatten(...) of them"
                    )
                return
    raise ValueError(
        f"strategy: divide() of {strategy!r} returned {returned!r:.80}; return the ranks, a communicator, and "
        "Placements of them, as in (self.comm, Placements(self.precision))"
    )


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
