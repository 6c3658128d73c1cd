"""A copy of an optimizer that steps other, small tensors with the same options.

The copy is made without the class's constructor, whose arguments are unknown: all attributes are copied, and each
tensor that the optimizer steps is replaced in them by a small one.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlab.engines.step_tensors import StepTensors

LEAST_RATE = 1e-3  # a warm-up begins at 0, where all optimizers do the same: nothing
LARGEST = {0: 1, 1: 128, 2: 128}  # elements along a dim, by number of dims: some optimizers factor only from 128 x 128
LARGEST_OTHER = 12


@dataclass(frozen=True)
class StandIn:
    """A small tensor in place of the parameters of one group that have the same number of dims.

    Attributes:
        group: number of the parameter group.
        shape: that of the largest of them, made smaller.
        name: of one of them.
        state: what the optimizer already keeps for that one.
        original: the tensor of that one.
    """

    group: int
    shape: tuple[int, ...]
    name: str
    state: Mapping[str, Any]
    original: Tensor


def stand_ins(
    optimizer: torch.optim.Optimizer, tensors: StepTensors, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[StandIn], dict[int, int]]:
    """Up to two small tensors for each number of dims in a group, and which of them replaces which tensor, by its id.

    Args:
        optimizer: the original.
        tensors: what it steps.
        shapes: of the whole parameters, by name.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    found: list[StandIn] = []
    place = {id(tensor): 0 for tensor in tensors}  # also for tensors it was given and does not step
    for number, group in enumerate(optimizer.param_groups):
        by_dims: dict[int, list[Tensor]] = {}
        for tensor in group["params"]:
            by_dims.setdefault(len(shapes[names[id(tensor)]]), []).append(tensor)
        for alike in by_dims.values():
            # The longest of each dim: in a matrix of one column, what looks at rows looks at elements.
            shape = _small(tuple(map(max, zip(*(shapes[names[id(tensor)]] for tensor in alike), strict=True))))
            place.update({id(tensor): len(found) + index % 2 for index, tensor in enumerate(alike)})
            for tensor in alike[:2]:
                state = optimizer.state.get(tensor, {})
                found.append(StandIn(number, shape, names[id(tensor)], state, tensor))
    # One tensor alone would not show whether the optimizer lets it affect another.
    return found * 2 if len(found) == 1 else found, place


def copy_of(
    optimizer: torch.optim.Optimizer, stand_ins: Sequence[StandIn], place: Mapping[int, int], params: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` that steps ``params``, one for each stand-in; see ``stand_ins``.

    Raises:
        ValueError: it has hooks, a step of its own on the instance, or tensors that only its constructor can make.
        Exception: whatever copying an attribute raises.
    """
    # deepcopy's memo: references to these objects become references to the replacements given here.
    memo: dict[int, Any] = {address: params[number] for address, number in place.items()}
    memo[id(optimizer.param_groups)] = _groups(optimizer, stand_ins, params, memo)
    state: dict[Any, Any] = defaultdict(dict)
    memo[id(optimizer.state)] = state
    for stand_in, param in zip(stand_ins, params, strict=True):
        if stand_in.state:
            # A memo for each: two stand-ins of one tensor must not share the copy of its step counter.
            state[param] = {key: _like(value, stand_in, param, dict(memo)) for key, value in stand_in.state.items()}
    copy = _copied(optimizer, memo)
    _require_small({stand_in.original.shape for stand_in in stand_ins}, params, memo)
    return copy


def _groups(
    optimizer: torch.optim.Optimizer, stand_ins: Sequence[StandIn], params: Sequence[Tensor], memo: dict[int, Any]
) -> list[dict[str, Any]]:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = [place for place, stand_in in enumerate(stand_ins) if stand_in.group == number]
        own: dict[str, Any] = {"params": [params[place] for place in members]}
        if "param_names" in group:
            own["param_names"] = [stand_ins[place].name for place in members]
        memo |= {id(group): own, id(group["params"]): own["params"]}
        groups.append(own)
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        own.update({key: deepcopy(value, memo) for key, value in group.items() if key not in own})
        _raise_rate(own)
    return groups


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy; ``memo`` already holds what replaces tensors, groups and state."""
    _require_plain(optimizer)
    # In the memo before any attribute is copied, since attributes may refer back to the optimizer.
    memo[id(optimizer)] = copy = object.__new__(type(optimizer))
    # Torch's own way to fill an optimizer without its constructor, as in unpickling; it gets no hooks of the original.
    torch.optim.Optimizer.__setstate__(
        copy, {key: deepcopy(getattr(optimizer, key), memo) for key in ("param_groups", "state", "defaults")}
    )
    attributes = {key: value for key, value in vars(optimizer).items() if key not in vars(copy) and key != "step"}
    for value in attributes.values():
        # An optimizer inside this one: torch's own deepcopy would drop the attributes that its class adds.
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            _copied(value, memo)
    for key, value in attributes.items():
        setattr(copy, key, deepcopy(value, memo))
    return copy


def _require_plain(optimizer: torch.optim.Optimizer) -> None:
    # A hook may change anything, the user's objects too, so it must not run in a trial. Torch has no public way to ask.
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError("it has step hooks; register them on engine.optimizer once the engine is built")
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # a scheduler only counts the calls
        raise ValueError("its step has been replaced on the instance")


def _require_small(shapes: Collection[torch.Size], params: Sequence[Tensor], memo: Mapping[int, Any]) -> None:
    """Check that no attribute holds a tensor made from a parameter: it would have the full size in the trial."""
    known = {id(param) for param in params}
    for copied in memo.values():
        if isinstance(copied, Tensor) and copied.numel() > 1 and id(copied) not in known and copied.shape in shapes:
            raise ValueError(f"an attribute holds a tensor of shape {tuple(copied.shape)}, made from a parameter")


def _like(value: Any, stand_in: StandIn, param: Tensor, memo: dict[int, Any]) -> Any:
    """State from before the first step, for a smaller tensor; a constructor can only have filled it with one value."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return deepcopy(value, memo)
    if value.shape != stand_in.original.shape:
        raise ValueError(f"its state has shape {tuple(value.shape)} for a tensor of {tuple(stand_in.original.shape)}")
    fill = value.flatten()[0].item() if value.numel() else 0.0
    dtype = param.dtype if value.dtype == stand_in.original.dtype else value.dtype
    return torch.full(param.shape, fill, dtype=dtype, device=param.device)


def _raise_rate(group: dict[str, Any]) -> None:
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        rate.clamp_(min=LEAST_RATE)
    elif isinstance(rate, int | float):
        group["lr"] = max(rate, LEAST_RATE)


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, LARGEST.get(len(shape), LARGEST_OTHER)) for size in shape)
