"""What an optimizer looks at when it steps an element: that element, the whole tensor, or the whole model.

==================  ==================================================
looks at            exact where a rank steps
==================  ==================================================
one element         any pieces
the whole tensor    whole parameters: a partition other than 'elements'
the whole model     the whole model: ddp, bucketed, fsdp no_shard
==================  ==================================================

Torch's own are known. Any other says so itself, in its class or on the instance: ``shardlab_looks_at = "element"``,
"tensor" or "model".
"""

import contextlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.engines.checks import check_optimizer
from shardlab.engines.step_tensors import OptimizerFn, StepTensors, groups_of
from shardlab.vocabulary import Partition

Shapes = Mapping[str, tuple[int, ...]]
DECLARATION = "shardlab_looks_at"
# Private: there is no public way to ask for a parameter's hooks.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_WHOLE = f"use one of {', '.join(other for other in Partition if other is not Partition.ELEMENTS)}"


class LooksAt(StrEnum):
    """What a step of one element depends on."""

    ELEMENT = "element"
    TENSOR = "tensor"
    MODEL = "model"


_KNOWN = {
    LooksAt.ELEMENT: "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD SparseAdam",
    LooksAt.TENSOR: "Adafactor Muon",
    LooksAt.MODEL: "LBFGS",
}
# By the class itself: a subclass may do anything else. Not all torch versions have all of them.
KNOWN = {
    kind: looks_at
    for looks_at, names in _KNOWN.items()
    for kind in (getattr(torch.optim, name, None) for name in names.split())
    if kind is not None
}


def looks_at(optimizer: torch.optim.Optimizer) -> LooksAt | None:
    """What an optimizer looks at; None where nobody has said.

    Raises:
        ValueError: it declares something else than the three.
    """
    declared = getattr(optimizer, DECLARATION, None)
    if declared is None:
        return KNOWN.get(type(optimizer))
    if declared not in tuple(LooksAt):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer: {kind}.{DECLARATION} is {declared!r}, not one of {', '.join(LooksAt)}")
    return LooksAt(declared)


class Cut(NamedTuple):
    """How parameters are divided.

    Attributes:
        partition: 'elements' cuts parameters, the others give whole ones to ranks.
        is_spread: whether several ranks share them.
        is_sliced: whether some are slices of tensor parallelism.
    """

    partition: Partition
    is_spread: bool
    is_sliced: bool

    @property
    def goes_through(self) -> bool:
        """Whether ranks have parts of a parameter."""
        return self.is_sliced or (self.is_spread and self.partition is Partition.ELEMENTS)


def fitting_optimizer(
    make: OptimizerFn, tensors: StepTensors, params: Mapping[str, Tensor], shapes: Shapes, cut: Cut
) -> torch.optim.Optimizer:
    """The optimizer that a user's function builds, if it fits how parameters are divided.

    Args:
        make: the user's function; called again, with the module's parameters, where it looks at single tensors, to find
            out whether it would make the same groups.
        tensors: what the optimizer is to step.
        params: the module's, by name.
        shapes: of the whole model's parameters, by name.
        cut: of the parameters.

    Raises:
        ValueError: its steps would depend on what other ranks have, nobody has said what they depend on, or the
            function has chosen tensors by what pieces do not have.
        Exception: whatever ``make`` raises, with a note on what it was given.
    """
    try:
        with tensors.choosing() as choice:
            optimizer = make(tensors)
    except Exception as error:
        if (advice := _advice(tensors, params, cut)) is not None:
            error.add_note(f"optimizer_fn: {advice}")
        raise
    check_optimizer(optimizer, tensors)
    if cut.is_spread or cut.is_sliced:
        _check_fits(optimizer, cut)
    elif all(tensor is params[name] for name, tensor in tensors.items()):
        return optimizer
    groups = groups_of(optimizer, tensors)
    if choice.is_by_name([group.names for group in groups]):
        return optimizer
    why = "it groups tensors by their shape or size, or by identity, class or attributes"
    try:
        with _as_whole(params, shapes) as whole:
            are_alike = groups_of(make(whole), whole) == groups
    except Exception as error:  # a user's function may raise anything
        why = f"it could not be tried with the module's parameters ({type(error).__name__}: {error})"
        are_alike = False
    if not are_alike:
        raise ValueError(
            f"optimizer_fn: {why}, and this rank's are pieces, perhaps empty ones, which share none of these with the "
            "module's parameters; choose by name with tensors.where(lambda name: ...)"
        )
    return make(tensors)  # again, so that whatever the user's function keeps is of the optimizer that steps


def _advice(tensors: StepTensors, params: Mapping[str, Tensor], cut: Cut) -> str | None:
    """What a function may have stumbled over that would have worked with the module's parameters."""
    if frozen := [name for name, tensor in tensors.items() if not tensor.requires_grad]:
        return (
            f"it is given frozen parameters too, such as {frozen[0]!r}, since they may be unfrozen later; leave them "
            "out with tensors.where(lambda name: model.get_parameter(name).requires_grad)"
        )
    if not cut.is_sliced and all(tensor is params[name] for name, tensor in tensors.items()):
        return None
    advice = "it is given this rank's pieces, perhaps empty ones; choose by name with tensors.where(lambda name: ...)"
    return f"{advice}, or, if it takes whole tensors, {_WHOLE}" if cut.goes_through else advice


@contextlib.contextmanager
def _as_whole(params: Mapping[str, Tensor], shapes: Shapes) -> Iterator[StepTensors]:
    """The module's parameters themselves, in the whole shapes and with one element of memory; what is done is undone.

    Themselves, since a function may know them by identity, class or attributes.
    """
    kept = [(one, one.data, one.grad, one.requires_grad, dict(vars(one))) for one in params.values()]
    hooks = [[(name, getattr(one, name), dict(getattr(one, name) or {})) for name in _HOOKS] for one in params.values()]
    for name, one in params.items():
        one.grad, one.data = None, one.data.new_zeros(()).expand(shapes[name])
    try:
        yield StepTensors(params)
    finally:
        for (one, data, grad, trains, attributes), known in zip(kept, hooks, strict=True):
            one.grad = None
            one.data, one.requires_grad = data, trains
            one.grad = grad
            vars(one).clear()
            vars(one).update(attributes)
            for name, home, before in known:
                if home is not None:  # the same object, which handles refer to
                    home.clear()
                    home.update(before)
                setattr(one, name, home)


def _check_fits(optimizer: torch.optim.Optimizer, cut: Cut) -> None:
    kind, found = type(optimizer).__name__, looks_at(optimizer)
    if found is LooksAt.MODEL:
        raise ValueError(f"optimizer: {kind} looks at the whole model, so it cannot be sharded; use bucketed or ddp")
    if found is LooksAt.TENSOR and cut.is_sliced:
        raise ValueError(
            f"optimizer: {kind} looks at more than one element at a time, and the model's parameters are slices over "
            "the tensor axis; use an optimizer that steps element by element, such as AdamW"
        )
    if found is LooksAt.TENSOR and cut.goes_through:
        raise ValueError(f"partition: {kind} looks at whole tensors, and 'elements' cuts through them; {_WHOLE}")
    if found is None:
        raise ValueError(
            f"optimizer: {kind} is none of torch's own, and this rank steps a part of the model; say in its class what "
            f"a step of one element looks at: {DECLARATION} = 'element', 'tensor' or 'model'; for 'tensor' use a "
            "partition other than 'elements'"
        )
