"""ZeRO-3 and FSDP made of the learner's parts: the learner's forward runs backward, too, through the units reversed.

A unit is used in backward by computing it again from its input, as activation checkpointing does: so nothing of its
weights stays from forward, and the learner's ``gather``, ``use``, ``free`` is the whole schedule of both directions.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import Communicator
from shardlab.exercises.assembled.engines import Assembled, Batch, Parts, gradient_of, with_gradients
from shardlab.exercises.assembled.layers import layers_of
from shardlab.exercises.assembled.pieces import Flat, Pieces
from shardlab.models import next_token_loss

PREFETCH = 1
BUDGET = 2.5  # times the largest layer: room for a unit of more than one


class Unit:
    """Some neighbouring layers, of which each rank holds its ranges.

    Attributes:
        shards: this rank's ranges; their gradients are there after backward.
        gathered_bytes: of the weights while they are gathered, else 0.
    """

    def __init__(self, parts: Parts, comm: Communicator, layers: Sequence[nn.Module]) -> None:
        self.module = nn.Sequential(*layers)
        params = {name: param.detach() for name, param in self.module.named_parameters()}
        self.shapes = {name: param.shape for name, param in params.items()}
        self._whole_bytes = sum(param.nbytes for param in params.values())
        self.pieces = Pieces({name: param.numel() for name, param in params.items()}, parts["zero1_owners"], comm)
        self.shards = self.pieces.own(params)
        self.module.to_empty(device="meta")  # from here on no rank holds the whole
        self.gathered_bytes = 0
        self._finish: Callable[[], Flat] | None = None
        self._input = torch.empty(0)

    def gather(self) -> None:
        """Start to gather the weights."""
        self._finish = self.pieces.start_gather(self.shards)
        self.gathered_bytes = self._whole_bytes

    def free(self) -> None:
        """Give them up."""
        self._finish, self.gathered_bytes = None, 0

    def forward(self, x: Tensor) -> Tensor:
        """The output, without a graph; the input is kept."""
        self._input = x
        with torch.no_grad():
            return self._call(self._weights(), x)

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient of the input; those of the weights are reduced."""
        weights = {name: value.requires_grad_() for name, value in self._weights().items()}
        x = self._input.detach()
        if x.is_floating_point():
            x.requires_grad_()
        self._call(weights, x).backward(grad)
        means = self.pieces.reduce({name: gradient_of(value) for name, value in weights.items()})
        for name, shard in self.shards.items():
            shard.grad = means[name]
        return grad if x.grad is None else x.grad

    def _weights(self) -> Flat:
        if self._finish is None:
            raise RuntimeError("zero3_forward: a unit is used, but it is not gathered")
        return {name: value.view(self.shapes[name]) for name, value in self._finish().items()}

    def _call(self, weights: Flat, x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self.module, weights, (x,))
        return found


class Used:
    """A unit as the learner's ``zero3_forward`` sees it, in one of the two directions."""

    def __init__(self, unit: Unit, use: Callable[[Tensor], Tensor], note: Callable[[], None]) -> None:
        self._unit, self._note, self.use = unit, note, use

    def gather(self) -> None:
        """See ``Unit.gather``."""
        self._unit.gather()
        self._note()

    def free(self) -> None:
        """See ``Unit.free``."""
        self._unit.free()


class ZeRO3OfParts(Assembled):
    """Every layer is a unit."""

    name: ClassVar[str] = "zero3"
    needs: ClassVar[tuple[str, ...]] = ("zero1_owners", "clip_global_norm", "zero3_forward")

    def __init__(self, parts: Parts, comm: Communicator, model: nn.Module) -> None:
        super().__init__(parts, comm, model)
        layers = layers_of(model)
        sizes = [sum(param.nbytes for param in layer.parameters()) for layer in layers]
        self.units = [Unit(parts, comm, [layers[index] for index in unit]) for unit in self.choose(sizes)]
        self.peak_gathered_bytes = 0

    def choose(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """The layers of each unit, from the bytes of all layers."""
        return [[index] for index in range(len(sizes))]

    @override
    def stepped(self) -> Sequence[Tensor]:
        """The ranges of all units."""
        return [shard for unit in self.units for shard in unit.shards.values()]

    @override
    def backward(self, batch: Batch) -> float:
        """Run the learner's forward through the units, then again through the reversed units for backward."""
        tokens, targets = batch
        forward = self.parts["zero3_forward"]
        logits = forward([self._used(unit, unit.forward) for unit in self.units], tokens).requires_grad_()
        loss = next_token_loss(logits, targets)
        loss.backward()
        forward([self._used(unit, unit.backward) for unit in reversed(self.units)], logits.grad)
        return loss.item()

    @override
    def norm(self, gradients: Sequence[Tensor]) -> Any:
        """Over the shards of all ranks."""
        return self.parts["clip_global_norm"](self.comm, list(gradients), 2.0)

    @override
    def held(self) -> list[Tensor]:
        """The shards and their gradients."""
        return with_gradients(self.stepped())

    def _used(self, unit: Unit, use: Callable[[Tensor], Tensor]) -> Used:
        return Used(unit, use, self._note)

    def _note(self) -> None:
        gathered = sum(unit.gathered_bytes for unit in self.units)
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, gathered)


class FSDPOfParts(ZeRO3OfParts):
    """The learner's units, within a budget for what is gathered at once."""

    name = "fsdp"
    needs = (*ZeRO3OfParts.needs, "fsdp_units")

    @override
    def choose(self, sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """The learner's."""
        chosen: Sequence[Sequence[int]] = self.parts["fsdp_units"](list(sizes), int(BUDGET * max(sizes)), PREFETCH)
        return chosen
