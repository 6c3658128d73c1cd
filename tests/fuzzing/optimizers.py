"""Optimizers, said in plain data: torch's, and a user's own of which some look at more than one element."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEFT_OUT = "leave.bias"
WHOLE = ("normalised", "centred", "clipped")
"""Kinds that look at whole tensors, at rows, and at the whole model."""


class Averaged(torch.optim.Optimizer):
    """A user's own, element by element: an average of gradients, whose weight grows with a counter."""

    shardlab_looks_at = "element"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                average = state.setdefault("average", torch.zeros_like(param))
                average.lerp_(self.direction(param.grad), 1.0 / (1.0 + state["count"]))
                param.sub_(group["lr"] * (average + group["weight_decay"] * param))

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient


class Normalised(Averaged):
    """Gradients divided by the norm of their tensor."""

    shardlab_looks_at = "tensor"

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient / (0.1 + gradient.norm())


class Centred(Averaged):
    """Gradients without the mean of their row."""

    shardlab_looks_at = "tensor"

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True) if gradient.dim() > 1 else gradient


class Clipped(Averaged):
    """Gradients divided by the norm of them all."""

    shardlab_looks_at = "model"

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if params:
            self.scale = 1.0 / (1.0 + torch.stack([param.grad.norm() for param in params]).norm())
        super().step()

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale


TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
OWN = {"averaged": Averaged, "normalised": Normalised, "centred": Centred, "clipped": Clipped}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that forgives neither a gradient off by a factor nor one that is 0 instead of None."""

    kind: str = "sgd"  # 'sgd' (with momentum and weight decay), 'adam' or 'adamw' (with a large eps), or of ``OWN``
    groups: bool = False  # biases have a group of their own
    left_out: bool = False  # the last layer's bias is in no group, until ``AddGroup``
    # 'adam' and 'adamw' by kernels that write without raising autograd's versions. (Torch's fused SGD raises a
    # TypeError where a parameter has its first gradient later than others.)
    fused: bool = False
    derived: bool = False  # of a class of the user's, whose step may do more at its end, see ``ends_with``

    def build(self, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        named = [(name, tensor) for name, tensor in named if not (self.left_out and name == LEFT_OUT)]
        if not self.groups:
            return self._over([{"params": [tensor for _, tensor in named]}])
        biases = [tensor for name, tensor in named if name.endswith("bias")]
        others = [tensor for name, tensor in named if not name.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
        return self._over([group for group in groups if group["params"]])

    def _over(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made: type[torch.optim.Optimizer] = (OWN | TORCHS)[self.kind]
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1} if self.kind in TORCHS else {}
        if self.kind in TORCHS:
            options |= {"momentum": 0.9} if self.kind == "sgd" else {"eps": 0.1, "fused": self.fused}
        return (_derived_from(made) if self.derived else made)(groups, **options)


@cache
def _derived_from(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A class as users derive it; torch runs hooks at the end of its step and of that of ``kind``."""

    class Derived(kind):  # type: ignore[misc, valid-type]
        shardlab_looks_at = getattr(kind, "shardlab_looks_at", "element")
        at_the_end: Callable[[], object] | None = None

        def step(self, *args: Any) -> None:
            super().step(*args)
            if self.at_the_end is not None:
                self.at_the_end()

    return Derived


@contextlib.contextmanager
def ends_with(optimizer: torch.optim.Optimizer, do: Callable[[], object]) -> Iterator[None]:
    """Inside, the step of a derived optimizer calls ``do`` behind its update."""
    optimizer.at_the_end = do  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.at_the_end = None  # type: ignore[attr-defined]
