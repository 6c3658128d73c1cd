"""The engine and its strategies, by class and by name. notebooks/guide/reading.md says in which order to read them."""

import inspect
from typing import Any

from torch import nn

from shardlab.comm import BaseMesh
from shardlab.engines import checkpoint
from shardlab.engines.any_engine import AnyEngine
from shardlab.engines.bucketed import Bucketed
from shardlab.engines.ddp import DDP
from shardlab.engines.engine import Engine
from shardlab.engines.fsdp import FSDP
from shardlab.engines.guards import Guards
from shardlab.engines.guards.strategy_checks import check_strategy
from shardlab.engines.hfsdp import HFSDP
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.hpz import HPZ
from shardlab.engines.peers import TorchDDP, TorchFSDP2, TorchTP, TorchZeRO1
from shardlab.engines.peers.base import Peer
from shardlab.engines.precision import Precision
from shardlab.engines.sharded_params import Placements
from shardlab.engines.single import Single
from shardlab.engines.step_tensors import OptimizerFn, StepTensors
from shardlab.engines.strategy import Given, LaidOut, Strategy
from shardlab.engines.zero1 import ZeRO1
from shardlab.engines.zero2 import ZeRO2
from shardlab.engines.zero3 import ZeRO3
from shardlab.engines.zero_in_groups import zero_in_groups

# Set here and not imported by the engines, so that training code depends neither on checkpoints nor on guards. This
# file runs before any import from the package.
AnyEngine.checkpointer = checkpoint
Engine.guard_class = Guards

__all__ = [
    "DDP", "FSDP", "HFSDP", "HPZ", "STRATEGIES", "AnyEngine", "Bucketed", "Division", "Engine", "Given", "Holding",
    "LaidOut", "OptimizerFn", "Placements", "Precision", "Single", "StepTensors", "Strategy", "ZeRO1", "ZeRO2", "ZeRO3",
    "build_engine", "engine_options", "zero_in_groups",
]  # fmt: skip

STRATEGIES: dict[str, type[Strategy] | type[Peer]] = {
    kind.name: kind
    for kind in (
        *(Single, DDP, Bucketed, ZeRO1, ZeRO2, ZeRO3, FSDP),
        *(TorchDDP, TorchZeRO1, TorchFSDP2, TorchTP),  # torch's own, for comparison
    )
}


def engine_options(strategy: str) -> tuple[str, ...]:
    """Names of the options that a strategy takes in addition to model, optimizer_fn and mesh.

    Raises:
        ValueError: an unknown strategy; the message lists the allowed names.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: {strategy!r} is not one of {', '.join(STRATEGIES)}")
    parameters = inspect.signature(STRATEGIES[strategy]).parameters.values()
    return tuple(known.name for known in parameters if known.kind is inspect.Parameter.KEYWORD_ONLY)


def build_engine(
    name: str | Strategy, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None = None, *, guards: bool =
    True, broadcast_buffers: bool = False, **options: Any,
) -> AnyEngine:  # fmt: skip
    """Build the engine of a strategy.

    Args:
        name: one of ``STRATEGIES``, or a strategy of your own.
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: see ``Engine``.
        guards: what users must not do is refused, on all ranks; False for the bare engine, which trains right programs
            alike. Torch's own engines have no guards.
        broadcast_buffers: see ``Engine``. Of torch's own engines DDP always does it, before forwards, the others never.
        options: of that strategy's class, for example ``bucket_bytes``; none beside a strategy, which has its own.

    Raises:
        ValueError: an unknown strategy, or an option it does not take; the message lists what is allowed.
    """
    if isinstance(name, str):
        allowed = engine_options(name)
        if unknown := sorted(set(options) - set(allowed)):
            raise ValueError(f"options: {name!r} takes {', '.join(allowed) or 'none'}, not {', '.join(unknown)}")
        kind = STRATEGIES[name]
        if issubclass(kind, Peer):
            if broadcast_buffers:
                always = "does that before forwards anyway" if kind.broadcasts_buffers else "cannot"
                raise ValueError(f"broadcast_buffers: {name!r} {always}; leave it out, or take one of our strategies")
            return kind(model, optimizer_fn, mesh, **options)
        strategy = kind(**options)
    else:
        strategy = name
        check_strategy(strategy)
        if options:
            made = f"{type(name).__name__}, which is made already and takes {inspect.signature(type(name))}"
            raise ValueError(f"options: {', '.join(options)} beside a {made}; give them where it is made")
    return Engine(model, optimizer_fn, mesh, strategy, guards=guards, broadcast_buffers=broadcast_buffers)
