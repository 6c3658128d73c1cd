"""A step without ranks, values or time: the engine itself runs, on memory that nobody touches and a clock that is told.

    records = dry_run(config, "fsdp", costs)        # the five tables, source="predicted"

One rank trains in this process. Operations compute nothing: each gives tensors of the right shape, in memory that the
system has promised and not yet handed out, so a module of 7 billion parameters needs little of either. Each moves the
clock by what it would cost (``Costs``), and messages take their turn on the queue of their axis. So order, bytes,
waits and the peak of memory are those of the engine and the recorder, with nothing written twice, and the times are a
forecast. Ranks that are alike are one: the others are taken to come to every message at the same moment.

Values are not there: what is read is 0. So a loss that depends on values (which expert a row takes) cannot be run.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # no public way to learn shapes, strides and devices
from torch.utils._python_dispatch import TorchDispatchMode  # no public way to see every operation
from torch.utils._pytree import tree_map_only

from shardlab.comm.foretold import ForetoldMesh, ToldClock
from shardlab.comm.trees import tensors_in
from shardlab.experiment.batches import DataEndedError, Share
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned_workload import first_forward
from shardlab.experiment.run import recorded_run
from shardlab.trace.store import Records, RunWriter, load_run, write_manifest
from shardlab.trace.unlike_steps import Shapes, shapes_of, within

SMALL, MANY = 64, 2**20  # elements: what is no larger is computed, of numbers with a point and of others
STEPS = 2  # the first makes the optimizer's state
OperationSeconds = Callable[[Any, tuple[Any, ...], Any], float]
"""Seconds of an operation alone on its device, by its overload, its arguments and its result."""


class WithoutValues(TorchDispatchMode):
    """Inside, operations compute nothing and take no memory; each is announced with its result.

    Args:
        ran: told of each operation that would compute.
    """

    def __init__(self, ran: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran, self._shapes = ran, FakeTensorMode(allow_non_fake_inputs=True)
        self._computes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operation, without its values."""
        kwargs = kwargs or {}
        if self._computes:
            return func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        if func.is_view or torch.Tag.inplace_view in func.tags or _allocates(func) or func in _REAL:
            return func(*args, **kwargs)
        if func.overloadpacket is _aten._assert_async:  # it would judge values that nobody has computed
            return None
        # oneDNN alone knows how much a recurrent layer keeps.
        if (given and all(map(_has_values, given))) or func.overloadpacket is _aten.mkldnn_rnn_layer:
            result = func(*args, **kwargs)
        elif func._schema.is_mutable:
            result = _written(func, args, kwargs)
        else:
            result = self._untouched(func, args, kwargs)
        self._ran(func, args, result)
        return result

    def with_values(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, which are made as they are without this."""
        while True:
            self._computes = True
            try:
                batch = next(batches, None)
            finally:
                self._computes = False
            if batch is None:
                return
            yield batch

    def _untouched(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._shapes:
            shapes_alone = tree_map_only(Tensor, _like, (args, kwargs))
            shaped = func(*shapes_alone[0], **shapes_alone[1])
        return tree_map_only(Tensor, _without_values, shaped)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _without_values(shaped: Tensor) -> Tensor:
    # What may be read is 0, and not what lay in its memory before.
    return _like(shaped).zero_() if _has_values(shaped) else _like(shaped)


def _has_values(tensor: Tensor) -> bool:
    """Whether it is computed: what is small (an overflow, a norm, a counter), and whole numbers, which may be sizes."""
    return tensor.numel() <= (SMALL if tensor.is_floating_point() else MANY)


_aten = torch.ops.aten
# The last four give views, though their schemas do not say so.
_REAL = {_aten._local_scalar_dense.default, _aten.set_.source_Storage, _aten.set_.source_Tensor,
         _aten.set_.source_Storage_storage_offset, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default,
         _aten.unsafe_chunk.default, _aten._unsafe_view.default}  # fmt: skip


def _allocates(func: Any) -> bool:
    return func.overloadpacket.__name__ in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation in place returns: the tensors that it would have written into."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    returns = func._schema.returns
    return None if not returns else found[0] if len(returns) == 1 else tuple(found)


def dry_run(
    config: CompareConfig, strategy: str, clock: ToldClock, operation_seconds: OperationSeconds, rank: int = 0,
    host_seconds: float = 0.0, *, others: bool = False,
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

    Raises:
        RuntimeError: the step depends on values.
    """
    axes = {"data": 1} if strategy == "single" else config.mesh_axes(strategy)

    def ran(func: Any, args: tuple[Any, ...], result: Any) -> None:
        clock.compute(operation_seconds(func, args, result))

    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        are_alike = not first_forward(config, config.on_meta).by_rows
        mesh = stack.enter_context(ForetoldMesh(axes, rank, clock, are_alike=are_alike))
        mode = stack.enter_context(WithoutValues(ran))
        writer = RunWriter(directory, rank, strategy, "predicted")
        with recorded_run(config, strategy, mesh, writer, 0, clock) as run:
            run.take_batches(mode.with_values)
            later = other_steps(mode.with_values(run.batches_anew()), config) if others else []
            numbers = [*range(STEPS), *later]
            for step, before in zip(numbers, [-1, *numbers], strict=False):
                run.pass_over(step - before - 1)
                clock.owe(host_seconds)
                run.step(step, trace_memory=True)  # which takes no time on this clock
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
