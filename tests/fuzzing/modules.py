"""Small modules, said in plain data so that they can be generated, shrunk and printed.

Legend: I = 3 features of a row, W the width, V = 5 outputs (and rows of the embedding), B rows of a rank. All float64.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlab.launch import current

FEATURES, OUTPUTS = 3, 5

ALIKE_KINDS = (
    *("linear", "norm", "scale", "few", "transposed", "nested", "inplace", "dict", "counter", "running", "batchnorm"),
    *("overwrite", "mlp"),
)
"""What every rank computes alike; 'overwrite' writes over what autograd has saved, which autograd refuses."""
BRANCH_KINDS = ("branch", "sometimes")
"""What a rank computes depends on its rows."""
CHECKPOINTS = ("none", "whole", "whole reentrant", "inside", "inside reentrant")
OUTPUT_KINDS = ("tensor", "dict", "tuple", "dataclass")


class Planted(ArithmeticError):  # noqa: N818 - the user's own
    """Raised in the middle of a forward or a backward, where the user's code would fail."""


@dataclass(frozen=True)
class BlockSpec:
    """One block."""

    kind: str = "linear"  # of ``ALIKE_KINDS`` or ``BRANCH_KINDS``
    checkpoint: str = "none"  # activation checkpointing of the whole block, by its caller, or of its inside, by itself
    frozen: bool = False  # whether its parameters do not train


@dataclass(frozen=True)
class ModuleSpec:
    """A module of blocks between two layers."""

    width: int = 4  # of the blocks
    blocks: tuple[BlockSpec, ...] = ()  # each is there once
    path: tuple[int, ...] = ()  # the blocks in the order in which they are called; one may be called twice, or never
    enter: str = "linear"  # the first layer, 'linear' or 'embedding'
    tied: str = "none"  # 'none', 'blocks' (all blocks have one weight) or 'ends' (the embedding and the last layer)
    shared: bool = False  # the first block has a second place in the module, which is called last
    spare: bool = False  # there is a layer that no rank uses
    frozen_enter: bool = False  # the first layer does not train
    output: str = "tensor"  # what the module returns, see ``OUTPUT_KINDS``


@dataclass
class Output:
    """What a module returns whose ``output`` is 'dataclass'."""

    y: Tensor
    note: str = "a note"


