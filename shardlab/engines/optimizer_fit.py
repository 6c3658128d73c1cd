"""Which optimizers fit the partition of the parameters: what one looks at must be whole on the rank that steps it.

==================  ==================================================
looks at            exact where a rank steps
==================  ==================================================
one element         any pieces
the whole tensor    whole parameters: a partition other than 'elements'
the whole model     the whole model: ddp, bucketed, fsdp no_shard
==================  ==================================================

An optimizer that does not fit is refused when the engine is built, before its first step.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardlab.engines.checks import check_optimizer
from shardlab.engines.optimizer_trial import (
    DECLARATION,
    LooksAt,
    Stepped,
    flat_pieces,
    generator_states,
    generators_kept,
    looks_at,
    pieces_along,
)
from shardlab.engines.step_tensors import Group, OptimizerFn, StepTensors, TrialEnds, groups_of, noting_groups
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import Partition

# Private: there is no public way to ask for a parameter's hooks.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Cut:
    """How parameters are divided over the ranks that share them.

    Attributes:
        partition: 'elements' cuts parameters, the others give whole ones to ranks.
        num_ranks: how many share them; with one, every optimizer fits.
        by_rows: whether 'elements' leaves rows whole, as the layout 'dim0' does.
    """

    partition: Partition
    num_ranks: int
    by_rows: bool = False

    @property
    def goes_through(self) -> bool:
        """Whether a parameter is cut, so that several ranks have parts of it."""
        return self.num_ranks > 1 and self.partition is Partition.ELEMENTS


def fitting_optimizer(make: OptimizerFn, stepped: Stepped, cut: Cut) -> torch.optim.Optimizer:
    """The optimizer that ``make`` builds over the pieces this rank steps, if it fits the cut.

    Args:
        make: the user's function. If it looks at single tensors, which are pieces, it is called with whole parameters
            too, to find out whether it would make the same groups; if it fails, to find out whether it refuses pieces,
            as Muon's constructor does.
        stepped: what the optimizer is to step.
        cut: of the parameters.

    Raises:
        ValueError: the partition cuts what the optimizer looks at, or a trial cannot tell (see ``looks_at``); or
            ``make`` chooses by what pieces do not have, or refuses pieces and takes whole parameters.
        Exception: otherwise whatever ``make`` raises.
    """
    given: list[Group] = []
    before = generator_states(stepped.device)
    try:
        with noting_groups(stepped.tensors, given), stepped.tensors.choosing() as choice:
            optimizer = make(stepped.tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a user's class may raise anything
        if choice.are_seen:
            found, _ = _groups_of_whole(make, stepped, len(given) + 1, before)
            if any(groups != given for groups in found):
                raise _chosen_among_pieces(cut, f"; with pieces it raises {type(error).__name__}: {error}") from error
        if cut.goes_through and (kind := _made_of_whole(make, stepped)) is not None:
            raise _cuts_through(kind, by_rows=cut.by_rows) from error
        if (frozen := _refused_for_frozen(make, stepped)) is not None:
            raise ValueError(
                f"optimizer_fn: {error} ({type(error).__name__}); it is given frozen parameters too, such as "
                f"{frozen!r}, since they may be unfrozen later; leave them out with tensors.where(lambda name: "
                "model.get_parameter(name).requires_grad)"
            ) from error
        raise
    check_optimizer(optimizer, stepped.tensors)
    if cut.num_ranks > 1:
        _check_cut(optimizer, stepped, cut)
    groups = groups_of(optimizer, stepped.tensors)
    if choice.is_by_name([group.names for group in groups]) or (stepped.own is None and cut.num_ranks == 1):
        return optimizer
    # As a rule an optimizer has the groups that it was given, and a trial can end with the last of them: before it has
    # made a state for all parameters, and before the user's function keeps anything of it.
    if all(group.names in [known.names for known in given] for group in groups):
        _check_choice(make, stepped, cut, given, len(given), before)
        return optimizer
    _check_choice(make, stepped, cut, groups, None, before)
    # Once more, so that whatever the user's function keeps is of the optimizer that steps.
    return make(stepped.tensors)


def parse_partition(partition: Partition | str) -> Partition:
    """The member of ``Partition`` with this name.

    Raises:
        ValueError: there is none; the message lists the allowed names.
    """
    try:
        return Partition(partition)
    except ValueError:
        raise ValueError(f"partition: {partition!r} is not one of {', '.join(Partition)}") from None


def _check_cut(optimizer: torch.optim.Optimizer, stepped: Stepped, cut: Cut) -> None:
    kind = type(optimizer).__name__
    pieces = (pieces_along(0) if cut.by_rows else flat_pieces,) if cut.goes_through else ()
    found = looks_at(optimizer, stepped, pieces)
    _warn_of_untried(optimizer)
    if found is LooksAt.MODEL:
        raise ValueError(f"optimizer: {kind} looks at the whole model, so it cannot be sharded; use bucketed or ddp")
    if found is LooksAt.TENSOR and cut.goes_through:
        raise _cuts_through(kind, by_rows=cut.by_rows)


def _warn_of_untried(optimizer: torch.optim.Optimizer) -> None:
    """Warn of methods that a user may call beside ``step()``, such as the first of SAM's two steps.

    They are not called to be tried: nobody knows what else they do.
    """
    if getattr(optimizer, DECLARATION, None) is not None:
        return
    own = [cls for cls in type(optimizer).__mro__ if not cls.__module__.startswith(("torch.", "builtins"))]
    methods = {
        name: None for cls in own for name, found in vars(cls).items()
        if callable(found) and not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
    }  # fmt: skip
    if methods:
        warnings.warn(
            f"optimizer: of {type(optimizer).__name__} only step() was tried on pieces, and not {', '.join(methods)}; "
            "a method that takes the norm of a tensor, for example, would take that of this rank's piece; if all of "
            f"them look at single elements, say so in the class: {DECLARATION} = 'element'",
            stacklevel=2,
        )


def check_sliced(optimizer: torch.optim.Optimizer, stepped: Stepped, slices: Mapping[str, TensorSlice]) -> None:
    """Refuse an optimizer that looks at more than elements where some parameters are slices.

    Args:
        optimizer: new.
        stepped: what it steps; the shapes are those of the slices.
        slices: of the parameters, by name.

    Raises:
        ValueError: its step would not be that of the whole model, or a trial cannot tell.
    """
    if not any(found.num_ranks > 1 for found in slices.values()):
        return
    # Tried on tensors shaped like the whole parameters: a slice may be a single row or column.
    whole = {name: found.full_shape for name, found in slices.items()}
    stepped = replace(stepped, shapes={**stepped.shapes, **whole})
    if looks_at(optimizer, stepped, (pieces_along(0), pieces_along(1))) is not LooksAt.ELEMENT:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} looks at more than one element at a time, and the model's "
            "parameters are slices over the tensor axis; use an optimizer that steps element by element, such as AdamW"
        )


def check_choice_of_slices(make: OptimizerFn, stepped: Stepped, slices: Mapping[str, TensorSlice]) -> None:
    """Refuse a function that groups tensors by sizes which slices do not share with the whole parameters.

    Raises:
        ValueError: it makes other groups of tensors of the parameters' full shapes than of the slices' shapes.
    """
    if not any(known.num_ranks > 1 for known in slices.values()):
        return
    whole = {name: known.full_shape for name, known in slices.items()}
    groups: list[list[Group]] = []
    for shapes in (stepped.shapes, {**stepped.shapes, **whole}):
        tensors = _whole(replace(stepped, shapes=shapes), stepped.device)
        found: list[Group] = []
        # The second is ended with its last group: no state is made in the shapes of whole parameters.
        at_most = len(groups[0]) if groups else None
        with generators_kept(stepped.device, generator_states(stepped.device)):
            try:
                with noting_groups(tensors, found, at_most):
                    make(tensors)
            except TrialEnds:
                pass
            except Exception:  # it chooses by identity, class or attributes, which slices share with the parameters
                return
        groups.append(found)
    if groups[0] != groups[1]:
        raise ValueError(
            "optimizer_fn: it groups tensors by their size, and the model's parameters are slices over the tensor "
            "axis, which are smaller than the whole ones; choose by name with tensors.where(lambda name: ...)"
        )


def _check_choice(
    make: OptimizerFn, stepped: Stepped, cut: Cut, groups: list[Group], at_most: int | None, states: tuple[Any, ...]
) -> None:
    """Raise ValueError unless ``make`` makes the same groups of whole parameters."""
    found, error = _groups_of_whole(make, stepped, at_most, states)
    if not found:
        raise ValueError(
            "optimizer_fn: it chooses among single tensors, which are pieces here, and could not be tried with the "
            f"module's parameters, which have no values meanwhile: {type(error).__name__}: {error}; choose by name "
            "with tensors.where(lambda name: ...)"
        ) from error
    if any(other != groups for other in found):
        raise _chosen_among_pieces(cut)


def _groups_of_whole(
    make: OptimizerFn, stepped: Stepped, at_most: int | None, states: tuple[Any, ...]
) -> tuple[list[list[Group]], Exception | None]:
    """The groups that ``make`` gives an optimizer of whole parameters, for each set of them; and the error of a set.

    They are the module's own, which alone have the identity, class and attributes by which a user may choose, or
    stand-ins that have only their shapes.

    Args:
        make: the user's function.
        stepped: what the optimizer is to step.
        at_most: how many groups end the trial; None for those that the optimizer has in the end.
        states: of the random generators, as they were when ``make`` was called with pieces.
    """
    sets, caught = [], None
    lent = contextlib.nullcontext([_whole(stepped, stepped.device)]) if stepped.own is None else stepped.own()
    with generators_kept(stepped.device, states), lent as known:
        for whole in known:
            found: list[Group] = []
            try:
                with noting_groups(whole, found, at_most):
                    optimizer = make(whole)
                sets.append(found if at_most is not None else groups_of(optimizer, whole))
            except TrialEnds:
                sets.append(found)
            except Exception as error:  # a user's class may raise anything
                caught = error
    return sets, caught


@contextlib.contextmanager
def without_values(param: nn.Parameter, dtype: torch.dtype) -> Iterator[None]:
    """Inside, a parameter has no values, and of several elements cannot be written to; at the end it is what it was."""
    data, gradient, trains, attributes = param.data, param.grad, param.requires_grad, dict(vars(param))
    hooks = {kind: dict(getattr(param, kind) or {}) for kind in _HOOKS}
    param.grad = None  # it would have another dtype
    # Expanded: torch refuses to write where elements share their memory.
    param.data = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
    try:
        yield
    finally:
        param.grad = None
        param.data = data
        param.grad = gradient
        param.requires_grad_(trains)
        vars(param).clear()
        vars(param).update(attributes)
        for kind, known in hooks.items():
            if (now := getattr(param, kind)) is not None:
                now.clear()
                now.update(known)


def _chosen_among_pieces(cut: Cut, told: str = "") -> ValueError:
    """The error for tensors that were chosen by what pieces do not share with the parameters."""
    by_shape = ", or, by shape, use a partition other than 'elements'" if cut.goes_through else ""
    return ValueError(
        "optimizer_fn: it groups tensors by their shape or size, or by identity, class or attributes, and this rank's "
        "are pieces, perhaps empty ones, which share none of these with the module's parameters"
        f"{told}; choose by name with tensors.where(lambda name: ...){by_shape} (or it does something else when it is "
        "called again)"
    )


def _made_of_whole(make: OptimizerFn, stepped: Stepped) -> str | None:
    """The class of the optimizer that ``make`` builds over whole parameters; None if it refuses those too."""
    try:
        return type(make(_whole(stepped, torch.device("meta")))).__name__
    except Exception:  # then the pieces are not the reason
        return None


def _refused_for_frozen(make: OptimizerFn, stepped: Stepped) -> str | None:
    """A frozen parameter, if ``make`` takes whole ones without those that are frozen; else None."""
    whole = _whole(stepped, torch.device("meta"))
    frozen = [name for name, tensor in whole.items() if not tensor.requires_grad]
    if not frozen:
        return None
    try:
        make(whole.where(lambda name: name not in frozen))
    except Exception:  # then they are not the reason
        return None
    return frozen[0]


def _whole(stepped: Stepped, device: torch.device) -> StepTensors:
    """What is stepped, in the parameters' shapes and without their memory: one element each, expanded."""
    return StepTensors({
        name: torch.zeros((), dtype=tensor.dtype, device=device)
        .expand(stepped.shapes[name])
        .requires_grad_(tensor.requires_grad)
        for name, tensor in stepped.tensors.items()
    })  # fmt: skip


def _cuts_through(kind: str, *, by_rows: bool) -> ValueError:
    allowed = ", ".join(other for other in Partition if other is not Partition.ELEMENTS)
    layout = " with layout='flat'" if by_rows else ""
    return ValueError(
        f"partition: {kind} looks at whole tensors, and 'elements' cuts through them; use one of {allowed}{layout}"
    )
