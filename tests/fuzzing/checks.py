"""What of an engine is held against the one process after an operation; each check says what differs, by how much."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.engines.peers.dtensor_peer import DTensorPeer
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.fuzzing.engines import PEERS
from tests.fuzzing.modules import rows
from tests.fuzzing.parallel import own_part
from tests.fuzzing.rest import state_bytes
from tests.fuzzing.world import World, hooks_of, loss_of


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """What differs between two mappings of tensors, numbers and None."""
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        if name not in found or name not in wanted:
            yield f"{name}: only {'the engine' if name in found else 'one process'} has it"
        elif text := difference(found[name], wanted[name], tolerance):
            yield f"{name}: {text}"


def difference(found: Any, wanted: Any, tolerance: float) -> str:
    """How a value differs from what one process has; '' where it does not."""
    if found is None or wanted is None:
        return "" if found is wanted else f"{_short(found)} instead of {_short(wanted)}"
    if not isinstance(wanted, Tensor) and not isinstance(found, Tensor):
        same = found == wanted or (isinstance(wanted, float) and abs(found - wanted) <= tolerance)
        return "" if same else f"{found!r} instead of {wanted!r}"
    # On the CPU: of two tensors that are to be equal one may be offloaded.
    found, wanted = (torch.as_tensor(value).detach().cpu().double() for value in (found, wanted))
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel() or torch.equal(found, wanted):
        return ""
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return "not finite where one process is, or the other way round"
    off = (found - wanted)[finite].abs()
    allowed = tolerance * (1.0 + float(wanted[finite].abs().max() if off.numel() else 0.0))
    return f"off by {float(off.max()):.3g}" if off.numel() and float(off.max()) > allowed else ""


def _short(value: Any) -> str:
    return "None" if value is None else f"a tensor up to {float(value.abs().max()) if value.numel() else 0.0:.3g}"


def local_checks(world: World) -> Iterator[str]:
    """What this rank sees without communication, of our engines."""
    if world.ours.spec.name in PEERS:
        yield from _peer_checks(world)
        return
    yield from pieces(world)
    yield from _counts(world)
    yield from _at_rest(world)


def deep_checks(world: World) -> Iterator[str]:
    """The whole state, put together from all ranks; collective."""
    state = world.ours.engine.full_state_dict()
    wanted = world.plain.state(0)  # the first rank's buffers
    yield from (f"full_state_dict() {text}" for text in differences(state, wanted, world.tolerance))
    for name in state.keys() & world.plain.params.keys():
        if state[name].dtype != wanted[name].dtype:
            yield f"full_state_dict() {name}: {state[name].dtype}"


def pieces(world: World) -> Iterator[str]:
    """Parameters, gradients and optimizer state of the pieces this rank has."""
    engine, params = world.ours.engine, world.own(world.plain.detached())
    for name, (tensor, start, stop) in engine.resident_params().items():
        if text := difference(tensor.detach().reshape(-1), params[name].reshape(-1)[start:stop], world.tolerance):
            yield f"parameter {name}: {text}"
    states = world.plain.named_state()
    for name, span in engine.owned().items():
        piece = engine.step_tensors().by_name(name)
        if world.gradients == "means" and (text := difference(piece.grad, _piece(world, name, span), world.tolerance)):
            yield f"gradient {name}: {text}"
        whole = {key: _part(world, name, value, *span) for key, value in states.get(name, {}).items()}
        state = {key: _flat(value) for key, value in engine.optimizer.state.get(piece, {}).items()}
        yield from (f"optimizer state {name} {text}" for text in differences(state, whole, world.tolerance))


def _piece(world: World, name: str, span: tuple[int, int]) -> Tensor | None:
    """What the one process has of a gradient, in the shape of a piece."""
    gradient = world.plain.params[name].grad
    if gradient is None:
        return None
    piece = world.ours.engine.step_tensors().by_name(name)
    return own_part(world.ours.engine, name, gradient).reshape(-1)[slice(*span)].view(piece.shape)


def _part(world: World, name: str, value: Any, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor) or value.shape != world.plain.params[name].shape:
        return _flat(value)
    return own_part(world.ours.engine, name, value).reshape(-1)[start:stop]


def _flat(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, Tensor) else value


def _counts(world: World) -> Iterator[str]:
    engine, plain = world.ours.engine, world.plain
    if engine.num_steps != plain.num_steps:
        yield f"num_steps: {engine.num_steps} instead of {plain.num_steps}"
    groups = [[{key: group.get(key) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
              for optimizer in (engine.optimizer, plain.optimizer)]  # fmt: skip
    for number, (found, wanted) in enumerate(zip(*groups, strict=True)):
        yield from (f"group {number} {text}" for text in differences(found, wanted, world.tolerance))
    buffers = (dict(model.named_buffers()) for model in (engine.module, plain.models[world.rank]))
    yield from (f"buffer {text}" for text in differences(*buffers, world.tolerance))
    trains = [{name: param.requires_grad for name, param in model.named_parameters()}
              for model in (engine.module, plain.models[0])]  # fmt: skip
    yield from (f"requires_grad of {text}" for text in differences(*trains, world.tolerance))
    if engine.module.training != plain.models[0].training:
        yield "module.training differs"


def _at_rest(world: World) -> Iterator[str]:
    """Nothing is gathered between operations, unless it was promised, and every role has its bytes."""
    engine, plain = world.ours.engine, world.plain
    if world.gathered or world.unfinished:
        return
    live = engine.live_tensors()
    number = bytes_by_role(live)[Role.GATHERED_PARAMETER]
    if number and world.ours.spec.name != "hpz":  # which keeps a chunk until the step
        yield f"{number} bytes of parameters or buffers are gathered at rest"
    if (hooks := hooks_of(engine.module)) != world.ours.hooks_within:
        yield f"{hooks} hooks on the module, not {world.ours.hooks_within} as in the beginning"
    if world.ours.at_rest is not None and not plain.losses and world.gradients == "means":
        num_bytes = state_bytes(plain.named_state(), plain.params, engine.owned())
        yield from world.ours.at_rest.differences(live, world.rank, num_bytes)


def _peer_checks(world: World) -> Iterator[str]:
    """Of torch's engines, whose pieces are put together; collective."""
    from shardlab.engines.peers.dtensor_peer import whole

    engine, plain = world.ours.engine, world.plain
    if isinstance(engine, DTensorPeer) or world.ours.spec.name == "torch_ddp":
        for name, tensor in engine.step_tensors().items():
            if text := difference(whole(tensor), plain.params[name], world.tolerance):
                yield f"parameter {name}: {text}"
            if world.gradients == "means":
                gradient = None if tensor.grad is None else whole(tensor.grad)
                if text := difference(gradient, plain.params[name].grad, world.tolerance):
                    yield f"gradient {name}: {text}"
    yield from _counts(world)


def checks_after_close(world: World) -> Iterator[str]:
    """No hook is left, and the module trains alone as a plain one does, with this rank's rows."""
    ours, plain = world.ours, world.plain
    model, wanted = ours.engine.module, plain.models[world.rank]
    if (left := hooks_of(model) - ours.hooks_before) > 0:
        yield f"{left} hooks are left"
    # With fewer bits its buffers now have another dtype than its parameters.
    found, needed = ("", "") if ours.spec.rounds else (_trained_alone(one, world.rank) for one in (model, wanted))
    if found != needed:
        yield f"trained alone after close(): {found or 'no error'} instead of {needed or 'no error'}"
    for text in differences(model.state_dict(), world.own(wanted.state_dict()), world.tolerance):
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
