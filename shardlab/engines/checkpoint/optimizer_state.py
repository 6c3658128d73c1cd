"""An optimizer's state in the plain torch format, with full tensors: from any engine, and into any engine.

Parameters are numbered through the groups, as in torch. Every rank makes the same groups (see ``step_tensors``), so the
numbers are the same on all ranks, and the same as those of a plain optimizer with these groups.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.same_on_all_ranks import all_or_none, share_json
from shardlab.comm.slices import cut
from shardlab.engines.any_engine import AnyEngine
from shardlab.engines.checkpoint import held_stretches
from shardlab.engines.checkpoint.gather import gather_whole
from shardlab.engines.checkpoint.manifest import decode, encode
from shardlab.vocabulary import class_of


def named_groups(engine: AnyEngine) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with names in place of tensors.

    Raises:
        ValueError: the optimizer steps a tensor that the engine does not know.
    """
    names = {id(tensor): name for name, tensor in engine.step_tensors().items()}
    groups = []
    for group in engine.optimizer.param_groups:
        if any(id(tensor) not in names for tensor in group["params"]):
            raise ValueError("optimizer: it steps a tensor that is not one of the engine's step_tensors()")
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": [names[id(tensor)] for tensor in group["params"]], **options})
    return groups


def full_optimizer_state_dict(engine: AnyEngine) -> dict[str, Any]:
    """See ``Engine.full_optimizer_state_dict``."""
    groups = named_groups(engine)
    numbers = _numbers(groups)
    shards: list[held_stretches.TensorShard] = []

    def own_values() -> Any:
        shards.extend(held_stretches.state_shards(engine))
        return encode(held_stretches.state_values(engine), "optimizer state")

    # Numbers and text are sent as JSON, tensors in a few large messages. What one rank refuses is refused by all: only
    # those that hold a parameter's first element have values.
    comms, device = engine.comms, engine.mesh.device
    shared = share_json(comms, device, all_or_none(comms, device, own_values))
    state: dict[int, dict[str, Any]] = {}
    for values in decode(shared):
        for name, found in values.items():
            state.setdefault(numbers[name], {}).update(found)
    for (name, key), full in gather_whole(engine, shards, tag="optimizer state").items():
        state.setdefault(numbers[name], {})[key] = full
    ordered = {number: state[number] for number in sorted(state)}
    return {"state": ordered, "param_groups": [_numbered(group, numbers) for group in groups]}


def named_optimizer_state(engine: AnyEngine) -> dict[str, dict[str, Any]]:
    """See ``Engine.named_optimizer_state``."""
    state = full_optimizer_state_dict(engine)["state"]
    numbers = _numbers(named_groups(engine))
    return {name: state[numbers[name]] for name in engine.params if numbers.get(name) in state}


def load_named_optimizer_state(engine: AnyEngine, state: Mapping[str, Mapping[str, Any]]) -> None:
    """See ``Engine.load_named_optimizer_state``."""
    groups = named_groups(engine)
    numbers = _numbers(groups)
    if unknown := [name for name in state if name not in numbers]:
        raise ValueError(f"state: {unknown[0]!r} is no parameter of this engine's optimizer, which has {list(numbers)}")
    numbered = {numbers[name]: found for name, found in state.items()}
    own = [_numbered(group, numbers) for group in groups]
    load_full_optimizer_state_dict(engine, {"state": numbered, "param_groups": own})


def load_full_optimizer_state_dict(engine: AnyEngine, state: Mapping[str, Any]) -> None:
    """See ``Engine.load_full_optimizer_state_dict``."""
    groups, given = named_groups(engine), state["param_groups"]
    sizes, given_sizes = ([len(group["params"]) for group in some] for some in (groups, given))
    if sizes != given_sizes:
        raise ValueError(f"param_groups: the state has groups of {given_sizes} parameters, the optimizer of {sizes}")
    by_name = {
        name: state["state"].get(number, {})
        for group, other in zip(groups, given, strict=True)
        for name, number in zip(group["params"], other["params"], strict=True)
    }
    # Before the first piece is cut, so that a refusal changes nothing.
    for name, found in by_name.items():
        check_state(engine, name, found)

    def piece_of(name: str, piece: Tensor, start: int, stop: int) -> dict[str, Any]:
        return {key: _cut(engine, name, value, piece, start, stop) for key, value in by_name[name].items()}

    named = [{**other, "params": group["params"]} for group, other in zip(groups, given, strict=True)]
    install_state(engine, named, piece_of)


