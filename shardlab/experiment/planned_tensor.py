"""The tensor axis of any workload, planned: what one rank holds of the divided model, and the messages of its layers.

The divided model is run without memory (``DryRunRank``), on the batches of the last step, which is the one that a
record is compared with. So the messages are those of any plan, in the order in which autograd sends them.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from shardlab.comm.events import CollectiveEvent
from shardlab.comm.trees import tensors_in
from shardlab.engines.precision import Precision, cast_floating, parse_precision
from shardlab.experiment.batches import batches_of, divide
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.workload import Workload
from shardlab.tables import COLLECTIVES
from shardlab.tensor_parallel.plan_trial import DryRunRank
from shardlab.trace.observed import wire_bytes
from shardlab.units import wrapped_modules
from shardlab.vocabulary import MeshAxis, Phase


class PlannedTensorAxis:
    """A workload whose layers are divided.

    Args:
        config: its plan, data and options.
        module: the whole model; it may be on the meta device.

    Attributes:
        module: what one rank holds, without memory.
    """

    def __init__(self, config: CompareConfig, module: nn.Module) -> None:
        self._config, self._whole = config, module
        self._uncast = self._rank(Precision())
        self.module = self._uncast.module
        self._batches: list[list[Any]] | None = None
        self._known: dict[Any, list[CollectiveEvent] | None] = {}

    def collectives(self, strategy: str) -> pd.DataFrame | None:
        """Table ``collectives`` of the tensor axis, of all ranks; None if the forward depends on values.

        Raises:
            Exception: what the data raises.
        """
        precision = parse_precision(self._config.precision_of(strategy))
        self._batches = self._batches or [list(step) for step in _last_steps(self._config)]
        # Strategies differ only in where they cast, so they mostly share what was found.
        casts = (precision, strategy == "fsdp" and precision.compute is not None)
        rows: list[dict[str, Any]] = []
        for data_rank, batches in enumerate(self._batches):
            key = (casts, tuple(_shapes(batch) for batch in batches))
            if key not in self._known:
                self._known[key] = self._messages(strategy, precision, batches)
            if (found := self._known[key]) is None:
                return None
            for place in range(self._config.tp):
                rank = data_rank * self._config.tp + place
                rows += [_row(event, rank, seq) for seq, event in enumerate(found)]
        return COLLECTIVES.frame(rows)

    def _rank(self, precision: Precision) -> DryRunRank:
        plan = self._config.trained.tp_plan
        assert isinstance(plan, Mapping)
        return DryRunRank(self._whole, plan, self._config.tp, precision.compute, precision.buffers)

    def _messages(self, strategy: str, precision: Precision, batches: list[Any]) -> list[CollectiveEvent] | None:
        casts = precision != Precision()
        # With casts use a separate rank, whose units may get hooks that cast: strategies share the uncast one.
        rank = self._rank(precision) if casts else self._uncast
        units = wrapped_modules(rank.module, self._config.wrap_policy) if casts and strategy == "fsdp" else {}
        called = _Called(rank.module, precision, units.values())
        workload = self._config.trained
        try:
            return [
                event for batch in batches for event in rank.messages(partial(_loss, workload, called, batch, rank))
            ]
        except Exception:  # it depends on values, which are missing here; the ranks raise any other error too
            return None


class _Called:
    """The module as a loss takes it: inputs and outputs are cast where the engines cast them."""

    def __init__(self, module: nn.Module, precision: Precision, units: Iterable[nn.Module]) -> None:
        self._module, self._precision = module, precision
        for unit in units:
            unit.register_forward_pre_hook(
                lambda _, args, named: cast_floating((args, named), precision.compute), with_kwargs=True
            )

    def __call__(self, *args: Any, **named: Any) -> Any:
        args, named = cast_floating((args, named), self._precision.compute)
        return cast_floating(self._module(*args, **named), self._precision.output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _loss(workload: Workload, model: _Called, batch: Any, rank: DryRunRank) -> Tensor:
    if workload.tp_loss is not None:
        return workload.tp_loss(model, batch, rank.comm)
    return workload.loss(model, batch)


def _last_steps(config: CompareConfig) -> Iterator[Iterator[Any]]:
    """The micro-batches of each data rank in the last step."""
    workload, ranks = config.trained, config.data_ranks
    rows, last = config.global_batch // config.accumulation, config.steps * config.accumulation
    first = last - config.accumulation
    if workload.divides_rows:
        # Read once, since every rank gets its rows of the same batches.
        whole = [share.batch for share in islice(batches_of(workload, 0, 1, config.seed, rows), first, last)]
        yield from ((divide(batch, rank, ranks).batch for batch in whole) for rank in range(ranks))
        return
    for rank in range(ranks):
        yield (share.batch for share in islice(batches_of(workload, rank, ranks, config.seed, rows), first, last))


def _shapes(batch: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(batch))


def _row(event: CollectiveEvent, rank: int, seq: int) -> dict[str, Any]:
    nan = float("nan")
    return {
        "run": "tensor", "source": "predicted", "rank": rank, "step": 0, "seq": seq, "axis": MeshAxis.TENSOR,
        "op": event.op, "tag": event.tag, "phase": Phase.FORWARD, "dtype": event.dtype, "numel": event.numel,
        "bytes": event.num_bytes, "wire_bytes": wire_bytes(event), "group_size": event.group_size, "transport": "",
        "issue_us": nan, "start_us": nan, "end_us": nan, "wait_start_us": nan, "wait_end_us": nan,
    }  # fmt: skip
