"""Will it fit: a workload on GPUs of a given memory and link, without running it.

    planned = RunPlan.of(workload, ranks=8, precision="bf16")
    planned.on("24GB,32GB/s,10us")                          # a table: what is left, rows that fit, time of sending
    planned.on("80GB,300GB/s,5us")                          # another GPU: no further work
    kept_for_backward(workload, rows=1)                     # bytes of activations

Nothing is computed: the model is made without memory, and one forward of it is followed with tensors that have a shape
and a type but no numbers. So a model of 7 billion parameters takes seconds on a laptop.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from shardlab.comm.trees import cast_floating, map_tensors
from shardlab.engines.precision import Precision, parse_precision
from shardlab.experiment.planned.plan import Plan, plan_all, row_of, table_of, to_plan
from shardlab.experiment.trained.batches import batches_of, divide, rows_of
from shardlab.experiment.trained.named_workload import workload_at
from shardlab.experiment.trained.workload import Workload, seeded
from shardlab.planner.fit import rows_that_fit, sending_us
from shardlab.planner.gpu import Gpu
from shardlab.planner.rows import ROWS
from shardlab.planner.setup import STRATEGIES
from shardlab.vocabulary import Role

COUNTED_ROWS = 3  # beside one row: a line goes through the two
READABLE = {
    "rest_bytes": ("at rest (GB)", 1e9), "gathered_bytes": ("gathered (GB)", 1e9), "left_bytes": ("left (GB)", 1e9),
    "row_bytes": ("a row keeps (GB)", 1e9), "rows_that_fit": ("rows that fit", 1),
    "wire_bytes_per_step": ("sent (GB/step)", 1e9), "sending_ms": ("sending (ms)", 1),
}  # fmt: skip


class DependsOnValuesError(ValueError):
    """What a model computes cannot be followed without values."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of each strategy, and what autograd keeps; what it means depends on the GPU.

    Attributes:
        plans: by strategy.
        kept: by strategy, bytes that autograd keeps for backward, by number of rows; None where it is not counted:
            of divided layers, and if what the model computes depends on values.
    """

    plans: Mapping[str, Plan]
    kept: Mapping[str, Mapping[int, int] | None]

    @classmethod
    def of(
        cls, workload: Workload | str, ranks: int, strategies: tuple[str, ...] | str = STRATEGIES, *,
        told: Callable[[str], object] = str, **options: Any,
    ) -> "RunPlan":  # fmt: skip
        """Plan a workload.

        Args:
            workload: what is trained, or the place of it, FILE.py:NAME.
            ranks: number of ranks; they need not fit on this machine.
            strategies: names of ours.
            told: see ``plan_runs``.
            options: other fields of ``CompareConfig``.

        Raises:
            ValueError: an option has an invalid value, or a strategy cannot be planned.
        """
        known = workload_at(workload) if isinstance(workload, str) else workload
        plans = plan_all(to_plan(known, ranks, strategies, **options), told)
        # What autograd keeps is not counted of divided layers, which one process does not have.
        alone = {name for name, row in ROWS.items() if row.alone}
        whole = {name: plan.precision for name, plan in plans.items() if options.get("tp", 1) == 1 or name in alone}
        found = {precision: _kept_if_known(known, precision) for precision in dict.fromkeys(whole.values())}
        return cls(plans, {name: found[whole[name]] if name in whole else None for name in plans})

    def on(self, gpu: Gpu | str) -> pd.DataFrame:
        """The table of ``plan``, and what it means for a GPU.

        Args:
            gpu: a card such as 'h100', or its memory and perhaps its link: '24GB', '24GB,32GB/s,10us'.

        Returns:
            The columns of ``plan`` and, per rank: ``gathered_bytes`` (at one moment of a step, on top of what is at
            rest; missing where messages are), ``left_bytes`` (of the GPU's memory, where nothing is that is offloaded;
            below zero where the model states do not fit), ``row_bytes`` (that autograd keeps for a further row) and
            ``rows_that_fit`` (in a micro-batch), both missing where ``kept`` is None, and ``sending_ms`` (all messages
            of a step, one after another), missing without a link.

        Raises:
            ValueError: the GPU is not understood.
        """
        gpu = Gpu.parse(gpu) if isinstance(gpu, str) else gpu
        whole = dict.fromkeys(("gathered_bytes", "row_bytes", "rows_that_fit"), "Int64")
        table = table_of([self._row(strategy, gpu) for strategy in self.plans])
        return table.astype({**whole, "sending_ms": "float64"})

    def _row(self, strategy: str, gpu: Gpu) -> dict[str, Any]:
        planned, kept = self.plans[strategy], self.kept[strategy]
        # The most that a rank has at rest on its GPU; the rank that offloads most is not the one that holds most.
        on_gpu = planned.memory[planned.memory["role"] != Role.OFFLOADED].groupby("rank")["bytes"].sum().max()
        left = gpu.memory_bytes - int(on_gpu) - (planned.gathered_bytes or 0)
        sent, link = planned.collectives, gpu.link
        return {
            **row_of(strategy, planned), "gathered_bytes": planned.gathered_bytes, "left_bytes": int(left),
            "row_bytes": None if kept is None else _bytes_of_a_row(kept),
            "rows_that_fit": None if kept is None else rows_that_fit(left, kept),
            "sending_ms": None if sent is None or link is None else sending_us(sent, link) / 1e3,
        }  # fmt: skip


def kept_for_backward(workload: Workload, rows: int, precision: str = "full") -> int:
    """Bytes that autograd keeps for backward of one forward on ``rows`` rows: the activations.

    Each storage counts once; parameters and buffers do not count. What ``torch.utils.checkpoint`` keeps for a second
    forward does not count either.

    Args:
        workload: its model, data and loss.
        rows: of a micro-batch.
        precision: of the computation: full, bf16 or fp16.

    Raises:
        ValueError: ``rows`` is below 1, there is no such precision, or what the model computes depends on values.
    """
    if rows < 1:
        raise ValueError(f"rows: {rows} is given; it must be 1 or more")
    return _kept(workload, {rows: _batch(workload, rows)}, precision)[rows]


def _bytes_of_a_row(kept: Mapping[int, int]) -> int:
    (fewer, less), (several, more) = sorted(kept.items())
    return (more - less) // (several - fewer)


def _kept_if_known(workload: Workload, precision: str) -> dict[int, int] | None:
    """Of one row, and of a batch of several; where the data's batches have one, all that is kept counts as its."""
    several = _first_batch(workload, COUNTED_ROWS)
    try:
        kept = _kept(workload, {1: _batch(workload, 1), rows_of(several): several}, precision)
    except DependsOnValuesError:
        return None
    return kept if len(kept) > 1 else {0: 0, **kept}


