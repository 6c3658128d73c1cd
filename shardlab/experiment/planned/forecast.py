"""How long a step takes on this machine, from its calibration: the engine's own step on a clock that is told.

An operation costs what it did when the machine was calibrated: a matrix product by its FLOPs, any other by its bytes.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardlab.analysis.rows import step_lengths
from shardlab.comm.events import CollectiveEvent
from shardlab.comm.foretold import Costs, ToldClock, Wire
from shardlab.comm.transports.gloo import SEGMENT_BYTES
from shardlab.comm.trees import tensors_in
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.dry_run import dry_run, refuse_stages
from shardlab.forecast.machine import Line, Machine, RankCosts
from shardlab.partition.ring_cost import Link
from shardlab.records.store import Records
from shardlab.units import wrapped_modules


@dataclass(frozen=True)
class StepForecast:
    """What is foretold of a step.

    Attributes:
        seconds: of a step.
        peak_bytes: the most that the rank's tensors and the transports hold.
        records: the tables, with source 'predicted'.
        is_outside: whether an operation or a message is larger than all that were measured.
        unmeasured: what takes time and is of no kind that was measured.
    """

    seconds: float
    peak_bytes: int
    records: Records
    is_outside: bool
    unmeasured: frozenset[str]


PRODUCT, OTHER, MESSAGE = range(3)  # places in ``RankCosts.largest``
# A product of a short inner dim takes as long as additions of its bytes, so many: measured, (1024, 16) by (16, 512).
THIN = 3
UNMEASURED = {"convolution": "convolutions", "rnn_layer": "recurrent layers"}  # by a word in the operation's name
# Of a machine that takes no time: all that is in flight arrives at once.
_NO_TIME = RankCosts(
    dict.fromkeys(("forward", "backward", "optimizer"), 0.0), defaultdict(lambda: Line([1.0], [0.0])),
    {"add": Line([1.0], [0.0])}, {"all_reduce": Line([1.0], [0.0])}, 0.0, {}, 0.0, 0.0,
)  # fmt: skip


def forecast_step(
    config: CompareConfig, strategy: str, machine: Machine | None, rank: int = 0, *, traces_memory: bool = True
) -> StepForecast:  # fmt: skip
    """The forecast of one strategy.

    Args:
        config: what is trained, and how.
        strategy: one of ours.
        machine: its calibration; None where only bytes are asked for.
        rank: the rank that is looked at.
        traces_memory: find the peak, which takes about as long as all else; without it ``peak_bytes`` is 0.

    Raises:
        ValueError: the machine was not calibrated for so many ranks, or the strategy has stages: of these the peak
            alone is known.
        RuntimeError: the step needs values.
    """
    if machine is not None:
        refuse_stages(config, strategy)
    costs = _NO_TIME if machine is None else machine.costs(config.ranks, single=config.is_alone(strategy))
    link = None if config.link is None else Link.parse(config.link)
    largest, outside, pace = costs.largest, set[bool](), costs.pace.get(strategy, 1.0)
    unmeasured = set[str]()

    def of_operation(func: Any, args: tuple[Any, ...], result: Any) -> float:
        kind, size, seconds = priced(costs, func, args, result, pace)
        outside.add(size > largest[kind])
        unmeasured.update(kind for word, kind in UNMEASURED.items() if word in func.overloadpacket.__name__)
        return seconds

    def of_message(event: CollectiveEvent) -> Costs:
        outside.add(event.num_bytes > largest[MESSAGE])
        moves = costs.message(str(event.op), event.num_bytes)
        if link is None:
            return Costs(moves)
        # That all ranks have come they learn by a barrier, which takes as long as the shortest message.
        on_link = link.ring_time_us(event.op, event.num_bytes, event.group_size)
        return Costs(moves, on_link / 1e6, min(costs.messages["all_reduce"].seconds))

    def scratch(num_bytes: int, num_ranks: int) -> int:
        return (num_ranks - 1) * min(SEGMENT_BYTES, num_bytes // num_ranks) if config.transport == "gloo" else 0

    slows = costs.slows_compute, costs.slowed_by_compute
    wire = Wire(of_message, *slows, costs.meeting, emulated=link is not None, scratch_bytes=scratch)
    host = costs.host.get(strategy, 0.0) * config.accumulation * steered_by(config, strategy)
    records = dry_run(config, strategy, ToldClock(wire), of_operation, rank, host, traces_memory=traces_memory)
    peak_bytes = int(records.steps["peak_bytes"].max()) if traces_memory else 0
    return StepForecast(seconds_in(records.steps), peak_bytes, records, True in outside, frozenset(unmeasured))


def seconds_in(steps: pd.DataFrame) -> float:
    """Median seconds of the steps that count."""
    return float(step_lengths(steps).median()) / 1e6


def steered_by(config: CompareConfig, strategy: str) -> int:
    """How many things an engine's own code goes through in a step: units of FSDP, else parameters."""
    if (made := config.strategy(strategy)) is not None and made.by_unit:
        return len(wrapped_modules(config.on_meta, config.wrap_policy)) + 1
    return sum(1 for _ in config.on_meta.parameters())


def priced(
    costs: RankCosts, func: Any, args: tuple[Any, ...], result: Any, pace: float = 1.0
) -> tuple[int, float, float]:
    """Of an operation, by its overload, its arguments and its result: what kind it is, its size, and seconds."""
    kind, size, work = _work(costs, func, args, result)
    return kind, size, costs.floors[phase_of_autograd()] + work * pace


def _work(costs: RankCosts, func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, float, float]:
    packet = func.overloadpacket
    if "scaled_dot_product" in (name := packet.__name__):
        backward = "backward" in name
        query, key = [tensor for tensor in args if isinstance(tensor, Tensor)][backward : backward + 2]
        flops = 4.0 * query.numel() * key.size(-2) * (2.5 if backward else 1.0)
        return PRODUCT, flops, costs.product("attention_backward" if backward else "attention", flops)
    sizes = {id(tensor): tensor.nbytes for tensor in tensors_in((args, result))}
    # An operation in place reads and writes what it has.
    num_bytes = float(sum(sizes.values()))
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, out_val=result))
        seconds = costs.product(_form(packet.__name__, args), max(1.0, flops))
        return PRODUCT, flops, max(seconds, THIN * costs.operation("add", num_bytes))
    return OTHER, num_bytes, costs.operation(packet.__name__, num_bytes)


def _form(name: str, args: tuple[Any, ...]) -> str:
    left = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2), None)
    if name == "mm" and left is not None:
        return "weight" if left.stride(0) == 1 and left.size(1) > 1 else "input"
    return "forward"


def phase_of_autograd() -> str:
    """Forward, backward, or optimizer, where gradients are not recorded."""
    # Private: there is no public way to tell that a backward is under way in this thread.
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "optimizer"
