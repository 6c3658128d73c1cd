"""A step without ranks, values or time: the engine itself runs, on memory that nobody touches and a clock that is told.

    records = dry_run(config, "fsdp", costs)        # the five tables, source="predicted"

One rank trains in this process. Operations compute nothing (``dry.without_values``); each moves the clock by what it
would cost (``Costs``), and messages take their turn on the queue of their axis. So order, bytes, waits and the peak of
memory are those of the engine and the recorder, with nothing written twice, and the times are a forecast. Ranks that
are alike are one: the others are taken to come to every message at the same moment.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from shardlab.comm.foretold import ForetoldMesh, ToldClock
from shardlab.comm.trees import tensors_in
from shardlab.dry.without_values import WithoutValues
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.known_workload import first_batch, first_forward
from shardlab.experiment.run.rank_run import recorded_run
from shardlab.experiment.trained.batches import DataEndedError, Share
from shardlab.records.store import Records, RunWriter, load_run, write_manifest
from shardlab.trace.unlike_steps import Shapes, shapes_of, within

STEPS = 2  # the first makes the optimizer's state
OperationSeconds = Callable[[Any, tuple[Any, ...], Any], float]
"""Seconds of an operation alone on its device, by its overload, its arguments and its result."""


def dry_run(
    config: CompareConfig, strategy: str, clock: ToldClock, operation_seconds: OperationSeconds, rank: int = 0,
    host_seconds: float = 0.0, *, others: bool = False, traces_memory: bool = True,
) -> Records:  # fmt: skip
    """The records of the first two steps of one rank of a strategy, with source 'predicted'.

    Args:
        config: what is trained, and how; its ranks need not be there.
        strategy: one of ours.
        clock: which the run moves; it knows what messages cost.
        operation_seconds: what operations cost.
        rank: which rank.
        host_seconds: of a step: what the engine's own code takes beside operations.
        others: run the later steps too that have larger or smaller batches, for their peaks; their times do not count.
        traces_memory: find the peaks, which takes about as long as all else.

    Raises:
        RuntimeError: the step depends on values.
    """
    if config.staged_of(strategy) is not None:
        raise ValueError(
            f"strategy: {strategy!r} has stages, which wait for other ranks; what_if and play know their list"
        )

    def ran(func: Any, args: tuple[Any, ...], result: Any) -> None:
        clock.compute(operation_seconds(func, args, result))

    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        are_alike = not first_forward(config, config.on_meta, first_batch(config)).by_rows
        mesh = stack.enter_context(ForetoldMesh(config.mesh_axes(strategy), rank, clock, are_alike=are_alike))
        mode = stack.enter_context(WithoutValues(ran))
        writer = RunWriter(directory, rank, strategy, "predicted")
        with recorded_run(config, strategy, mesh, writer, 0, clock) as run:
            run.take_batches(mode.with_values)
            later = other_steps(mode.with_values(run.batches_anew()), config) if others else []
            numbers = [*range(STEPS), *later]
            for step, before in zip(numbers, [-1, *numbers], strict=False):
                run.pass_over(step - before - 1)
                clock.owe(host_seconds)
                run.step(step, trace_memory=traces_memory)  # which takes no time on this clock
        write_manifest(directory, {"run": strategy, "source": "predicted"})
        records = load_run(directory)
        return replace(records, steps=records.steps.assign(traced_memory=records.steps["step"] >= STEPS))


def other_steps(shares: Iterator[Share], config: CompareConfig) -> list[int]:
    """The steps after the first two whose batches have the largest shapes, or the smallest, but for the first step.

    Args:
        shares: of all steps.
        config: says how many of them a step takes, and the number of steps; data may end before.
    """
    seen: dict[Shapes, int] = {}
    with contextlib.suppress(DataEndedError):
        for step in range(config.steps):
            shapes = shapes_of(tensors_in([share.batch for share in islice(shares, config.accumulation)]))
            seen.setdefault(shapes, step) if step else None
    is_largest = (not any(within(shapes, other) for other in seen if other != shapes) for shapes in seen)
    is_smallest = (all(within(shapes, other) for other in seen) for shapes in seen)
    extremes = zip(seen.values(), is_largest, is_smallest, strict=True)
    return [step for step, *is_extreme in extremes if any(is_extreme) and step >= STEPS]
