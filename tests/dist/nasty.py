"""Modules and training loops that break careless engines, and the one process that each must equal.

Legend: R ranks, each with ``ROWS_PER_RANK`` rows of the global batch and a random seed of its own. All is float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlab.engines import Engine
from tests.dist import cases
from tests.dist.every_engine import step_on

STEPS = 2


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Blocks between two layers; what is nasty is said by the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leave = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.leave(self.blocks[1](self.blocks[0](self.enter(x))))


class Deep(nn.Module):
    """Blocks, of which a forward may use fewer."""

    def __init__(self, num_blocks=3):
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.leave = nn.Linear(8, 5)

    def forward(self, x, depth=None):
        x = self.enter(x)
        for block in list(self.blocks)[:depth]:
            x = block(x)
        return self.leave(x)


class FewRows(nn.Module):
    """Fewer rows than ranks, in a weight that has more than one element a row."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(7, 2)
        self.wide = nn.Linear(2, 5)
        self.one = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.narrow(x))) * self.one


class BlockOfNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class NoElements(Stack):
    """Parameters without elements, as a prompt of length 0 is: one beside others, and one alone in its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.empty(0, 8))
        self.blocks.append(BlockOfNothing())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.prompt, self.enter(x)])
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class UsedTwice(Stack):
    """A block is called twice in one forward, another between."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return self.leave(first(second(first(self.enter(x)))))


class FrozenBlocks(Stack):
    """A whole block is frozen: the first, which backward never reaches, or one that it must pass through."""

    frozen: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(False)


class FrozenFirst(FrozenBlocks):
    frozen = ("enter", "blocks.0")


class FrozenMiddle(FrozenBlocks):
    frozen = ("blocks.1",)


class Checkpointed(Stack):
    """Activation checkpointing of blocks with dropout, which must draw the same mask again."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(lambda value, block=block: self.drop(block(value)), x, use_reentrant=self.reentrant)
        return self.leave(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class EveryPartReentrant(nn.Module):
    """No parameter is in the graph that forward leaves: each comes in a backward inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 8), Block(), nn.Linear(8, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class WholeReentrant(CheckpointedReentrant):
    """The model inside one such checkpoint, and its blocks inside others."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=True)


class ParametersInContainers(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(7, 3), torch.randn(3)])
        self.named = nn.ParameterDict({"out": torch.randn(3, 5)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.listed[0] + self.listed[1]) @ self.named["out"]


class Dict(Stack):
    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.enter(x)
        return {"hidden": [hidden], "y": super().forward(x), "note": "not a tensor"}


class Tuple(Stack):
    """The last of the tuple is never used in the loss."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        hidden = self.blocks[0](self.enter(x))
        return self.leave(hidden), None, self.blocks[1](hidden)


@dataclass
class Output:
    parts: dict[str, Tensor]
    note: str


class Dataclass(Stack):
    def forward(self, x: Tensor) -> Output:
        return Output({"y": super().forward(x)}, "a note")


class BlocksReturnDicts(Stack):
    """Not only the model: its units too give something other than a tensor."""

    class DictBlock(Block):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": super().forward(x)}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.DictBlock(), self.DictBlock()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)["x"]
        return self.leave(x)


@dataclass(frozen=True)
class Case:
    """A module, and how it is used.

    Attributes:
        prediction: finds the prediction in the module's output.
        num_forwards: before the one backward.
        looks: whether a forward without gradients stands between forward and backward.
    """

    model: type[nn.Module]
    prediction: Callable[[Any], Tensor] = lambda output: output
    num_forwards: int = 1
    looks: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        return cases.seeded(self.model, seed).double()

    def loss(self, model: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> Tensor:
        outputs = [model(x * number) for number in range(1, self.num_forwards + 1)]
        if self.looks:
            with torch.no_grad():
                model(x)
        return torch.stack([nn.functional.mse_loss(self.prediction(output), y) for output in outputs]).sum()


# Those of ``cases.MODELS`` are trained by parity.
CASES: dict[str, Case] = {
    "frozen first block": Case(FrozenFirst),
    "frozen middle block": Case(FrozenMiddle),
    "fewer rows than ranks": Case(FewRows),
    "parameters in containers": Case(ParametersInContainers),
    "no elements": Case(NoElements),
    "used twice": Case(UsedTwice),
    "two forwards": Case(Stack, num_forwards=2),
    "two forwards of a block used twice": Case(UsedTwice, num_forwards=2),
    "evaluated between forward and backward": Case(Stack, looks=True),
    "checkpointed with dropout": Case(Checkpointed),
    "checkpointed, reentrant": Case(CheckpointedReentrant),
    "every part checkpointed, reentrant": Case(EveryPartReentrant),
    "checkpoints in a checkpoint, reentrant": Case(WholeReentrant),
    "two forwards, checkpointed": Case(Checkpointed, num_forwards=2),
    "dict": Case(Dict, lambda output: output["y"]),
    "tuple": Case(Tuple, lambda output: output[0]),
    "dataclass": Case(Dataclass, lambda output: output.parts["y"]),
    "blocks return dicts": Case(BlocksReturnDicts),
}


def optimizer(tensors: Any) -> torch.optim.Optimizer:
    """It forgives neither a gradient off by a factor nor one that is 0 where nobody used the parameter."""
    return torch.optim.SGD(tensors, lr=0.05, momentum=0.9, weight_decay=0.1)


def start(rank: int, num_ranks: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows; its random generator is set."""
    torch.manual_seed(100 * step + rank)
    x, y = cases.rows("MLP", step, 0, num_ranks)
    return cases.own_rows(x, rank), cases.own_rows(y, rank)


def train(case: Case, engine: Engine) -> dict[str, Tensor]:
    """The state after ``STEPS`` steps on this rank."""
    for step in range(STEPS):
        x, y = start(engine.data_rank, engine.num_data_ranks, step)
        step_on(engine, case.loss(engine, x, y))
    return engine.full_state_dict()


@cache
def reference(name: str, num_ranks: int) -> dict[str, Tensor]:
    """The state after the same steps by plain torch: the mean of the ranks' losses, one rank's rows after another's."""
    case = CASES[name]
    model = case.build()
    optim = optimizer(list(model.parameters()))
    for step in range(STEPS):
        for rank in range(num_ranks):
            x, y = start(rank, num_ranks, step)
            (case.loss(model, x, y) / num_ranks).backward()
        optim.step()
        optim.zero_grad()
    return model.state_dict()
