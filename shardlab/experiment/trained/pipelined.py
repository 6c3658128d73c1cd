"""The axis of stages in a comparison: its schedules, where they cut the model, and the loss in two halves.

Each strategy is trained under each schedule, and the run is named after both, ``zero1+1f1b``; one process is trained
without. A stage has no loss of its own, so the workload's is called twice: on the first stage for what it gives to the
model, on the last one with what the model would have returned.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.comm.foretold import ForetoldMesh
from shardlab.engines.precision import Precision
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.trained.workload import InPlaceOf, Workload
from shardlab.pipeline import Like, Pipeline, cut, loans_of
from shardlab.pipeline.messages import TIED
from shardlab.pipeline.stages import Cut, module_of
from shardlab.schedules import PLANS, Kind, Schedule, make_schedule, play
from shardlab.vocabulary import MeshAxis

AND = "+"  # between strategy and schedule
MICRO_BATCHES_PER_RANK = 4
CSV = ".csv"
SLOTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_OF_INPUT: 1.0, Kind.BACKWARD_OF_WEIGHTS: 1.0}
"""Of equal stages: backward takes twice as long as forward."""

AUTOCAST = (
    "loss: it calls the model under autocast, which ends where a stage does; with pipe call autocast in the model's "
    "parts, or take precision='bf16'"
)


@dataclass(frozen=True)
class Staged:
    """A schedule on a model.

    Attributes:
        schedule: what each rank does.
        begins: see ``pipeline.cut``.
        given: shape of what a micro-batch gives to the first stage.
        outputs: what the stages but the last give; empty where that depends on values or on the division of layers.
    """

    schedule: Schedule
    begins: tuple[str, ...] = ()
    given: tuple[int, ...] = ()
    outputs: tuple[Like, ...] = ()

    def pipeline(self, model: nn.Module, mesh: BaseMesh, precision: Precision) -> Pipeline:
        """Its pipeline on a rank, whose engine gives what it computes in ``precision``."""
        pipeline, dtype = Pipeline(model, self.schedule, mesh, self.begins), precision.output or precision.compute
        outputs = [one._replace(dtype=dtype) if dtype and one.dtype.is_floating_point else one for one in self.outputs]
        pipeline.expect(self.given, outputs)
        return pipeline

    def module_of(self, model: nn.Module, place: int) -> nn.Module:
        """The stages of the rank at a place of the axis, without ranks."""
        mesh = ForetoldMesh({MeshAxis.PIPE: len(self.schedule.ranks)}, place)
        return Pipeline(model, self.schedule, mesh, self.begins).module


def check_pipe(options: CompareOptions) -> None:
    """Check the fields that decide on stages.

    Raises:
        ValueError: they do not fit to each other; the message names the field.
    """
    if options.pipe == 1:
        for field in ("schedule", "begins", "micro_batches"):
            if getattr(options, field) != getattr(CompareOptions, field):
                raise ValueError(f"{field}: only with stages; set pipe to 2 or more, or leave it out")
        return
    if options.ranks % (parts := options.pipe * max(options.tp, 1)):
        beside = f", with tp {options.tp}," if options.tp > 1 else ""
        raise ValueError(
            f"pipe: {options.pipe}{beside} does not divide {options.ranks} ranks; take {parts} or a multiple of it"
        )
    if options.precision == "fp16":
        raise ValueError("precision: 'fp16' scales the loss, which stages do not; with pipe take 'bf16' or 'full'")
    if options.accumulation not in (1, options.micro_batches or 1):
        raise ValueError(f"accumulation: {options.accumulation}; with pipe micro_batches says it, leave it out")


def schedules_of(options: CompareOptions) -> dict[str, Schedule]:
    """The schedules of a comparison by name, for ``options.accumulation`` micro-batches; none without stages.

    Raises:
        ValueError: none is given, or one is not known, cannot be read, is of other numbers, or deadlocks.
    """
    if options.pipe > 1 and not options.schedule:
        raise ValueError(f"schedule: none given; at least one is needed of {', '.join(PLANS)}")
    found: dict[str, Schedule] = {}
    for one in options.schedule if options.pipe > 1 else ():
        name = Path(one).stem if one.endswith(CSV) else one
        if name in found:
            raise ValueError(f"schedule: {name} is given twice; name each once")
        found[name] = _read(one, options) if one.endswith(CSV) else _made(one, options)
        play(found[name], SLOTS)  # which refuses one that deadlocks
    return found


def _made(plan: str, options: CompareOptions) -> Schedule:
    if plan not in PLANS:
        raise ValueError(f"schedule: {plan!r} is not one of {', '.join(PLANS)}, nor a file that ends in {CSV}")
    return make_schedule(plan, options.pipe, options.accumulation)


def _read(path: str, options: CompareOptions) -> Schedule:
    try:
        schedule = Schedule.from_csv(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"schedule: {path} cannot be read: {why}; name a table of actions") from error
    except ValueError as error:  # what is written there
        raise ValueError(f"schedule: {path}: {str(error).removeprefix('schedule: ')}") from error
    wanted = {"pipe": len(schedule.ranks), "micro_batches": schedule.num_micro_batches}
    for field, number in wanted.items():
        if number != (given := options.pipe if field == "pipe" else options.accumulation):
            raise ValueError(f"{field}: {given}, and {path} is for {number}; set {field} to that")
    return schedule


def staged(
    workload: Workload, model: nn.Module, schedule: Schedule, begins: tuple[str, ...], batch: Any, *, rounds: bool,
    divided: Collection[str] = (),
) -> Staged:  # fmt: skip
    """A schedule on a workload's model, tried without memory.

    Args:
        workload: whose loss.
        model: on the meta device.
        schedule: what ranks do.
        begins: see ``pipeline.cut``.
        batch: a micro-batch of a data rank.
        rounds: whether a strategy computes in another dtype than the parameters'.
        divided: names of the layers that tensor ranks divide.

    Raises:
        ValueError: see ``Pipeline``, ``outputs_of`` and ``given_by``; a weight is tied over stages that round; of
            divided layers a rank has none.
    """
    found, stages = Staged(schedule, begins), cut(model, schedule.num_stages, begins)
    for place in range(len(schedule.ranks)):
        layers = [name for name, _ in found.module_of(model, place).named_modules()]
        if divided and not {*layers} & {*divided}:
            raise ValueError(
                f"tp: no layer of rank {place} of the pipeline is divided; cut elsewhere, by 'begins', among "
                f"{', '.join(divided)}"
            )
    if rounds and (loans := loans_of(model, stages, schedule.rank_of)):
        raise ValueError(TIED.format(loans[0].name))
    given = given_by(workload.loss, batch, model)
    found = replace(found, given=tuple(given.shape))
    if divided:  # a cut between two layers may find the tensor between them in parts, so ranks tell each other
        return found
    try:
        outputs = outputs_of(model, stages, given.to("meta"))
    except ValueError:
        raise
    except Exception:  # what is computed depends on values: then ranks tell each other what comes
        return found
    return replace(found, outputs=tuple(outputs))


def outputs_of(model: nn.Module, stages: Cut, given: Tensor) -> list[Like]:
    """What each stage but the last gives for a micro-batch.

    Args:
        model: with parts; on the meta device it takes neither time nor memory.
        stages: the names of the parts of each.
        given: the first stage's input, on the model's device.

    Raises:
        ValueError: a stage gives anything but one tensor.
    """
    module, found = module_of(model, dict(enumerate(stages))), []
    with torch.no_grad():
        for stage in range(len(stages) - 1):
            given = module(stage, given)
            if not isinstance(given, Tensor):
                raise ValueError(f"stages: stage {stage} gives {type(given).__name__}; cut where one tensor goes on")
            found.append(Like(tuple(given.shape), given.dtype))
    return found


class _Called(Exception):  # noqa: N818, no error: it ends the loss where it calls the model
    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.given, self.named = args, kwargs


def given_by(loss: Callable[..., Any], batch: Any, module: nn.Module) -> Tensor:
    """What a loss calls the model with.

    Raises:
        ValueError: anything but one tensor, under autocast, or it does not call the model.
    """

    def model(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError(AUTOCAST)
        raise _Called(args, kwargs)

    try:
        loss(InPlaceOf(module, model), batch)
    except _Called as called:
        if len(called.given) == 1 and not called.named and isinstance(called.given[0], Tensor):
            return called.given[0]
    raise ValueError("loss: with pipe it has to call the model with one tensor, model(x), as the first stage is called")


def loss_of_output(loss: Callable[..., Any], batch: Any, module: nn.Module, output: Tensor) -> Any:
    """A loss where the model would return ``output``.

    Raises:
        ValueError: it calls the model twice.
    """
    left = [output]

    def model(*_: Any, **__: Any) -> Tensor:
        if not left:
            raise ValueError("loss: it calls the model twice; with pipe it may call it once")
        return left.pop()

    return loss(InPlaceOf(module, model), batch)
