"""What a rank holds of a model, as tables: units that are gathered, modules, the slices of divided weights.

with watch_gathered(engine) as samples:
    engine.backward(loss_of(engine(x)))
gathered_table(samples)
modules_table(engine)
weights_table(model, slices)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.analysis.held_bytes import module_bytes
from shardlab.engines import AnyEngine, Engine
from shardlab.engines.sharded_strategy import Sharded
from shardlab.engines.unit import Unit
from shardlab.experiment.shard_rows import shard_rows
from shardlab.partition.slices import TensorSlice
from shardlab.plots.maps import COLUMNS, EVERY_RANK
from shardlab.tables import SHARDS
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role

_KEYS = {"run": "now", "source": "measured", "rank": 0}


@dataclass(frozen=True)
class GatheredSample:
    """Bytes of gathered parameters by unit at one moment, for example 'blocks.0 forward'; 0 for a unit without any."""

    moment: str
    by_unit: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all units together."""
        return sum(self.by_unit.values())


@contextmanager
def watch_gathered(engine: Engine) -> Iterator[list[GatheredSample]]:
    """Sample the gathered parameters of each unit inside the ``with`` block; yields the list of samples.

    A sample is taken when the forward or the backward of a unit begins (its own and prefetched parameters are gathered
    by then) and when it ends, and once at the end. The hooks run after those of the engine, because they are added
    later; those of gradients are added in each backward, since the engine puts its own behind what it finds there.
    """
    samples: list[GatheredSample] = []

    def sample(moment: str) -> None:
        samples.append(GatheredSample(moment, gathered_by_unit(engine)))

    hooks: list[RemovableHandle] = []
    for unit in units_in(engine):
        _watch(unit, sample, hooks)
    try:
        yield samples
    finally:
        for hook in hooks:  # also after an error: a hook would hold the samples and run in every later step
            hook.remove()
    sample("end")


def gathered_by_unit(engine: Engine) -> dict[str, int]:
    """Bytes of gathered parameters that each unit holds now, each storage counted once; 0 for a unit without any."""
    found = {}
    for unit in units_in(engine):
        held = (held for shards in unit.shards for held in shards.holdings())
        gathered = [tensor for role, tensor, *_ in held if role is Role.GATHERED_PARAMETER]
        found[unit.name] = sum(bytes_by_role({Role.GATHERED_PARAMETER: gathered}).values())
    return found


def unit_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of each unit when it is gathered, including padding."""
    return {
        unit.name: sum(
            shards.layout.padded_numel * (engine.strategy.precision.compute or shards.shard.dtype).itemsize
            for shards in unit.shards
        )
        for unit in units_in(engine)
    }


def units_in(engine: Engine) -> Sequence[Unit]:
    """The units of FSDP, or the buckets of ZeRO-3.

    Raises:
        ValueError: parameters are not sharded.
    """
    if not isinstance(engine.strategy, Sharded):
        raise ValueError(f"engine: {engine.name!r} gathers no units; give an engine of 'fsdp' or 'zero3'")
    return engine.strategy.units


def gathered_table(samples: list[GatheredSample]) -> pd.DataFrame:
    """One row per sample and unit: ``sample`` (its number), ``moment``, ``unit``, ``bytes``."""
    rows = [
        (number, sample.moment, unit, num_bytes)
        for number, sample in enumerate(samples)
        for unit, num_bytes in sample.by_unit.items()
    ]
    table = pd.DataFrame(rows, columns=["sample", "moment", "unit", "bytes"])
    return table.astype({"sample": "int64", "bytes": "int64"})


def _watch(unit: Unit, sample: Any, hooks: list[RemovableHandle]) -> None:
    owed: dict[nn.Parameter, RemovableHandle] = {}

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        sample(f"{unit.name} forward done")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)

    def before_backward(_: Tensor) -> None:
        sample(f"{unit.name} backward")
        for param in unit.params:
            if param.requires_grad and param not in owed:
                owed[param] = param.register_post_accumulate_grad_hook(after_gradient)
                hooks.append(owed[param])

    def after_gradient(param: nn.Parameter) -> None:
        owed.pop(param).remove()
        if not owed:
            sample(f"{unit.name} backward done")

    assert unit.module is not None
    hooks.append(unit.module.register_forward_pre_hook(lambda *_: sample(f"{unit.name} forward")))
    hooks.append(unit.module.register_forward_hook(after_forward))


def modules_table(engine: AnyEngine, depth: int | None = None) -> pd.DataFrame:
    """Bytes that this rank holds now of each module: gradients between backward and ``zero_grad()`` only.

    Args:
        engine: any strategy.
        depth: how many parts of a module's name count; None for the modules that have the parameters.

    Returns:
        One row per module, and one for what belongs to no one module: ``module``, ``parameter_bytes``,
        ``gradient_bytes``, ``optimizer_bytes``, ``offloaded_bytes`` (of these three, what is in host memory),
        ``other_bytes`` and ``bytes``. They add up to the bytes of ``engine.live_tensors()``.

    Raises:
        ValueError: ``depth`` is below 1.
    """
    shards = SHARDS.frame([{**_KEYS, "step": 0, **row} for row in shard_rows(engine)])
    held = bytes_by_role(engine.live_tensors())
    whole = pd.DataFrame([{**_KEYS, "role": str(role), "bytes": num_bytes} for role, num_bytes in held.items()])
    return module_bytes(shards, whole, depth).drop(columns=list(_KEYS))


def weights_table(model: nn.Module, slices: Mapping[str, TensorSlice]) -> pd.DataFrame:
    """One row per parameter, rank and range, for ``plots.weight_slices``.

    A weight is laid out as it multiplies, y = x A: inputs downward, outputs to the right. This is the transpose of what
    a linear layer stores, so the slices of a column-parallel layer are columns. An embedding, whose input is a token,
    is stored this way already.

    Args:
        model: the plain, whole model; the meta device is enough.
        slices: slices of the divided model by parameter name, from any rank (``partition.slices.slices_of``).

    Returns:
        ``parameter``; ``inputs`` and ``outputs`` of the whole (a bias or a norm has 1 input); ``rank``, -1 if every
        rank holds all of it; the elements held, as ``input_start``, ``input_stop``, ``output_start``, ``output_stop``.
    """
    rows = [
        row
        for name, param in model.named_parameters()  # tied weights once
        for row in _rows(model.get_submodule(name.rpartition(".")[0]), name, tuple(param.shape), slices.get(name))
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(owner: nn.Module, name: str, shape: tuple[int, ...], own: TensorSlice | None) -> Iterator[dict[str, Any]]:
    """The rows of one parameter of ``owner``; a vector is a row of outputs."""
    is_transposed = isinstance(owner, nn.Linear) and len(shape) == 2
    inputs, outputs = (shape[::-1] if is_transposed else shape) if len(shape) == 2 else (1, shape[0])
    whole = {
        "parameter": name, "inputs": inputs, "outputs": outputs, "rank": EVERY_RANK,
        "input_start": 0, "input_stop": inputs, "output_start": 0, "output_stop": outputs,
    }  # fmt: skip
    if own is None:
        yield whole
        return
    side = "output" if len(shape) == 1 or (own.dim == 0) == is_transposed else "input"
    for rank in range(own.num_ranks):
        for start, stop in own.of_rank(rank).ranges:
            yield {**whole, "rank": rank, f"{side}_start": start, f"{side}_stop": stop}
