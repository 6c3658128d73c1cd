"""Exercises of notebooks 18 and 19: a pipeline's schedule, and the end of its step; a sequence in parts, and attention.

What is attended to in two parts is put together; parts are equal work.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh, Communicator
from shardlab.context import positions_of
from shardlab.course.exercises.exercise import Case, Exercise, Function, Measured, Traffic, call_without_ranks
from shardlab.course.exercises.values import numbers_in
from shardlab.engines import DDP, Engine
from shardlab.pipeline import Pipeline
from shardlab.schedules import Action, Kind, Schedule, make_schedule, play
from shardlab.vocabulary import Collective

SLOTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
SIZES = {"2 ranks, 3 micro-batches": (2, 3), "4 ranks, 8 micro-batches": (4, 8), "4 ranks, 2 micro-batches": (4, 2)}


def schedule_case(words: str, num_ranks: int, num_micro_batches: int) -> Case:
    """pipeline_schedule(num_ranks, num_micro_batches, rank): what a rank of a pipeline does, in order.

    Rank r has stage r. An action is a text: "2F0" is the forward of stage 2 for micro-batch 0, "2B0" its backward. The
    forward of a stage needs that of the stage before for the same micro-batch, the backward that of the stage behind; a
    rank does its list in order, and waits for what an action needs. Return the list of actions of this rank: every
    micro-batch forward and backward, once. Of p = num_ranks and m = num_micro_batches: rank r may hold no more than
    min(m, p - r) micro-batches between forward and backward, and may idle, in the whole run, for no more than 3 (p - 1)
    slots, where a forward takes one slot, a backward two, and a message none. The lists are played on a clock, and then
    done by real ranks, whose gradients must be those of one process.

    Hints:
    - The last rank can do 3F0 3B0 3F1 3B1 and so on: a backward as soon as its forward is over. It holds one.
    - Rank r begins with p - r forwards, or m where there are fewer: so long it takes until its first gradient comes.
    - Then in turns: one backward, one forward, until the forwards are used up; then the backwards that are left.
    """
    schedule = make_schedule("1f1b", num_ranks, num_micro_batches)
    model, inputs, targets = _problem(num_ranks, num_micro_batches)
    nn.functional.mse_loss(model(inputs), targets).backward()
    gradients = [_gradients(layer) for layer in model]
    wanted = tuple(_found(schedule, rank, gradients[rank]) for rank in range(num_ranks))
    inputs_of_ranks = ((num_ranks, num_micro_batches),) * num_ranks
    return Case(words, inputs_of_ranks, wanted, axes={"pipe": num_ranks, "data": 1})


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
        unknown = {"schedule": "none", "idle slots": None, "micro-batches held": None, "gradients": None}
        return Measured(unknown, fault=str(error))
    model, inputs, targets = _problem(num_ranks, num_micro_batches)
    pipeline = Pipeline(model, schedule, mesh, tuple(map(str, range(1, num_ranks))))
    with Engine(pipeline.module, lambda params: torch.optim.SGD(params, 0.1), mesh, DDP()) as engine:
        pipeline.run(engine, nn.functional.mse_loss, inputs, targets)
        rank = mesh["pipe"].rank
        held, most = schedule.in_flight(rank), min(num_micro_batches, num_ranks - rank)
        fault = f"{held} micro-batches are held at once, and {most} may be" if held > most else ""
        return Measured(_found(schedule, rank, _gradients(pipeline.module)), fault=fault)


def _read(lists: Sequence[Any], num_micro_batches: int) -> Schedule:
    if not all(isinstance(actions, list | tuple) for actions in lists):
        raise ValueError("no list of actions came back")
    parsed = tuple(tuple(Action.parse(str(action)) for action in actions) for actions in lists)
    for rank, action in ((rank, action) for rank, actions in enumerate(parsed) for action in actions):
        if action.stage != rank or action.kind not in SLOTS:
            raise ValueError(f"{action} is not for rank {rank}: its actions are {rank}F and {rank}B of a micro-batch")
        if action.micro_batch >= num_micro_batches:
            raise ValueError(f"{action}: there are {num_micro_batches} micro-batches, and the first one is 0")
    schedule = Schedule(parsed)
    if schedule.num_micro_batches != num_micro_batches:
        raise ValueError(f"it has {schedule.num_micro_batches} of {num_micro_batches} micro-batches")
    return schedule


SCHEDULE = Exercise.of(
    "pipeline.schedule", schedule_case, "18_pipelines", SIZES, attempt=do_schedule,
    drawn=lambda result: numbers_in([result["idle slots"], result["micro-batches held"]]),
    drawn_words="idle slots, then micro-batches held at once",
)  # fmt: skip


def finish_case(words: str, num_ranks: int, num_micro_batches: int) -> Case:
    """pipeline_finish(comm, sums, num_micro_batches): what is left to do when all backwards are over.

    sums is the list of this stage's gradients, float64 vectors, one or several, each the sum over the micro-batches of
    the gradients of mean losses. All micro-batches have as many rows. The ranks of comm have the other stages. Return a
    dict: "gradients", those of the mean loss over all rows, and "norm", a number, the 2-norm of the gradients of the
    whole model, the same on all ranks. One message is enough: comm.all_reduce(tensor).wait() adds up in place.

    Hints:
    - The mean over all rows is the mean over micro-batches of their means.
    - A norm is the root of a sum of squares, and squares add up over stages: comm.all_reduce(squares).wait().
    """
    sums = [
        [torch.arange(1.0, 3 + rank + place, dtype=torch.float64) * (-1) ** rank for place in range(1 + rank % 2)]
        for rank in range(num_ranks)
    ]
    means = [[gradient / num_micro_batches for gradient in own] for own in sums]
    norm = torch.cat([gradient for own in means for gradient in own]).norm().item()  # a number is one, too
    traffic = Traffic.alike(Collective.ALL_REDUCE, [8], num_ranks)
    return Case(
        words, tuple((own, num_micro_batches) for own in sums),
        tuple({"gradients": own, "norm": norm} for own in means), traffic,
    )  # fmt: skip


FINISH = Exercise.of(
    "pipeline.finish", finish_case, "18_pipelines", {"2 stages": (2, 5), "3 stages": (3, 7)},
    drawn=lambda result: numbers_in(result["norm"]), drawn_words="the norm",
)  # fmt: skip


LENGTHS = {"2 ranks, 8 tokens": (8, 2), "3 ranks, 12 tokens": (12, 3), "4 ranks, 32 tokens": (32, 4)}


def parts_case(words: str, seq_len: int, num_ranks: int) -> Case:
    """context_parts(seq_len, num_ranks, rank): the positions of the tokens that a rank has, as a list.

    Attention is causal: the query at position t sees the t + 1 keys at positions 0 to t, and each of them is a pair
    that its rank computes. Divide the tokens so that each is on one rank, and all ranks compute equally many pairs.
    2 num_ranks divides seq_len.

    Hints:
    - Cut the sequence into 2 num_ranks pieces. The first piece has the least work, the last one the most.
    - Rank 0 takes the first and the last piece, rank 1 the second and the last but one.
    """
    parts = [positions_of(seq_len, num_ranks, rank, zigzag=True).tolist() for rank in range(num_ranks)]
    return Case(words, ((seq_len, num_ranks),), ({"tokens": "each once", "pairs": _pairs(parts)},))


def _pairs(parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(position + 1 for position in part) for part in parts]


def divide(function: Function, _comm: Communicator, seq_len: int, num_ranks: int) -> object:
    """The learner's parts, counted."""
    parts = [function(seq_len, num_ranks, rank) for rank in range(num_ranks)]
    try:
        numbers = [[int(position) for position in part] for part in parts]
    except TypeError:
        return {"tokens": "no list of positions came back", "pairs": None}
    found = sorted(position for part in numbers for position in part)
    wrong = sorted(set(found) ^ set(range(seq_len))) or [one for one in set(found) if found.count(one) > 1]
    return {"tokens": f"not once: {wrong[0]}" if wrong else "each once", "pairs": _pairs(numbers)}


