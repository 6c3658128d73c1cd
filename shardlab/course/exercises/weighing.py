"""A learner's whole strategy or block on a rank: trained against one process, or weighed in one step of a small model.

Weighed are the messages of the strategy, without those that the engine sends for itself; what is held at rest, by role;
the most that is held at once; and the time on a virtual clock, on which each gradient takes ``GRADIENT_US`` and each
layer's forward ``FORWARD_US``, so that what was sent early hides behind them on every machine. What a rank holds is
exact, and differs between ranks by the step counters of Adam, 4 bytes for each piece that the rank steps.

Of a tensor-parallel block two stand one behind the other, each added to its input. Whatever was allocated since the
whole blocks were built counts: also a whole block that is still referred to, a view that keeps a whole storage alive,
activations of an earlier step.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh, CollectiveEvent, Communicator
from shardlab.comm.mesh import Mesh
from shardlab.course.exercises.exercise import Measured, Message, VirtualClock
from shardlab.course.exercises.judge import MessageLog
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


NUM_BLOCKS, WIDTH, INNER, ROWS, STEPS = 2, 6, 12, 4, 3

MakeBlock = Callable[[nn.Sequential, Communicator], nn.Module]


class _Stack(nn.Module):
    """Blocks of float64, each added to its input; x and output: (rows, WIDTH)."""

    def __init__(self, make: Callable[[nn.Sequential], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = [nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(NUM_BLOCKS)]
        self.blocks = nn.ModuleList(make(block.double()) for block in whole)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(make: Callable[[nn.Sequential], nn.Module]) -> dict[str, Tensor]:
    """Of three steps: the first output, the first gradient of x, and the output afterwards; all (ROWS, WIDTH).

    Args:
        make: a block from a whole one, which it may return.
    """
    stack, x = _Stack(make), _rows()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1, momentum=0.9)  # unlike Adam, it forgives no factor
    first, gradient = x.detach(), x.detach()
    for step in range(STEPS):
        optimizer.zero_grad()
        output = stack(x)
        output.square().mean().backward()
        if step == 0:
            assert x.grad is not None
            first, gradient = output.detach(), x.grad.clone()
        optimizer.step()
    return {"output": first, "gradient of x": gradient, "output after 3 steps": stack(x).detach()}


def tried_block(make: MakeBlock, mesh: BaseMesh, most_at_rest: Mapping[str, int]) -> Measured:
    """Train the blocks of this rank, or weigh them within limits.

    Args:
        make: the learner's; gets a whole block and the tensor axis.
        mesh: with the axis ``tensor``.
        most_at_rest: bytes by role that may be held between steps; empty to train.
    """
    comm = mesh["tensor"]
    example: object = make(nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)).double(), comm)
    if not isinstance(example, nn.Module):
        return Measured(None, fault=f"it is no module, but {class_of(example)}; write a subclass of nn.Module")
    del example
    if not most_at_rest:
        return Measured(trained(lambda block: make(block, comm)))
    log = MessageLog()
    with MemoryLedger({}) as ledger:
        stack = _Stack(lambda block: make(block, comm))
        optimizer = torch.optim.Adam(stack.parameters(), lr=0.01)
        _step(stack, optimizer, log)  # the optimizer's state is there
        gc.collect()
        before = len(ledger.held_bytes())
        with mesh.observed_by(log):
            _step(stack, optimizer, log)
        gc.collect()
    params = list(stack.parameters())
    state = [each for param in params for each in optimizer.state[param].values() if each.dim()]
    grads = [param.grad for param in params if param.grad is not None]
    ledger.classify({Role.PARAMETER: params, Role.GRADIENT: grads, Role.OPTIMIZER_STATE: state})
    held = ledger.held_bytes()[before - 1 :]
    at_rest = ledger.moments()[-1].by_role
    fault = next(iter(too_much(at_rest, most_at_rest)), "")
    return Measured(None, max(held), counted=tuple(log.messages), fault=fault, held=tuple(held), at_rest=at_rest)


def too_much(held: Mapping[Role, int], most_at_rest: Mapping[str, int]) -> list[str]:
    """A sentence for each role of which more is held than is enough."""
    when = {str(Role.GATHERED_PARAMETER): "at once"}
    return [
        f"{role.replace('_', ' ')} of {held.get(Role(role), 0)} B {when.get(role, 'at rest')}, and {most} B are enough"
        for role, most in most_at_rest.items()
        if held.get(Role(role), 0) > most
    ]


def _rows() -> Tensor:
    """The same on all ranks of the axis."""
    return torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).requires_grad_()


def _step(stack: nn.Module, optimizer: torch.optim.Optimizer, log: MessageLog) -> None:
    optimizer.zero_grad()
    log.phase = "forward"
    loss = stack(_rows()).square().mean()
    log.phase = "backward"
    loss.backward()
    del loss
    optimizer.step()
