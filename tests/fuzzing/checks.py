"""What of an engine is held against the one process after an operation; each check says what differs, by how much."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.engines.peers.dtensor_peer import DTensorPeer
from shardlab.vocabulary import Role
from tests.fuzzing.engines import PEERS
from tests.fuzzing.modules import rows
from tests.fuzzing.world import World, hooks_of, loss_of

TOLERANCE = 1e-10


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two mappings of tensors, numbers and None."""
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        if name not in found or name not in wanted:
            yield f"{name}: only {'the engine' if name in found else 'one process'} has it"
        elif text := difference(found[name], wanted[name]):
            yield f"{name}: {text}"


def difference(found: Any, wanted: Any) -> str:
    """How a value differs from what one process has; '' where it does not."""
    if found is None or wanted is None:
        return "" if found is wanted else f"{_short(found)} instead of {_short(wanted)}"
    if not isinstance(wanted, Tensor) and not isinstance(found, Tensor):
        same = found == wanted or (isinstance(wanted, float) and abs(found - wanted) <= TOLERANCE)
        return "" if same else f"{found!r} instead of {wanted!r}"
    found, wanted = (torch.as_tensor(value).detach().double() for value in (found, wanted))
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel() or torch.equal(found, wanted):
        return ""
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return "not finite where one process is, or the other way round"
    off = (found - wanted)[finite].abs()
    allowed = TOLERANCE * (1.0 + float(wanted[finite].abs().max() if off.numel() else 0.0))
    return f"off by {float(off.max()):.3g}" if off.numel() and float(off.max()) > allowed else ""


def _short(value: Any) -> str:
    return "None" if value is None else f"a tensor up to {float(value.abs().max()) if value.numel() else 0.0:.3g}"


def local_checks(world: World) -> Iterator[str]:
    """What this rank sees without communication, of our engines."""
    if world.ours.spec.name in PEERS:
        yield from _peer_checks(world)
        return
    yield from _pieces(world)
    yield from _counts(world)
    yield from _at_rest(world)


def deep_checks(world: World) -> Iterator[str]:
    """The whole state, put together from all ranks; collective."""
    state = world.ours.engine.full_state_dict()
    wanted = world.plain.state(world.rank)
    names = world.plain.params if world.ours.spec.name not in PEERS else wanted.keys()
    for name in (name for name in state if name in names):
        if text := difference(state[name], wanted[name]):
            yield f"full_state_dict() {name}: {text}"


def _pieces(world: World) -> Iterator[str]:
    """Parameters, gradients and optimizer state of the pieces this rank has."""
    engine, plain = world.ours.engine, world.plain
    for name, (tensor, start, stop) in engine.resident_params().items():
        whole = plain.params[name].detach().reshape(-1)
        if text := difference(tensor.detach().reshape(-1), whole[start:stop]):
            yield f"parameter {name}: {text}"
    states = plain.named_state()
    for name, (start, stop) in engine.owned().items():
        piece = engine.step_tensors().by_name(name)
        if world.gradients == "means":
            gradient = plain.params[name].grad
            wanted = None if gradient is None else gradient.reshape(-1)[start:stop]
            found = None if piece.grad is None else piece.grad.reshape(-1)
            if text := difference(found, wanted):
                yield f"gradient {name}: {text}"
        whole_state = {
            key: _part(value, plain.params[name], start, stop) for key, value in states.get(name, {}).items()
        }
        state = {key: _flat(value) for key, value in engine.optimizer.state.get(piece, {}).items()}
        yield from (f"optimizer state {name} {text}" for text in differences(state, whole_state))


def _part(value: Any, param: Tensor, start: int, stop: int) -> Any:
    return value.reshape(-1)[start:stop] if isinstance(value, Tensor) and value.shape == param.shape else _flat(value)


def _flat(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, Tensor) else value


def _counts(world: World) -> Iterator[str]:
    """Step counter, groups, buffers, what trains."""
    engine, plain = world.ours.engine, world.plain
    if engine.num_steps != plain.num_steps:
        yield f"num_steps: {engine.num_steps} instead of {plain.num_steps}"
    groups = [[{key: group.get(key) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
              for optimizer in (engine.optimizer, plain.optimizer)]  # fmt: skip
    for number, (found, wanted) in enumerate(zip(*groups, strict=True)):
        yield from (f"group {number} {text}" for text in differences(found, wanted))
    buffers = (dict(model.named_buffers()) for model in (engine.module, plain.models[world.rank]))
    yield from (f"buffer {text}" for text in differences(*buffers))
    trains = [{name: param.requires_grad for name, param in model.named_parameters()}
              for model in (engine.module, plain.models[0])]  # fmt: skip
    yield from (f"requires_grad of {text}" for text in differences(*trains))
    if engine.module.training != plain.models[0].training:
        yield "module.training differs"


def _at_rest(world: World) -> Iterator[str]:
    """Nothing is gathered between operations, unless it was promised."""
    if world.gathered or world.unfinished or world.held:
        return
    storages: dict[int, Role] = {}
    for role, tensors in world.ours.engine.live_tensors().items():
        for tensor in tensors:
            storages.setdefault(tensor.untyped_storage().data_ptr(), role)
    if number := sum(role is Role.GATHERED_PARAMETER for role in storages.values()):
        yield f"{number} parameters or buffers are gathered at rest"


def _peer_checks(world: World) -> Iterator[str]:
    """Of torch's engines, whose pieces are put together; collective."""
    from shardlab.engines.peers.dtensors import whole

    engine, plain = world.ours.engine, world.plain
    if isinstance(engine, DTensorPeer) or world.ours.spec.name == "torch_ddp":
        for name, tensor in engine.step_tensors().items():
            if text := difference(whole(tensor), plain.params[name]):
                yield f"parameter {name}: {text}"
            if world.gradients == "means":
                gradient = None if tensor.grad is None else whole(tensor.grad)
                if text := difference(gradient, plain.params[name].grad):
                    yield f"gradient {name}: {text}"
    yield from _counts(world)


def checks_after_close(world: World) -> Iterator[str]:
    """No hook is left, and the module trains alone as a plain one does, with this rank's rows."""
    ours, plain = world.ours, world.plain
    model, wanted = ours.engine.module, plain.models[world.rank]
    if (left := hooks_of(model) - ours.hooks_before) > 0:
        yield f"{left} hooks are left"
    if (found := _trained_alone(model, world.rank)) != (needed := _trained_alone(wanted, world.rank)):
        yield f"trained alone after close(): {found or 'no error'} instead of {needed or 'no error'}"
    for text in differences(model.state_dict(), wanted.state_dict()):
        yield f"trained alone after close(): {text}"


def _trained_alone(model: nn.Module, rank: int) -> str:
    """One step of a plain optimizer; the kind of error it ends in, or ''."""
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    model.train()
    optimizer.zero_grad()
    x, y = rows(99, rank)
    try:
        loss_of(model(x), y).backward()
    except RuntimeError as error:
        return type(error).__name__
    optimizer.step()
    return ""
