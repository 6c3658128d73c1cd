"""Random modules, engines and optimizers that go together.

The simplest choice stands first everywhere, since Hypothesis shrinks towards it.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from hypothesis import strategies as st

from tests.fuzzing.engines import OURS, PEERS, ROWS, WITH_PARTITION, EngineSpec
from tests.fuzzing.features import ALL

from tests.fuzzing.modules import (  # isort: skip
    ALIKE_KINDS, BRANCH_KINDS, CHECKPOINTS, OUTPUT_KINDS, BlockSpec, ModuleSpec,
)  # fmt: skip
from tests.fuzzing.optimizers import OWN, WHOLE, OptimizerSpec


@dataclass(frozen=True)
class Menu:
    """What may be drawn."""

    num_ranks: int = 2  # of the pool
    strategies: tuple[str, ...] = (*OURS, *ROWS)  # names of engines
    features: frozenset[str] = ALL  # see ``features``
    most: int = 12  # operations and training steps together
    pipes: bool = False  # pipelines, with these engines inside their stages


seldom = st.sampled_from([False, False, False, False, True])
_blocks = st.builds(
    BlockSpec,
    kind=st.sampled_from(["linear", "linear", *ALIKE_KINDS, *BRANCH_KINDS]),
    checkpoint=st.sampled_from(["none", "none", "none", "none", *CHECKPOINTS]),
    frozen=seldom,
)
optimizers = st.builds(
    OptimizerSpec,
    kind=st.sampled_from(["sgd", "sgd", "sgd", "sgd", "adam", "adam", "adamw", "adamw", *OWN]),
    groups=st.booleans(),
    left_out=seldom,
    fused=seldom,
    derived=seldom,
)


@st.composite
def modules(draw: st.DrawFn) -> ModuleSpec:
    blocks = draw(st.lists(_blocks, max_size=4))
    calls = st.lists(st.integers(0, len(blocks) - 1), max_size=len(blocks) + 1) if blocks else st.just([])
    in_order = draw(st.sampled_from([True, True, False]))
    path = list(range(len(blocks))) if in_order else draw(calls)
    return ModuleSpec(
        width=draw(st.sampled_from([4, 3, 5])),
        blocks=tuple(blocks),
        path=tuple(path),
        enter=draw(st.sampled_from(["linear", "linear", "embedding"])),
        tied=draw(st.sampled_from(["none", "none", "none", "blocks", "ends"])),
        shared=draw(seldom),
        spare=draw(seldom),
        frozen_enter=draw(seldom),
        output=draw(st.sampled_from(OUTPUT_KINDS)),
    )


def fitting(module: ModuleSpec, engines: tuple[EngineSpec, ...]) -> ModuleSpec:
    """The module, such that the tensor ranks of all these engines divide what they have to divide."""
    parts = lcm(*(engine.num_tensor_ranks for engine in engines))
    if parts == 1:
        return module
    width = parts if parts > 2 else 4
    return replace(module, width=width, tied="none" if module.tied == "ends" else module.tied)


@st.composite
def engines(draw: st.DrawFn, menu: Menu) -> EngineSpec:
    """Engines on all ranks of the pool or on some, perhaps with a tensor axis."""
    if set(menu.strategies) <= set(PEERS):
        return draw(drawn_engine(draw(st.sampled_from(menu.strategies)), menu.num_ranks, 1))
    place, num_ranks = "all", menu.num_ranks
    if num_ranks > 1 and draw(seldom):
        place = draw(st.sampled_from(["first", "last", "halves"]))
        fewer = [size for size in range(num_ranks - 1, 0, -1) if place != "halves" or num_ranks % size == 0]
        num_ranks = draw(st.sampled_from(fewer))
    tensors = [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]
    num_tensor_ranks = draw(st.sampled_from(tensors)) if tensors and draw(seldom) else 1
    names = [name for name in menu.strategies if name != "single" or num_ranks == 1] or ["ddp"]
    # FSDP has more options than all others together.
    name = draw(st.sampled_from(names + [name for name in names if name == "fsdp"] * 2))
    if name in ROWS:  # products of axes are made on all ranks alone
        return draw(drawn_engine(name, menu.num_ranks, 1))
    return replace(draw(drawn_engine(name, num_ranks // num_tensor_ranks, num_tensor_ranks)), place=place)


@st.composite
def drawn_engine(draw: st.DrawFn, name: str, num_data_ranks: int, num_tensor_ranks: int) -> EngineSpec:
    options: dict[str, Any] = {}
    axes: tuple[tuple[str, int], ...] = (("data", num_data_ranks),)
    kind = ROWS.get(name, name)
    if kind in ("bucketed", *WITH_PARTITION):
        options["bucket_bytes"] = draw(st.sampled_from([200, 400, 1, 25 * 1024**2]))
    if kind in WITH_PARTITION:
        options["partition"] = draw(st.sampled_from(["elements", "elements", "round_robin", "contiguous", "balanced"]))
    if kind == "fsdp":
        axes = _fsdp_options(draw, options, num_data_ranks)
    if name in ROWS:
        for own in ("sharding", "offload"):
            options.pop(own, None)
        axes = _two_axes(draw, num_data_ranks)
    if kind in (*WITH_PARTITION, "fsdp") and draw(seldom):
        options["precision"] = draw(st.sampled_from(["float32", "float32, summed in float64", "summed in float32"]))
    if name in ("torch_ddp", "torch_zero1"):
        options = {"bucket_bytes": 400, "find_unused_parameters": True}
    if name == "torch_fsdp2":
        options = {"wrap": draw(st.sampled_from(["auto", "root"]))}
    if num_tensor_ranks > 1:
        axes = (*axes, ("tensor", num_tensor_ranks))
    transport = "gloo" if name in PEERS else draw(st.sampled_from(["shared_memory"] * 7 + ["gloo"]))
    return EngineSpec(name, tuple(options.items()), axes, transport)


def _fsdp_options(draw: st.DrawFn, options: dict[str, Any], num_ranks: int) -> tuple[tuple[str, int], ...]:
    """Draw FSDP's options; the axes that belong to them."""
    kinds = ["full_shard", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"]
    kinds += ["hybrid_shard"] * 2 if num_ranks == 4 else []  # with four ranks alone both of its axes have two
    options["sharding"] = sharding = draw(st.sampled_from(kinds))
    options["wrap"] = draw(st.sampled_from(["auto", "auto", "root", 5, "every"]))
    options["prefetch"] = draw(st.sampled_from([1, 0, 2]))
    options["layout"] = draw(st.sampled_from(["flat", "dim0"]))
    if options["layout"] == "flat" and sharding != "no_shard" and draw(seldom):
        options["partition"] = draw(st.sampled_from(["round_robin", "contiguous", "balanced"]))
    if draw(seldom) and sharding != "no_shard":
        options["replicate_below"] = 8
    if draw(seldom):
        options["offload"] = draw(st.sampled_from(["parameters", "all"]))
    if sharding != "hybrid_shard":
        return (("data", num_ranks),)
    return _two_axes(draw, num_ranks)


def _two_axes(draw: st.DrawFn, num_ranks: int) -> tuple[tuple[str, int], ...]:
    replicas = draw(st.sampled_from([size for size in (2, 2, 2, 1, 4, 3) if num_ranks % size == 0]))
    return (("replica", replicas), ("shard", num_ranks // replicas))


def with_whole_parameters(engine: EngineSpec) -> EngineSpec:
    """An engine whose ranks have whole parameters, for an optimizer that looks at them."""
    options = dict(engine.options)
    if engine.kind in WITH_PARTITION or (engine.kind == "fsdp" and options.get("sharding") != "no_shard"):
        if options.get("partition", "elements") == "elements":
            options["partition"] = "balanced"
        if "layout" in options:
            options["layout"] = "flat"
    return replace(engine, options=tuple(options.items()))


def drawn_optimizer(draw: st.DrawFn, engines: tuple[EngineSpec, ...]) -> OptimizerSpec:
    """An optimizer; mostly one that these engines take."""
    optimizer = draw(optimizers)
    if any(engine.name in PEERS for engine in engines):
        optimizer = replace(optimizer, fused=False, derived=False)
    if optimizer.kind not in WHOLE or draw(seldom):
        return optimizer
    is_sliced = any(engine.num_tensor_ranks > 1 for engine in engines)
    is_sharded = any(engine.kind in (*WITH_PARTITION, "fsdp") for engine in engines)
    kind = "averaged" if is_sliced else "normalised" if is_sharded and optimizer.kind == "clipped" else optimizer.kind
    return replace(optimizer, kind=kind)
