"""A learner's whole strategy on a rank: trained against one process, or weighed in one step of a small model.

Weighed are the messages of the strategy, without those that the engine sends for itself; what is held at rest, by role;
the most that is held at once; and the time on a virtual clock, on which each gradient takes ``GRADIENT_US`` and each
layer's forward ``FORWARD_US``, so that what was sent early hides behind them on every machine. What a rank holds is
exact, and differs between ranks by the step counters of Adam, 4 bytes for each piece that the rank steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh, CollectiveEvent
from shardlab.comm.mesh import Mesh
from shardlab.course.exercises.exercise import Measured, Message, VirtualClock
from shardlab.course.exercises.judge import MessageLog
from shardlab.course.exercises.weighing_block import too_much
from shardlab.engines import Engine, Strategy
from shardlab.testing.check import try_loops
from shardlab.testing.loops import LOOPS, OF_ENGINE
from shardlab.trace.memory_by_role import MemoryLedger, bytes_by_role
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import Role, class_of

WIDTHS = (6, 8, 8, 8, 2)
BUCKET_BYTES = 600
FORWARD_US, GRADIENT_US, LATENCY_US, BYTES_PER_US = 40, 40, 10, 8
TOLERANCE = 1e-10
NUM_LOOPS = 2  # a plain one; micro-batches inside no_sync(), clipped

Make = Callable[[], Strategy]


def model() -> nn.Sequential:
    """Four layers of float64."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for pair in pairwise(WIDTHS) for layer in (nn.Linear(*pair), nn.Tanh()))).double()


class _Timed(MessageLog):
    """Keeps the strategy's messages, and sends them on a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._ends_us: dict[int, float] = {}
        self._computed_us: dict[int, list[float]] = {}

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        if event.tag not in OF_ENGINE:
            super().issued(event)
            self._ends_us[id(event)] = self._clock.send(wire_bytes(event))
            self._computed_us[id(event)] = [self._clock.computed_us]

    def waited(self, event: CollectiveEvent) -> None:
        """The rank goes on when the message has ended."""
        self._computed_us.get(id(event), []).append(self._clock.computed_us)
        self._clock.wait(self._ends_us.pop(id(event), 0.0))

    def _message(self, event: CollectiveEvent, phase: str) -> Message:
        sent_us, *waited_us = self._computed_us[id(event)]
        return replace(super()._message(event, phase), computed_us=(sent_us, next(iter(waited_us), sent_us)))


def not_a_strategy(make: Make) -> str:
    """What is wrong with the learner's class, or what stands in its place; empty if it makes a strategy."""
    made: object = make()
    return (
        "" if isinstance(made, Strategy) else f"it is no strategy, but {class_of(made)}; write a subclass of Strategy"
    )


def train(make: Make, mesh: Mesh, name: str) -> Measured:
    """What differs first from one process, of a model by its name."""
    found = try_loops(mesh, make, name, TOLERANCE, Path(), LOOPS[:NUM_LOOPS])
    for loop, of_loop in zip(LOOPS, found, strict=False):
        for said in of_loop:
            if said.failure:
                return Measured(None, fault=f"{loop.name}: {said.failure}")
    return Measured(None)


def weigh(make: Make, mesh: BaseMesh, most_at_rest: Mapping[str, int], largest: float) -> Measured:
    """One step, the second: the optimizer's state is there.

    Args:
        make: returns a new strategy.
        mesh: of the ranks.
        most_at_rest: bytes by role that may be held when the optimizer has stepped; of gathered parameters those that
            may be while a layer computes.
        largest: bytes that a message may have.
    """
    module, clock, gathered = model(), VirtualClock(LATENCY_US, BYTES_PER_US), [0]

    def computed(*_: object) -> None:
        storages = (param.untyped_storage() for param in module.parameters())
        gathered.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))

    def came(_: Tensor) -> None:
        clock.compute(GRADIENT_US)
        computed()

    for layer in (each for each in module if isinstance(each, nn.Linear)):
        layer.register_forward_pre_hook(lambda *_: clock.compute(FORWARD_US))
        layer.register_forward_hook(computed)
        for param in layer.parameters():  # before the engine's own hooks: the gradient comes, and then it may travel
            param.register_post_accumulate_grad_hook(came)
    strategy = make()
    if hasattr(strategy, "bucket_bytes"):
        strategy.bucket_bytes = BUCKET_BYTES
    log = _Timed(clock)
    with Engine(module, partial(torch.optim.Adam, lr=0.01), mesh, strategy) as engine:
        _backward(engine, log)
        factor, keeps_own = (_factor(engine, ranks) for ranks in (range(engine.num_data_ranks), [engine.data_rank]))
        engine.step()
        engine.optimizer.register_step_post_hook(lambda *_: setattr(log, "phase", "step"))
        clock.now_us = 0.0
        clock.spans.clear()
        gathered.clear()
        with mesh.observed_by(log), MemoryLedger(engine.live_tensors()) as ledger:
            before = len(ledger.held_bytes())
            _backward(engine, log)
            engine.step()
        held = {**bytes_by_role(engine.live_tensors()), Role.GATHERED_PARAMETER: max(gathered)}
    large = [message.num_bytes for message in log.messages if message.num_bytes > largest]
    faults = [f"a message of {size} B, and {largest} B are allowed" for size in large] + too_much(held, most_at_rest)
    moments = tuple(ledger.held_bytes()[before - 1 :])
    fault = next(iter(faults), "")
    return Measured(
        None, max(moments), clock.now_us, tuple(log.messages), fault, moments, tuple(clock.spans), held, factor,
        bool(keeps_own),
    )  # fmt: skip


def _backward(engine: Engine, log: MessageLog) -> None:
    """Gradients of the step before are dropped first, so that those of this one are there at its end."""
    engine.zero_grad()
    log.phase = "forward"
    loss = _loss(engine, engine.data_rank)
    log.phase = "backward"
    engine.backward(loss)


def _loss(module: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    rows = torch.linspace(-1, 1, 4 * WIDTHS[0], dtype=torch.float64).view(4, -1) + rank
    return module(rows).square().mean()


def _factor(engine: Engine, ranks: Sequence[int]) -> float:
    """What the first means of an engine are, as a multiple of the gradient on the rows of ranks; 0 if they are none."""
    alone, stepped = model(), engine.step_tensors()
    torch.stack([_loss(alone, rank) for rank in ranks]).mean().backward()
    found, wanted = [], []
    for name, (start, stop) in engine.owned().items():
        gradient = stepped.by_name(name).grad
        wanted.append(alone.get_parameter(name).grad.flatten()[start:stop])  # type: ignore[union-attr]
        found.append(torch.zeros_like(wanted[-1]) if gradient is None else gradient.flatten())
    one, other = (torch.cat([*parts, torch.zeros(1)]).double() for parts in (found, wanted))
    factor = float(one @ other / (other @ other))
    return round(factor, 9) if torch.allclose(one, factor * other) else 0.0
