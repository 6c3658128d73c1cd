"""The tensor axis of a comparison: what can be divided over it, the divided model, and its loss.

Data ranks are ``ranks / tp``. The ranks of a tensor group train on the same rows.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.tensor_plan import tried_plan
from shardlab.experiment.workload import LossFn, Workload
from shardlab.tensor_parallel import Plan, parallelize_module
from shardlab.tensor_parallel.plan import matched
from shardlab.vocabulary import MeshAxis

TORCH_TP = "torch_tp"


def with_plan(options: CompareOptions, workload: Workload) -> Workload:
    """The workload with the plan by which its layers are divided, suggested if none was given; checked.

    Raises:
        ValueError: ``tp`` does not divide the ranks, heads or vocabulary; nothing can be divided; a plan that was given
            fails where it is tried; or a strategy can train only a whole model. The message names the field.
    """
    if options.sequence_parallel and options.tp == 1:
        raise ValueError(
            "sequence_parallel: it divides the sequence over the tensor axis, and tp is 1; set tp to 2 or more"
        )
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
        _check_plan(workload.tp_plan, workload.on_meta(), options.tp)
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


def _check_plan(plan: Plan, model: nn.Module, tp: int) -> None:
    try:
        styles = matched(plan, model)
    except ValueError as error:
        raise ValueError(f"tp_{error}") from None  # it begins with 'plan: '
    for name, style in styles.items():
        try:
            style.check(name, model.get_submodule(name), tp)
        except ValueError as error:
            raise ValueError(f"tp: {error}") from None


def divided(model: nn.Module, options: CompareOptions, workload: Workload, strategy: str, mesh: BaseMesh) -> nn.Module:
    """The model with its layers divided over the mesh's tensor axis; unchanged if nothing is divided. Collective."""
    if not _divides(options, strategy):
        return model
    assert isinstance(workload.tp_plan, Mapping)
    return parallelize_module(model, workload.tp_plan, mesh[MeshAxis.TENSOR])


def loss_of(options: CompareOptions, workload: Workload, strategy: str, mesh: BaseMesh) -> LossFn:
    """The loss of the whole or of the divided model."""
    of_parts = workload.tp_loss
    if of_parts is None or not _divides(options, strategy):
        return workload.loss
    axis = mesh[MeshAxis.TENSOR]

    def loss(model: object, batch: object) -> Tensor:
        return of_parts(model, batch, axis)

    return loss


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


def _divides(options: CompareOptions, strategy: str) -> bool:
    """Whether we divide the model: not for a single process, and not if torch's own engine divides it."""
    return options.tp > 1 and strategy not in ("single", TORCH_TP)
