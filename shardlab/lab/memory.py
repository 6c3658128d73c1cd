"""What is in memory while a model computes: the gathered parameters of FSDP units, and the activations autograd saves.

with watch_gathered(engine) as samples:
    engine.backward(loss_of(engine(x)))
table = gathered_table(samples)

with saved_for_backward(block) as saved:
    y = block(x)
num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.engines import FSDP
from shardlab.engines.fsdp.unit import Unit
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role

COLUMNS = ("sample", "moment", "unit", "bytes")


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
def watch_gathered(engine: FSDP) -> Iterator[list[GatheredSample]]:
    """Sample the gathered parameters of each unit inside the ``with`` block; yields the list of samples.

    A sample is taken when the forward or the backward of a unit begins (its own and prefetched parameters are gathered
    by then) and when it ends, and once at the end. The hooks run after those of the engine, because they are added
    later; those of gradients are added in each backward, since the engine puts its own behind what it finds there.
    """
    samples: list[GatheredSample] = []

    def sample(moment: str) -> None:
        samples.append(GatheredSample(moment, gathered_by_unit(engine)))

    hooks: list[RemovableHandle] = []
    for unit in engine.units:
        _watch(unit, sample, hooks)
    try:
        yield samples
    finally:
        for hook in hooks:  # also after an error: a hook would hold the samples and run in every later step
            hook.remove()
    sample("end")


def gathered_by_unit(engine: FSDP) -> dict[str, int]:
    """Bytes of gathered parameters that each unit holds now, each storage counted once; 0 for a unit without any."""
    return {
        unit.name: bytes_by_role({Role.GATHERED_PARAMETER: _gathered(unit)})[Role.GATHERED_PARAMETER]
        for unit in engine.units
    }


def unit_bytes(engine: FSDP) -> dict[str, int]:
    """Bytes of each unit when it is gathered, including padding."""
    return {
        unit.name: sum(
            bucket.layout.padded_numel * (engine.precision.compute or bucket.shard.dtype).itemsize
            for bucket in unit.buckets
        )
        for unit in engine.units
    }


def gathered_table(samples: list[GatheredSample]) -> pd.DataFrame:
    """One row per sample and unit: ``sample`` (its number), ``moment``, ``unit``, ``bytes``."""
    rows = [
        (number, sample.moment, unit, num_bytes)
        for number, sample in enumerate(samples)
        for unit, num_bytes in sample.by_unit.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"sample": "int64", "bytes": "int64"})


def _gathered(unit: Unit) -> list[Tensor]:
    held = (held for bucket in unit.buckets for held in bucket.parameter_holdings())
    return [tensor for role, tensor, *_ in held if role is Role.GATHERED_PARAMETER]


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

    hooks.append(unit.module.register_forward_pre_hook(lambda *_: sample(f"{unit.name} forward")))
    hooks.append(unit.module.register_forward_hook(after_forward))


@contextmanager
def saved_for_backward(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the tensors that autograd saves for backward inside the ``with`` block; yields the list.

    Each storage is listed once. Parameters and buffers of ``module`` are left out.

    Args:
        module: the module whose activations are asked for.
    """
    seen = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in seen:
            seen.add(key)
            saved.append(tensor)  # the list keeps the storage alive, so that no other can get the same key
        return tensor.detach()  # not the tensor itself: an operation that saves its own output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved
