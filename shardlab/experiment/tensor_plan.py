"""How a workload's layers are divided over tensor-parallel ranks: suggested or given, and tried without ranks.

    show_tp_plan(workload, tp=2)          # one row per layer: its style, or why it stays whole

What is shown is what ``compare(workload, tp=2)`` trains.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from shardlab.experiment.batches import batches_of, divide, rows_of
from shardlab.experiment.named_workload import workload_at
from shardlab.experiment.workload import Workload
from shardlab.tensor_parallel import Suggestion, suggest_tp_plan
from shardlab.tensor_parallel.plan_trial import has_room
from shardlab.tensor_parallel.suggest import check_tp_plan

ROWS = 4  # of a Dataset's batch; two of them are enough to try a plan


def show_tp_plan(workload: Workload | str, tp: int = 2, *, seed: int = 0) -> pd.DataFrame:
    """How layers would be divided, without ranks: the workload's plan, or the one that is suggested for it.

    The plan is tried in this process with two rows of the first batch, and with values if the model is not too large:
    outputs and gradients then are those of the whole model.

    Args:
        workload: what is trained, or the place of it, FILE.py:NAME.
        tp: tensor-parallel ranks, 2 or more.
        seed: of weights and data.

    Returns:
        One row for each layer, alike ones together: ``module`` (a pattern of names), ``class``, ``style`` ('whole' if
        every rank has all of it) and ``why``.

    Raises:
        ValueError: ``tp`` is below 2, a plan that was given does not hold, or none was and the loss cannot be computed.
    """
    return shown_plan(workload, tp, seed)[1]


def shown_plan(workload: Workload | str, tp: int, seed: int = 0) -> tuple[Workload, pd.DataFrame]:
    """The workload with its plan, suggested if it had none, and the table of ``show_tp_plan``."""
    if tp < 2:
        raise ValueError(f"tp: {tp} ranks divide nothing; give 2 or more")
    workload = workload_at(workload) if isinstance(workload, str) else workload
    found = tried_plan(workload, tp, seed)
    rows = [(row.module, row.kind, row.style, row.why) for row in found.modules]
    table = pd.DataFrame(rows, columns=["module", "class", "style", "why"])
    return replace(workload, tp_plan=found.plan or workload.tp_plan), table


def tried_plan(workload: Workload, tp: int, seed: int) -> Suggestion:
    """The workload's plan with what is said of each layer; a suggested one may be empty.

    Raises:
        ValueError: see ``show_tp_plan``; or the workload has no plan.
    """
    if workload.tp_plan is None:
        raise ValueError(f"tp: {workload} has tp_plan=None, which says that it must not be divided; leave that out")
    module = _module(workload, tp, seed)
    if isinstance(workload.tp_plan, Mapping):
        try:
            few = _few_rows(workload, seed)
        except Exception:  # data that only ranks can read: the sizes are checked all the same
            return check_tp_plan(module, workload.tp_plan, tp, None)
        of_parts = workload.tp_loss
        divided = None if of_parts is None else lambda axis: lambda model: of_parts(model, few, axis)
        return check_tp_plan(module, workload.tp_plan, tp, lambda model: workload.loss(model, few), divided)
    try:
        few = _few_rows(workload, seed)
        return suggest_tp_plan(module, tp, lambda model: workload.loss(model, few))
    except ValueError as error:
        raise ValueError(f"tp: no plan can be suggested for {workload}: {error}") from error


def _module(workload: Workload, tp: int, seed: int) -> nn.Module:
    """The module; it has memory only if the plan can be tried with values."""
    module = workload.on_meta()
    if not has_room(module, tp):
        return module
    return workload.made(workload.build(seed), torch.device("cpu"), seed)


def _few_rows(workload: Workload, seed: int) -> Any:
    batch = next(batches_of(workload, 0, 1, seed, ROWS)).batch
    try:
        return divide(batch, 0, max(1, rows_of(batch) // 2)).batch
    except ValueError:  # a function's batches may be of any kind
        return batch
