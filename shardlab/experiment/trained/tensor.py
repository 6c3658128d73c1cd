"""The tensor axis of a comparison: how layers are divided, suggested or given, the divided model, and its loss.

    show_tp_plan(workload, tp=2)          # one row per layer: its style, or why it stays whole

What is shown is what ``compare(workload, tp=2)`` trains. A plan is tried without ranks. Data ranks are ``ranks / tp``;
the ranks of a tensor group train on the same rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from shardlab.comm import BaseMesh
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.trained.batches import batches_of, divide, rows_of
from shardlab.experiment.trained.named_workload import workload_at
from shardlab.experiment.trained.workload import LossFn, Workload
from shardlab.tensor_parallel import Suggestion, parallelize_module, suggest_tp_plan
from shardlab.tensor_parallel.plan import checked
from shardlab.tensor_parallel.plan_trial import has_room
from shardlab.tensor_parallel.suggest import check_tp_plan
from shardlab.vocabulary import MeshAxis

TORCH_TP = "torch_tp"


def with_plan(options: CompareOptions, workload: Workload) -> Workload:
    """The workload with the plan by which its layers are divided, suggested if none was given; checked.

    Raises:
        ValueError: ``tp`` does not divide the ranks, heads or vocabulary; nothing can be divided; a plan that was given
            fails where it is tried; or a strategy can train only a whole model. The message names the field.
    """
    if options.sequence_parallel and options.tp == 1:
        raise ValueError("sequence_parallel: it divides the sequence among tensor ranks; set tp to 2 or more, not 1")
    if options.tp == 1:
        return workload
    if options.ranks % options.tp:
        raise ValueError(f"tp: {options.tp} does not divide {options.ranks} ranks; take a divisor of {options.ranks}")
    _check_peers(options)
    if options.sequence_parallel and options.seq_len % options.tp:
        raise ValueError(
            f"seq_len: {options.seq_len} does not divide over tp={options.tp} ranks, which sequence_parallel needs"
        )
    if isinstance(workload.tp_plan, Mapping):
        try:
            checked(workload.tp_plan, workload.on_meta(), options.tp)
        except ValueError as error:
            raise ValueError(f"tp_{error}" if str(error).startswith("plan: ") else f"tp: {error}") from None
        if options.workload is not None:
            tried_plan(workload, options.tp, options.seed)  # that of a built-in model is known to be right
        return workload
    found = tried_plan(workload, options.tp, options.seed)
    if not found.plan:
        raise ValueError(
            f"tp: nothing of {workload} can be divided over {options.tp} ranks ({found.why_empty}); leave tp out, or "
            "give Workload a tp_plan: help(shardlab.tensor_parallel) has the styles"
        )
    return replace(workload, tp_plan=found.plan)


def divided(model: nn.Module, workload: Workload, mesh: BaseMesh) -> nn.Module:
    """The model with its layers divided over the mesh's tensor axis. Collective."""
    assert isinstance(workload.tp_plan, Mapping)
    return parallelize_module(model, workload.tp_plan, mesh[MeshAxis.TENSOR])


def divided_layers(options: CompareOptions, workload: Workload) -> tuple[str, ...]:
    """The names of those that tensor ranks divide, by the plan of a workload that has been checked."""
    plan = workload.tp_plan if options.tp > 1 else {}
    assert isinstance(plan, Mapping)
    return tuple(checked(plan, workload.on_meta(), options.tp)) if plan else ()


def loss_of(workload: Workload, mesh: BaseMesh, *, is_divided: bool) -> LossFn:
    """The loss of the whole or of the divided model."""
    if is_divided and workload.tp_loss is not None:
        return workload.loss_over(mesh[MeshAxis.TENSOR])
    return workload.loss_on(mesh)


def _check_peers(options: CompareOptions) -> None:
    """Of torch's engines only torch_tp can be compared with a divided model, over the same ranks."""
    if peers := [name for name in options.strategies if name.startswith("torch_") and name != TORCH_TP]:
        raise ValueError(f"tp: it divides the models of our strategies only; start {', '.join(peers)} without it")
    if TORCH_TP not in options.strategies:
        return
    if options.tp != options.ranks:
        raise ValueError(f"tp: torch_tp divides the model over all {options.ranks} ranks; set tp to {options.ranks}")
    if options.sequence_parallel:
        raise ValueError("sequence_parallel: torch_tp keeps the sequence whole; leave out one of them")


ROWS = 4  # of a Dataset's batch; two of them are enough to try a plan


def show_tp_plan(workload: Workload | str, tp: int = 2) -> pd.DataFrame:
    """How layers would be divided, without ranks: the workload's plan, or the one that is suggested for it.

    The plan is tried in this process with two rows of the first batch, and with values if the model is not too large:
    outputs and gradients then are those of the whole model.

    Args:
        workload: what is trained, or the place of it, FILE.py:NAME.
        tp: tensor-parallel ranks, 2 or more.

    Returns:
        One row for each layer, alike ones together: ``module`` (a pattern of names), ``class``, ``style`` ('whole' if
        every rank has all of it) and ``why``.

    Raises:
        ValueError: ``tp`` is below 2, a plan that was given does not hold, or none was and the loss cannot be computed.
    """
    return shown_plan(workload, tp)[1]


def shown_plan(workload: Workload | str, tp: int) -> tuple[Workload, pd.DataFrame]:
    """The workload with its plan, suggested if it had none, and the table of ``show_tp_plan``."""
    if tp < 2:
        raise ValueError(f"tp: {tp} ranks divide nothing; give 2 or more")
    workload = workload_at(workload) if isinstance(workload, str) else workload
    found = tried_plan(workload, tp, seed=0)
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
        return check_tp_plan(
            module, workload.tp_plan, tp, lambda model: workload.loss_on()(model, few),
            lambda axis: lambda model: workload.loss_over(axis)(model, few),
        )  # fmt: skip
    try:
        few = _few_rows(workload, seed)
        return suggest_tp_plan(module, tp, lambda model: workload.loss_on()(model, few))
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
