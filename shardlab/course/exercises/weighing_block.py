"""A learner's tensor-parallel block on a rank: compared with the whole block, or weighed in one step.

Two blocks stand one behind the other, each added to its input. Weighed are their messages, what is held at rest, by
role, and the most that is held at once. Whatever was allocated since the whole blocks were built counts: also a whole
block that is still referred to, a view that keeps a whole storage alive, activations of an earlier step.
"""

import gc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardlab.comm import BaseMesh, Communicator
from shardlab.course.exercises.exercise import Measured
from shardlab.course.exercises.judge import MessageLog
from shardlab.trace.memory_by_role import MemoryLedger
from shardlab.vocabulary import Role, class_of

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