class Raises(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Planted("in backward")


class Block(nn.Module):
    """What it computes is said by its kind."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.inner = nn.Linear(width, width)
        if spec.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif spec.kind == "batchnorm":
            # A large eps: of rows that happen to be equal two layers with torch's 1e-5 make 1e-15 into 1e-10.
            self.norm = nn.BatchNorm1d(width, eps=0.1)
        elif spec.kind == "scale":
            self.scale = nn.Parameter(torch.tensor(1.5))
        elif spec.kind == "few":
            self.row = nn.Parameter(torch.ones(1, width))
        elif spec.kind == "transposed":
            self.weight = nn.Parameter(torch.randn(width, width).t())
        elif spec.kind == "nested":
            self.blocks = nn.ModuleList([Block(BlockSpec(), width), Block(BlockSpec("scale"), width)])
        elif spec.kind == "mlp":
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        elif spec.kind in BRANCH_KINDS:
            self.other = nn.Linear(width, width)
        elif spec.kind == "counter":
            self.register_buffer("count", torch.zeros(()))
        elif spec.kind == "running":
            self.register_buffer("mean", torch.randn(width))  # another on each rank, before the engine
        self.requires_grad_(not spec.frozen)

    def forward(self, x: Tensor) -> Any:
        if self.spec.checkpoint.startswith("inside"):
            y = checkpoint(self._compute, x, use_reentrant="reentrant" in self.spec.checkpoint)
        else:
            y = self._compute(x)
        return {"x": x + y} if self.spec.kind == "dict" else x + y

    def _compute(self, x: Tensor) -> Tensor:
        return COMPUTE.get(self.spec.kind, COMPUTE["linear"])(self, x)


def _says(x: Tensor) -> bool:
    """What the rows of a rank say to a branch."""
    return float(x.detach()[0, 0]) > 0


def _nested(block: Block, x: Tensor) -> Tensor:
    for inner in block.blocks:
        x = inner(x)
    return torch.tanh(block.inner(x))


def _sometimes(block: Block, x: Tensor) -> Tensor:
    y = torch.tanh(block.inner(x))
    return y + block.other(y) if _says(x) else y


def _overwrite(block: Block, x: Tensor) -> Tensor:
    y = torch.tanh(block.inner(x))
    z = y * 2.0
    y.mul_(0.5)  # tanh has saved y
    return z


def _counter(block: Block, x: Tensor) -> Tensor:
    block.count += 1
    return torch.tanh(block.inner(x)) / block.count.clone()


def _running(block: Block, x: Tensor) -> Tensor:
    if block.training:
        with torch.no_grad():
            block.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return torch.tanh(block.inner(x)) + block.mean.clone()


COMPUTE: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "linear": lambda block, x: torch.tanh(block.inner(x)),
    "norm": lambda block, x: torch.tanh(block.inner(block.norm(x))),
    "batchnorm": lambda block, x: torch.tanh(block.inner(block.norm(x))),
    "scale": lambda block, x: torch.tanh(block.inner(x)) * block.scale,
    "few": lambda block, x: torch.tanh(block.inner(x)) * block.row,
    "transposed": lambda block, x: torch.tanh(block.inner(x) @ block.weight),
    "mlp": lambda block, x: torch.tanh(block.inner(block.down(torch.tanh(block.up(x))))),
    "branch": lambda block, x: torch.tanh(block.inner(x) if _says(x) else block.other(x)),
    "inplace": lambda block, x: block.inner(x).add_(1.0).tanh_(),
    "nested": _nested,
    "sometimes": _sometimes,
    "overwrite": _overwrite,
    "counter": _counter,
    "running": _running,
}


class Model(nn.Module):
    """See ``ModuleSpec``."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__()
        self.spec = spec
        embeds = spec.enter == "embedding"
        self.enter = nn.Embedding(OUTPUTS, spec.width) if embeds else nn.Linear(FEATURES, spec.width)
        self.enter.requires_grad_(not spec.frozen_enter)
        self.blocks = nn.ModuleList([Block(block, spec.width) for block in spec.blocks])
        self.leave = nn.Linear(spec.width, OUTPUTS)
        if spec.spare:
            self.spare = nn.Linear(2, spec.width)
        if spec.tied == "ends" and embeds:
            self.leave.weight = self.enter.weight
        elif spec.tied == "blocks" and spec.blocks:
            for block in self.blocks:
                block.inner.weight = self.blocks[0].inner.weight
        if spec.shared and spec.blocks:
            self.blocks.append(self.blocks[0])

    def forward(self, x: Tensor, depth: int | None = None, fault: str = "none") -> Any:
        h = self.enter((x[:, 0].abs() * 7).long() % OUTPUTS) if self.spec.enter == "embedding" else self.enter(x)
        path = [*self.spec.path, *([len(self.spec.blocks)] if self.spec.shared and self.spec.blocks else ())][:depth]
        for place, index in enumerate(path):
            h = self._call(self.blocks[index], h)
            if place == len(path) // 2:
                h = _fail(h, fault)
        y = self.leave(h if path else _fail(h, fault))
        kinds = {"dict": {"y": y, "hidden": [h]}, "tuple": (y, None, h * 2), "dataclass": Output(y)}
        return kinds.get(self.spec.output, y)

    def _call(self, block: Block, h: Tensor) -> Tensor:
        if block.spec.checkpoint.startswith("whole"):
            h = checkpoint(block, h, use_reentrant="reentrant" in block.spec.checkpoint)
        else:
            h = block(h)
        return h["x"] if isinstance(h, dict) else h


def _fail(h: Tensor, fault: str) -> Tensor:
    if fault == "forward":
        raise Planted("in forward")
    return Raises.apply(h) if fault == "backward" and h.requires_grad else h


def prediction(output: Any) -> Tensor:
    if isinstance(output, Output):
        return output.y
    if isinstance(output, dict):
        return output["y"]
    return output[0] if isinstance(output, tuple) else output


def build(spec: ModuleSpec, seed: int = 0) -> Model:
    with seeded(seed):
        return Model(spec).double().to(current().device)


def replicas(models: list[Model], number: int) -> list[Model]:
    """The module once for each rank: the parameters are the first's, the same objects, the buffers each rank's own."""
    training = models[0].training
    models = models[:number] + [build(models[0].spec).train(training) for _ in range(number - len(models))]
    for model in models[1:]:
        for own, first in zip(model.modules(), models[0].modules(), strict=True):
            own._parameters = first._parameters
    return models


def rows(seed: int, rank: int, num_rows: int = 2) -> tuple[Tensor, Tensor]:
    """A rank's rows, [B, I], and what the module is to say of them, [B, V]."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x, y = (
        torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(current().device)
        for width in (FEATURES, OUTPUTS)
    )
    return x, y


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
