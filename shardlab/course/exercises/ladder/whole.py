"""Whole strategies: the learner writes one, and it is trained against one process and weighed (``weighing.py``)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from shardlab.course.exercises.exercise import Attempt, Case, Exercise, Function, Measured, Message, Traffic

from shardlab.course.exercises.weighing import (  # isort: skip
    INNER, NUM_BLOCKS, ROWS, WIDTH, not_a_strategy, train, trained, tried_block, weigh,
)  # fmt: skip
from shardlab.vocabulary import Collective

NUM_RANKS = 2
BYTES = 1744  # of the parameters of the model that is weighed
BUCKETS = (208, 576, 576, 384)  # of it: at most 600 bytes each, from the last layer to the first
PARAMETERS = (384, 64, 512, 64, 512, 64, 128, 16)
UNITS = (448, 576, 576, 144)


def tried(function: Function, mesh: Any, *asked: Any) -> object:
    """Train a model by its name, or weigh a step within limits."""
    if fault := not_a_strategy(function):
        return Measured(None, fault=fault)
    return train(function, mesh, *asked) if len(asked) == 1 else weigh(function, mesh, *asked)


def _cases(
    messages: Mapping[Collective, tuple[int, ...]], most_messages: int, at_rest: Mapping[str, int], *, largest: float =
    inf, peak: float = inf, time_us: float = inf, models: tuple[str, ...] = ("MLP", "Unused"),
) -> list[Case]:  # fmt: skip
    trained = [
        Case(f"{num_ranks} ranks, trained on {name}", ((name,),) * num_ranks, (None,) * num_ranks,
             axes={"data": num_ranks})
        for num_ranks, name in zip((3, 2), models, strict=False)
    ]  # fmt: skip
    sent = [Message.around_a_ring(op, size, NUM_RANKS) for op, sizes in messages.items() for size in sizes]
    traffic = replace(Traffic.of([sent] * NUM_RANKS), most_messages=most_messages)
    weighed = Case(
        "2 ranks, weighed", ((dict(at_rest), largest),) * NUM_RANKS, (None,) * NUM_RANKS, traffic, peak, time_us,
        {"data": NUM_RANKS},
    )  # fmt: skip
    return [*trained, weighed]


def ddp_cases() -> list[Case]:
    """whole_ddp: a subclass of Strategy, data parallel with one message for each parameter.

    Every rank trains on its own rows. make_means() comes after backward: it must leave in param.grad the mean over the
    ranks. self.params are the parameters by name, self.comm.all_reduce(tensor, tag=...) adds up in place and returns
    what has a wait(), self.num_ranks is their number. A rank that did not use a parameter has no gradient of it, and
    others may: self.is_due(param) says whether any rank can have one, alike on all ranks. The check trains two models
    against one process, and weighs a step of four layers on 2 ranks.

    Hints:
    - What this rank has not used it must send too, as zeros: the others wait for its part.
    - Send all, then wait for all, then divide by self.num_ranks.
    """
    return _cases({Collective.ALL_REDUCE: PARAMETERS}, 8, {"optimizer_state": 2 * BYTES})


def bucketed_cases() -> list[Case]:
    """whole_bucketed: data parallel in buckets that leave during backward.

    bucket_bytes, which your class has, is the capacity of a bucket; before lay_out(given) the check sets it, to 600
    where it weighs. lay_out(given) returns what super().lay_out(given) returns, once your buckets are made.
    grad_ready(param, sends=...) comes when autograd has added to param.grad; sends is False inside no_sync().
    make_means() comes when backward has ended. On the virtual clock each gradient takes 40 us, and a message 10 us and
    1 us for every 8 bytes: in at most 4 messages of at most 600 bytes, 620 us suffice for forward, backward and what is
    exposed.

    Hints:
    - Backward goes from the last parameter to the first: fill buckets in that order.
    - Ranks may complete buckets in different orders, and messages must leave in one: each waits for those before it.
    - Send in grad_ready(), wait in make_means(), which first sends what did not leave, with zeros for what is unused.
    """
    return _cases({Collective.ALL_REDUCE: BUCKETS}, 4, {"optimizer_state": 2 * BYTES}, largest=600, time_us=620)


def zero1_cases() -> list[Case]:
    """whole_zero1: each rank steps 1/N of the elements, and has optimizer state for these alone.

    What a strategy has (self.params, self.comm, self.num_ranks, self.is_due) is said in whole_ddp. Set steps_pieces =
    True. lay_out(given) calls super().lay_out(given), makes the parameters views of one flat tensor, and returns
    LaidOut(pieces, [Division(layout, self.comm, element_size)]): pieces are the tensors that this rank steps, by the
    names of all parameters, empty where it steps nothing. flat_layout(specs, num_ranks) of shardlab.partition says
    which: pieces(rank) have a name, flat_start and flat_stop, chunk(rank) is where the rank's part begins and ends, and
    padded_numel is the length with padding. make_means() leaves the means in the .grad of pieces. stepping(*,
    loads=False) is a context: inside, the optimizer steps; at its end all ranks must have all parameters. holdings()
    yields what has memory: beside that of super().holdings(), Holding(Role.GRADIENT, tensor).

    Hints:
    - ParamSpec(name, tuple(param.shape), param.element_size()) is what flat_layout takes, for each parameter.
    - self.comm.reduce_scatter(flat, own, tag=...) sums, and leaves this rank's chunk in own.
    - After the step self.comm.all_gather(flat, own, tag=...) fills the flat tensor with the chunks of all ranks.
    """
    both = {Collective.REDUCE_SCATTER: BUCKETS, Collective.ALL_GATHER: BUCKETS}
    return _cases(both, 16, {"optimizer_state": BYTES})


def zero2_cases() -> list[Case]:
    """whole_zero2: as whole_zero1, and each rank keeps gradients of what it steps alone.

    A gradient is reduced while backward goes on, in messages of at most 600 bytes, and what is whole is freed: at rest
    872 bytes of gradients are enough, at the peak 7000 bytes of all, and 740 us on the clock of whole_bucketed. Lay
    each parameter out for itself, or buckets of them; grad_ready(param, sends=...) says when a gradient has come.

    Hints:
    - One flat_layout for each parameter is the simplest: each has its own message.
    - In grad_ready(): reduce_scatter the gradient, keep what it returns, and set param.grad = None.
    - Messages must leave in one order on all ranks; make_means() sends what has not come, as zeros, and waits for all.
    """
    both = {Collective.REDUCE_SCATTER: BUCKETS, Collective.ALL_GATHER: BUCKETS}
    at_rest = {"optimizer_state": BYTES, "gradient": BYTES // NUM_RANKS}
    return _cases(both, 16, at_rest, largest=600, peak=7000, time_us=740)


def zero3_cases() -> list[Case]:
    """whole_zero3: parameters are divided too; they are gathered for forward and for backward.

    At rest a rank holds 1/N of parameters, gradients and optimizer state, and at the peak 7400 bytes of all are
    enough: gathered parameters are freed after forward, and before gradients travel. in_forward() and
    in_backward(sends=...) are contexts: inside, the module computes, with all its parameters. full(keep_changes=...)
    is one in which a user reads them, and writes them where keep_changes is True. Autograd saves weights for backward:
    it must not keep the memory that you free. So free the storage and not the tensor, by
    flat.untyped_storage().resize_(0), and gather into it.
    What is still gathered after forward, or after backward, is refused.

    Hints:
    - The optimizer steps pieces of a shard of this rank's own; after the step nothing is sent.
    - Gather: resize_ the storage to its bytes, then all_gather(flat, shard); free: resize_(0).
    - Inside no_sync() whole gradients stay at the parameters, until make_means() scatters them.
    """
    three = {Collective.ALL_GATHER: BUCKETS * 2, Collective.REDUCE_SCATTER: BUCKETS}
    at_rest = {"parameter": BYTES // NUM_RANKS, "gradient": BYTES // NUM_RANKS, "optimizer_state": BYTES}
    return _cases(three, 24, at_rest, peak=7400)


def fsdp_cases() -> list[Case]:
    """whole_fsdp: as whole_zero3, unit by unit, and the next one ahead of time.

    Units are the children of given.module that have parameters, one behind the other; keep yours under another name
    than self.units, which is for units of the library's own kind. A unit is gathered in one message before its forward
    and again before its backward, freed after each, and its gradients are scattered when the last has come. While one
    unit computes, the message of the next one is under way. LaidOut(..., hooks=[...]) takes the handles of your hooks.
    In messages of at most 600 bytes, 6500 bytes at the peak, 1216 of parameters while a unit computes, and 640 us on
    the clock of whole_bucketed are enough. The rows of some ranks skip a unit of the second model, and another unit is
    used by none: each rank sends the messages of all units, in the same order. What is written in full() only
    check_strategy asks.

    Hints:
    - register_forward_pre_hook gathers; register_forward_hook frees, and its output's register_hook gathers again.
    - Start the next unit's gather before this one computes: in forward of the one behind it, in backward before it.
    - grad_ready() counts the gradients of a unit: with the last one it frees the unit and starts the reduce_scatter.
    - List all messages of a forward and of a backward before it begins, in in_forward() and in_backward(sends=...).
      Whoever comes to one sends what stands before it first, and at the end what is left: zeros for what was not used.
    """
    three = {Collective.ALL_GATHER: UNITS * 2, Collective.REDUCE_SCATTER: UNITS}
    at_rest = {"parameter": BYTES // NUM_RANKS, "gradient": BYTES // NUM_RANKS, "optimizer_state": BYTES}
    at_rest["gathered_parameter"] = 2 * max(UNITS) + 64  # two units, and what stands for the others
    return _cases(three, 12, at_rest, largest=600, peak=6500, time_us=640, models=("MLP", "Skips"))


def tensor_cases() -> list[Case]:
    """whole_tensor(block, comm): a subclass of nn.Module that does the work of block, divided over the ranks of comm.

    block is nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) of float64, the same on all ranks. x, shape
    (4, 6), and the output are whole on each rank. Of the first layer a rank keeps its 12 / N rows of weight and bias,
    of the second its 12 / N columns and the whole bias, as nn.Parameter, and nothing of block besides. Forward sends
    one all_reduce, comm.all_reduce(tensor, tag=...).wait(), which adds up in place; backward, for the gradient of x,
    another one. Two such blocks, each added to its input, are trained against one process, then a step is weighed on 2
    ranks: 4 messages of 192 bytes, 1344 bytes of parameters at rest, and 7000 bytes at the peak.

    Hints:
    - A torch.autograd.Function has a forward and a backward of its own: one whose forward is the tensor itself and
      whose backward is a sum over ranks, and one the other way round.
    - The second bias belongs behind the sum, or it is added N times.
    - A slice of a tensor is a view, which keeps all of its memory alive: clone() it.
    """
    inner = INNER // NUM_RANKS
    param_bytes = 8 * NUM_BLOCKS * (inner * WIDTH + inner + WIDTH * inner + WIDTH)
    at_rest = {"parameter": param_bytes, "gradient": param_bytes, "optimizer_state": 2 * param_bytes, "other": 200}
    one = Message.around_a_ring(Collective.ALL_REDUCE, 8 * ROWS * WIDTH, NUM_RANKS)
    wanted = trained(lambda block: block)
    return [
        Case(f"{num_ranks} ranks, trained", (({},),) * num_ranks, (wanted,) * num_ranks, axes={"tensor": num_ranks})
        for num_ranks in (3, 2)
    ] + [
        Case(
            "2 ranks, weighed", ((at_rest,),) * NUM_RANKS, (None,) * NUM_RANKS,
            Traffic.of([[one] * 2 * NUM_BLOCKS] * NUM_RANKS), 7000, axes={"tensor": NUM_RANKS},
        )
    ]  # fmt: skip


def _whole(cases: Callable[[], list[Case]], attempt: Attempt = tried) -> Exercise:
    name = f"whole.{cases.__name__.removesuffix('_cases')}"
    return Exercise.of(name, cases, "guide/exercises", attempt=attempt, points=3, shown_inputs=lambda *_: "")


WHOLE = (
    *map(_whole, (ddp_cases, bucketed_cases, zero1_cases, zero2_cases, zero3_cases, fsdp_cases)),
    _whole(tensor_cases, tried_block),
)
