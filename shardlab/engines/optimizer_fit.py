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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from shardlab.engines.checks import check_optimizer
from shardlab.engines.optimizer_trial import DECLARATION, LooksAt, Stepped, flat_pieces, looks_at, pieces_along
from shardlab.engines.step_tensors import OptimizerFn, StepTensors
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import Partition

# Private: there is no public way to ask for a parameter's hooks.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_READABLE_NUMEL = 2**16  # elements of a tensor that a user's function may make and read while it is tried


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
            too, to find out whether it would make the same groups, and then once more; if it fails, to find out whether
            it refuses pieces, as Muon's constructor does.
        stepped: what the optimizer is to step.
        cut: of the parameters.

    Raises:
        ValueError: the partition cuts what the optimizer looks at, or a trial cannot tell (see ``looks_at``); or
            ``make`` refuses pieces and takes whole parameters.
        Exception: otherwise whatever ``make`` raises.
    """
    try:
        with stepped.tensors.choosing() as choice:
            optimizer = make(stepped.tensors)
    except Exception as error:  # a user's class may raise anything
        if cut.goes_through and (kind := _made_of_whole(make, stepped)) is not None:
            raise _cuts_through(kind, by_rows=cut.by_rows) from error
        # Torch's own error if it found none of those that it was looking for.
        if isinstance(error, ValueError) and stepped.groups_of_own is not None and stepped.groups_of_own(make):
            raise _chosen_among_pieces(cut) from error
        raise
    check_optimizer(optimizer, stepped.tensors)
    if cut.num_ranks > 1:
        _check_cut(optimizer, stepped, cut)
    groups = _names_by_group(optimizer, stepped.tensors)
    if choice.is_by_name(groups) or (stepped.groups_of_own is None and cut.num_ranks == 1):
        return optimizer
    del optimizer  # and its state, if it makes that at once
    if any(groups != wanted for wanted in _groups_of_whole(make, stepped)):
        raise _chosen_among_pieces(cut)
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


def groups_of(make: OptimizerFn, params: Mapping[str, nn.Parameter], pieces: StepTensors) -> list[list[str]] | None:
    """The names in each group that ``make`` chooses from the module's own parameters; None if it fails with them.

    Only these have the identity, class and attributes by which a user may choose. They are lent without their values:
    what ``make`` does to them, as it does to the pieces it steps, must not be done twice.

    Args:
        make: the user's function.
        params: of the module, by name.
        pieces: of the parameters, in the dtypes in which they are stored.
    """
    tensors = StepTensors(params)
    with contextlib.ExitStack() as lent, contextlib.suppress(Exception):
        for name, param in params.items():
            lent.enter_context(_without_values(param, pieces.by_name(name).dtype))
        with _WithoutMemory():  # type: ignore[no-untyped-call]
            return _names_by_group(make(tensors), tensors)
    return None  # a user's class may raise anything, and raises it again where the engine calls it


@contextlib.contextmanager
def _without_values(param: nn.Parameter, dtype: torch.dtype) -> Iterator[None]:
    """Inside, a parameter has no values and cannot be written to; at the end it is what it was."""
    data, trains, attributes = param.data, param.requires_grad, dict(vars(param))
    hooks = {kind: dict(getattr(param, kind) or {}) for kind in _HOOKS}
    # Expanded: torch refuses to write where elements share their memory.
    param.data = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
    try:
        yield
    finally:
        param.data = data
        param.requires_grad_(trains)
        vars(param).clear()
        vars(param).update(attributes)
        for kind, known in hooks.items():
            if (now := getattr(param, kind)) is not None:
                now.clear()
                now.update(known)


class _WithoutMemory(TorchDispatchMode):
    """Inside, large new tensors are on the meta device: an optimizer may make its state, of all parameters.

    Small ones are real, since a function may read what it computes, such as learning rates. To write into what has no
    values does nothing.
    """

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.clone.default:
            func, kwargs = torch.ops.aten._to_copy.default, {}
        if any(argument.name == "device" for argument in func._schema.arguments):
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > _READABLE_NUMEL:
                return made
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            first = func._schema.arguments[0].alias_info if args else None
            if first is None or not first.is_write:
                raise
            return args[0] if isinstance(args[0], Tensor) else None  # a list of tensors: torch's foreach


def _groups_of_whole(make: OptimizerFn, stepped: Stepped) -> list[list[list[str]]]:
    """The names in each group that ``make`` chooses from whole parameters, for each kind of these that it takes.

    They are the module's own, or stand-ins that only have their shapes.
    """
    if stepped.groups_of_own is not None and (found := stepped.groups_of_own(make)):
        return found
    for device in (torch.device("meta"), stepped.tensors[0].device):
        whole = _whole(stepped, device)
        with contextlib.suppress(Exception):  # torch refuses fused=True on the meta device
            return [_names_by_group(make(whole), whole)]
    return []  # what it does with tensors without memory says nothing


def _chosen_among_pieces(cut: Cut) -> ValueError:
    """The error for tensors that were chosen by what pieces do not share with the parameters."""
    by_shape = ", or, by shape, use a partition other than 'elements'" if cut.goes_through else ""
    return ValueError(
        "optimizer_fn: it groups tensors by their shape or size, or by identity, class or attributes, and this rank's "
        "are pieces, perhaps empty ones, which share none of these with the module's parameters; choose by name with "
        f"tensors.where(lambda name: ...){by_shape}"
    )


def _names_by_group(optimizer: torch.optim.Optimizer, tensors: StepTensors) -> list[list[str]]:
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [[names.get(id(tensor), "") for tensor in group["params"]] for group in optimizer.param_groups]


def _made_of_whole(make: OptimizerFn, stepped: Stepped) -> str | None:
    """The class of the optimizer that ``make`` builds over whole parameters; None if it refuses those too."""
    try:
        return type(make(_whole(stepped, torch.device("meta")))).__name__
    except Exception:  # then the pieces are not the reason
        return None


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