PARTS = Exercise.of(
    "context.parts", parts_case, "19_long_sequences", LENGTHS, attempt=divide,
    drawn=lambda result: numbers_in(result["pairs"]), drawn_words="pairs that a rank computes",
)  # fmt: skip


def merge_case(words: str, added: Sequence[float], unseen: slice) -> Case:
    """context_merge(one, other): attention to all keys, from that to each of two parts of them.

    Each part is a pair (output, log_sum): output is [queries, d], float64, the values' mean with softmax weights over
    the keys of that part alone; log_sum is [queries, 1], the logarithm of the sum of exp(score) over the same keys, and
    minus infinity where a query sees none of them (its output is 0). Return a dict with "output" and "log_sum" of both
    parts together, as if there had been one softmax. Scores may be large: exp(1000) is no number.

    Hints:
    - A part's share of the weight is exp(log_sum) / (exp(log_sum) + exp(other_log_sum)), = exp(log_sum - both).
    - both = torch.logaddexp(log_sum, other_log_sum) is the new log_sum, and never leaves the range of numbers.
    """
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5), (5, 3)))
    scores += torch.tensor(added).view(-1, 1)
    scores[0, unseen] = -torch.inf
    whole, *parts = (
        (scores[:, keys].softmax(-1).nan_to_num() @ values[keys], scores[:, keys].logsumexp(-1, keepdim=True))
        for keys in (slice(None), slice(3), slice(3, None))
    )
    return Case(words, (tuple(parts),), ({"output": whole[0], "log_sum": whole[1]},))


MERGE = Exercise.of(
    "context.merge", merge_case, "19_long_sequences",
    {
        "3 and 2 keys": ((0, 0), slice(0)), "scores around 1000": ((1000, 1000), slice(0)),
        "a query that sees one part": ((0, 0), slice(3, 5)), "a query that sees the other part": ((0, 0), slice(3)),
        "scores around 1000 of one query": ((1000, 0), slice(0)),
    },
    attempt=call_without_ranks,
    drawn=lambda result: _row(result["output"]), drawn_words="the outputs",
)  # fmt: skip


def _row(output: Any) -> list[float]:
    return list(numbers_in(torch.as_tensor(output).flatten()))
