"""Exercises of the notebook on pipelines: a schedule, and what is left to do at the end of a step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh
from shardlab.course.exercises.exercise import Case, Exercise, Function, Message, Traffic
from shardlab.course.exercises.values import numbers_in
from shardlab.engines import DDP, Engine
from shardlab.pipeline import Pipeline
from shardlab.schedules import Action, Kind, Schedule, make_schedule, play
from shardlab.vocabulary import Collective

SLOTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
SIZES = {"2 ranks, 3 micro-batches": (2, 3), "4 ranks, 8 micro-batches": (4, 8), "4 ranks, 2 micro-batches": (4, 2)}


def schedule_cases() -> list[Case]:
    """pipeline_schedule(num_ranks, num_micro_batches, rank): what a rank of a pipeline does, in order.

    Rank r has stage r. An action is a text: "2F0" is the forward of stage 2 for micro-batch 0, "2B0" its backward. The
    forward of a stage needs that of the stage before for the same micro-batch, the backward that of the stage behind; a
    rank does its list in order, and waits for what an action needs. Return the list of actions of this rank: every
    micro-batch forward and backward, once. With forwards of one slot and backwards of two, no rank may idle for more
    than 3 (p - 1) slots, and rank r may hold no more than min(m, p - r) micro-batches between forward and backward. The
    lists are played on a clock, and then done by real ranks, whose gradients must be those of one process.

    Hints:
    - The last rank can do 3F0 3B0 3F1 3B1 and so on: a backward as soon as its forward is over. It holds one.
    - Rank r begins with p - r forwards, or m where there are fewer: so long it takes until its first gradient comes.
    - Then in turns: one backward, one forward, until the forwards are used up; then the backwards that are left.
    """
    return [
        Case(words, ((num_ranks, number),) * num_ranks, _wanted(num_ranks, number), axes={"pipe": num_ranks, "data": 1})
        for words, (num_ranks, number) in SIZES.items()
    ]


def _wanted(num_ranks: int, num_micro_batches: int) -> tuple[object, ...]:
    schedule = make_schedule("1f1b", num_ranks, num_micro_batches)
    model, inputs, targets = _problem(num_ranks, num_micro_batches)
    nn.functional.mse_loss(model(inputs), targets).backward()
    gradients = [_gradients(layer) for layer in model]
    return tuple(_found(schedule, rank, gradients[rank]) for rank in range(num_ranks))


def _problem(num_ranks: int, num_micro_batches: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    numbers = torch.sin(torch.arange(6 * num_micro_batches, dtype=torch.float64)).view(-1, 3)
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(num_ranks)))
    with torch.no_grad():
        for place, param in enumerate(model.parameters()):
            param.copy_(torch.cos(torch.arange(param.numel(), dtype=torch.float64) + place).view_as(param))
    return model, numbers, numbers.flip(0)


def _gradients(module: nn.Module) -> list[float]:
    return torch.cat([param.grad.flatten() for param in module.parameters() if param.grad is not None]).tolist()


def _found(schedule: Schedule, rank: int, gradients: Sequence[float]) -> dict[str, object]:
    return {
        "schedule": "complete", "idle slots": play(schedule, SLOTS).idle[rank],
        "micro-batches held": schedule.in_flight(rank), "gradients": gradients,
    }  # fmt: skip


def do_schedule(function: Function, mesh: BaseMesh, num_ranks: int, num_micro_batches: int) -> object:
    """The learner's lists, played and then done by the ranks."""
    lists = [function(num_ranks, num_micro_batches, rank) for rank in range(num_ranks)]
    try:
        schedule = _read(lists, num_micro_batches)
        play(schedule, SLOTS)
    except ValueError as error:
        return {"schedule": str(error), "idle slots": None, "micro-batches held": None, "gradients": None}
    model, inputs, targets = _problem(num_ranks, num_micro_batches)
    pipeline = Pipeline(model, schedule, mesh, tuple(map(str, range(1, num_ranks))))
    with Engine(pipeline.module, lambda params: torch.optim.SGD(params, 0.1), mesh, DDP()) as engine:
        pipeline.run(engine, nn.functional.mse_loss, inputs, targets)
        return _found(schedule, mesh["pipe"].rank, _gradients(pipeline.module))


def _read(lists: Sequence[Any], num_micro_batches: int) -> Schedule:
    if not all(isinstance(actions, list | tuple) for actions in lists):
        raise ValueError("no list of actions came back")
    schedule = Schedule(tuple(tuple(Action.parse(str(action)) for action in actions) for actions in lists))
    if schedule.num_micro_batches != num_micro_batches:
        raise ValueError(f"it has {schedule.num_micro_batches} of {num_micro_batches} micro-batches")
    if (own := list(schedule.rank_of.items())) != [(rank, rank) for rank in range(len(lists))]:
        raise ValueError(f"rank r has stage r, and the (stage, rank) of these lists are {own}")
    return schedule


SCHEDULE = Exercise.of(
    "pipeline.schedule", schedule_cases, "18_pipelines", attempt=do_schedule,
    drawn=lambda result: numbers_in([result["idle slots"], result["micro-batches held"]]),
    drawn_words="idle slots, then micro-batches held at once",
)  # fmt: skip


def finish_cases() -> list[Case]:
    """pipeline_finish(comm, sums, num_micro_batches): what is left to do when all backwards are over.

    sums is the list of this stage's gradients, float64 vectors, each the sum over the micro-batches of the gradients of
    mean losses. The ranks of comm have the other stages. Return a dict: "gradients", those of the mean loss over all
    rows, and "norm", the 2-norm of the gradients of the whole model, the same on all ranks. One message is enough.

    Hints:
    - All micro-batches have as many rows: the mean over rows is the mean over micro-batches of their means.
    - A norm is the root of a sum of squares, and squares add up over stages: comm.all_reduce(squares).wait().
    """
    return [_finish_case(f"{num_ranks} stages", num_ranks, 4) for num_ranks in (2, 3)]


def _finish_case(words: str, num_ranks: int, num_micro_batches: int) -> Case:
    sums = [[torch.arange(1.0, 3 + rank, dtype=torch.float64) * (-1) ** rank] for rank in range(num_ranks)]
    means = [[gradient / num_micro_batches for gradient in own] for own in sums]
    norm = torch.cat([gradient for own in means for gradient in own]).norm()
    traffic = Traffic.of([[Message.around_a_ring(Collective.ALL_REDUCE, 8, num_ranks)]] * num_ranks)
    return Case(
        words, tuple((own, num_micro_batches) for own in sums),
        tuple({"gradients": own, "norm": norm} for own in means), traffic,
    )  # fmt: skip


FINISH = Exercise.of(
    "pipeline.finish", finish_cases, "18_pipelines",
    drawn=lambda result: numbers_in(result["norm"]), drawn_words="the norm",
)  # fmt: skip