def _batch(workload: Workload, rows: int) -> Any:
    batch = _first_batch(workload, rows)
    if (found := rows_of(batch)) == rows:
        return batch
    if rows == 1:
        return divide(batch, 0, found).batch
    raise ValueError(f"rows: {rows} is given, but the data's batches have {found} rows; ask for 1 or {found}")


def _first_batch(workload: Workload, rows: int) -> Any:
    return next(batches_of(workload, 0, 1, 0, rows)).batch


def _kept(workload: Workload, batches: Mapping[int, Any], precision: str) -> dict[int, int]:
    """For each number of rows; the model is made once."""
    casts, module = parse_precision(precision), workload.on_meta()
    # What goes into the module and what comes out of it is cast, as an engine of this precision does.
    module.register_forward_pre_hook(lambda _, *given: cast_floating(given, casts.compute), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: cast_floating(output, casts.output))
    # Not the meta device: on it attention is counted as the plain product of matrices, which no device computes so. No
    # public way was found to follow a forward as the CPU would take it.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _take_numbers_from(module, casts)
        try:
            return {
                rows: _kept_of(workload, module, map_tensors(mode.from_tensor, batch))
                for rows, batch in batches.items()
            }
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DependsOnValuesError(
                "model: what it computes depends on values, so its activations cannot be counted without running it; "
                "plan(workload, ranks) has what else is known"
            ) from error


def _kept_of(workload: Workload, module: nn.Module, batch: Any) -> int:
    with seeded(0), saved_for_backward(module) as saved:
        workload.loss_on()(module, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved)


def _take_numbers_from(module: nn.Module, casts: Precision) -> None:
    """Give it parameters and buffers that have a shape and a type, and are on the CPU; tied ones stay tied."""
    made: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, held in {**owner._parameters, **owner._buffers}.items():
            if held is not None and held not in made:
                is_param = isinstance(held, nn.Parameter)
                like = torch.empty(held.shape, dtype=casts.compute_dtype_of(held) if is_param else held.dtype)
                made[held] = nn.Parameter(like, held.requires_grad) if is_param else like
            if held is not None:
                setattr(owner, name, made[held])


def readable_fit(table: pd.DataFrame) -> pd.DataFrame:
    """A table of ``RunPlan.on`` for people: one row per strategy, in GB of 10^9 bytes."""
    shown = {label: table[name] / divisor for name, (label, divisor) in READABLE.items()}
    readable = pd.DataFrame(shown).set_index(table["strategy"]).round(2)
    return readable.astype({"rows that fit": "Int64"})


def fit_of(strategy: str, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One strategy on several GPUs, numbers of ranks or settings: one row for each.

    Args:
        strategy: which.
        tables: of ``RunPlan.on``, by name.

    Raises:
        ValueError: a table does not have the strategy.
    """
    for name, table in tables.items():
        if strategy not in set(table["strategy"]):
            raise ValueError(f"strategy: {strategy!r} is not among {', '.join(table['strategy'])} of {name!r}")
    chosen = [table[table["strategy"] == strategy].assign(strategy=name) for name, table in tables.items()]
    return readable_fit(pd.concat(chosen, ignore_index=True)).rename_axis(None)


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
