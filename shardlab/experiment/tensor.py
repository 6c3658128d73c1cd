"""The tensor axis of a comparison: what can be divided over it, the divided model, and its loss.

Data ranks are ``ranks / tp``. The ranks of a tensor group train on the same rows.
"""

from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.workload import LossFn, Workload
from shardlab.models import MODELS, GPTConfig
from shardlab.tensor_parallel import Plan, parallelize_module
from shardlab.tensor_parallel.plan import matched
from shardlab.vocabulary import MeshAxis

TORCH_TP = "torch_tp"


def check_tensor_axis(options: CompareOptions, workload: Workload) -> None:
    """Check that the tensor axis can divide what the options say; an error names the field.

    Raises:
        ValueError: ``tp`` does not divide the ranks, heads or vocabulary; the model has no plan; or a strategy can
            train only a whole model.
    """
    if options.sequence_parallel and options.tp == 1:
        raise ValueError(
            "sequence_parallel: it divides the sequence over the tensor axis, and tp is 1; set tp to 2 or more"
        )
    if options.tp == 1:
        return
    if options.ranks % options.tp:
        raise ValueError(f"tp: {options.tp} does not divide {options.ranks} ranks; take a divisor of {options.ranks}")
    _check_peers(options)
    if options.sequence_parallel and options.seq_len % options.tp:
        raise ValueError(
            f"seq_len: {options.seq_len} does not divide over tp={options.tp} ranks, which sequence_parallel needs"
        )
    model = workload.on_meta()
    for name, style in matched(_plan(workload, options), model).items():
        try:
            style.check(name, model.get_submodule(name), options.tp)
        except ValueError as error:
            raise ValueError(f"tp: {error}") from None


def divided(model: nn.Module, options: CompareOptions, workload: Workload, strategy: str, mesh: BaseMesh) -> nn.Module:
    """The model with its layers divided over the mesh's tensor axis; unchanged if nothing is divided. Collective."""
    if not _divides(options, strategy):
        return model
    return parallelize_module(model, _plan(workload, options), mesh[MeshAxis.TENSOR])


def loss_of(options: CompareOptions, workload: Workload, strategy: str, mesh: BaseMesh) -> LossFn:
    """The loss of the whole or of the divided model."""
    of_parts = workload.tp_loss
    if of_parts is None or not _divides(options, strategy):
        return workload.loss
    axis = mesh[MeshAxis.TENSOR]

    def loss(model: object, batch: object) -> Tensor:
        return of_parts(model, batch, axis)

    return loss


def _plan(workload: Workload, options: CompareOptions) -> Plan:
    if workload.tp_plan is not None:
        return workload.tp_plan
    if options.workload is not None:
        raise ValueError(
            f"tp: there is no plan that divides {workload} over {options.tp} ranks; give Workload(tp_plan={{'blocks.*."
            "up': Column(), 'blocks.*.down': Row(), ...}), see shardlab.tensor_parallel"
        )
    gpts = ", ".join(name for name, known in MODELS.items() if isinstance(known, GPTConfig))
    raise ValueError(f"model: there is no plan that divides {options.model!r} over tp={options.tp}; take {gpts}")


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