def install_state(
    engine: AnyEngine, groups: list[dict[str, Any]], state_of: Callable[[str, Tensor, int, int], dict[str, Any]]
) -> None:
    """Load what this rank holds into the optimizer.

    Args:
        engine: the owner of the optimizer.
        groups: options of the parameter groups, and names in the order of the engine's own.
        state_of: called with name, piece, start and stop for each piece; returns {} for a parameter without state.
    """
    numbers = _numbers(named_groups(engine))
    tensors = engine.step_tensors()
    # An optimizer may leave parameters out, which then have no number.
    owned = {name: span for name, span in engine.owned().items() if name in numbers}
    # All of them before the optimizer changes: if one cannot be read or cut, it keeps the state that it has.
    pieces = {
        name: {key: _laid_as(piece, value) for key, value in state_of(name, piece, *span).items()}
        for name, span in owned.items() for piece in (tensors.by_name(name),)
    }  # fmt: skip
    state = {numbers[name]: found for name, found in pieces.items() if found}
    engine.install_optimizer_state({"state": state, "param_groups": [_numbered(group, numbers) for group in groups]})


def check_state(engine: AnyEngine, name: str, state: Mapping[str, Any]) -> None:
    """Refuse state of a parameter that cannot be cut as the parameter is; all ranks decide alike.

    Raises:
        ValueError: the parameter is in pieces, and some state has neither its shape nor a single element.
    """
    full = held_stretches.whole_shape_of(engine, name)
    for key, value in state.items() if _is_cut(engine, name) else ():
        is_whole = isinstance(value, Tensor) and tuple(value.shape) == full
        if not is_whole and held_stretches.has_large_tensors(value):
            what = f"is {class_of(value)} of tensors"
            if isinstance(value, Tensor):
                what = f"has shape {tuple(value.shape)} and the parameter {full}"
            raise ValueError(
                f"optimizer state: {key!r} of parameter {name!r} {what}, but this engine cuts the parameter into "
                "pieces; use a partition of whole parameters"
            )


def _laid_as(piece: Tensor, value: Any) -> Any:
    """State with the strides of what is stepped, as an optimizer makes it: fused kernels take both in one order."""
    if not isinstance(value, Tensor) or value.shape != piece.shape or value.stride() == piece.stride():
        return value
    return torch.empty_like(piece, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _is_cut(engine: AnyEngine, name: str) -> bool:
    """Whether several ranks have parts of a parameter."""
    spread = [division for division in engine.divisions() if division.is_spread and name in division.layout.names]
    holders = [rank for one in spread for rank in range(one.comm.num_ranks) if name in one.pieces_of(rank)]
    return name in engine.slices or len(holders) > 1


def _cut(engine: AnyEngine, name: str, value: Any, piece: Tensor, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if tuple(value.shape) != held_stretches.whole_shape_of(engine, name):
        return value.detach().clone()
    if name in engine.slices:
        value = cut(value, engine.slices[name])
    # A copy: a view would keep the full tensor in memory, N times what this rank needs.
    return value.detach().reshape(-1)[start:stop].clone().view(piece.shape)


def _numbers(groups: list[dict[str, Any]]) -> dict[str, int]:
    return {name: number for number, name in enumerate(name for group in groups for name in group["params"])}


def _numbered(group: dict[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    options = {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items() if key != "param_names"
    }  # fmt: skip
    return {**options, "params": [numbers[name] for name in group["params"]]}
