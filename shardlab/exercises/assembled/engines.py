"""Data parallel and ZeRO-1 made of the learner's parts; what is not a part here is the least that holds them together.

``Assembled`` is one training step. What differs is where gradients come from, and what this rank steps.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import Communicator
from shardlab.exercises.assembled.layers import InThreeLayers
from shardlab.exercises.assembled.pieces import Pieces
from shardlab.exercises.exercise import Function
from shardlab.models import next_token

Parts = Mapping[str, Function]
Batch = tuple[Tensor, Tensor]
MAX_NORM = 1.0
BUCKET_BYTES = 100_000
SMALL = 1e-6  # added to the norm before dividing by it, as torch's clip_grad_norm_ does


class Assembled(ABC):
    """A strategy on one rank.

    Args:
        parts: the learner's functions by name.
        comm: the data axis.
        model: the small GPT, equal on all ranks.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    def __init__(self, parts: Parts, comm: Communicator, model: nn.Module) -> None:
        self.parts, self.comm, self.model = parts, comm, model

    def start(self, optimizer: Any) -> None:
        """Make the optimizer of what this rank steps."""
        self.optimizer: torch.optim.Optimizer = optimizer(self.stepped())

    def step(self, batch: Batch) -> float:
        """One step on this rank's rows; the mean loss over them."""
        loss = self.backward(batch)
        gradients = [param.grad for param in self.stepped() if param.grad is not None]
        norm = float(self.norm(gradients))
        for gradient in gradients:
            gradient *= min(1.0, MAX_NORM / (norm + SMALL))
        self.optimizer.step()
        return loss

    @abstractmethod
    def stepped(self) -> Sequence[Tensor]:
        """What this rank steps, each with its gradient after ``backward``."""

    @abstractmethod
    def backward(self, batch: Batch) -> float:
        """Forward and backward; the gradients in the end are means over all ranks."""

    def norm(self, gradients: Sequence[Tensor]) -> Any:
        """Of all gradients; here every rank has all of them."""
        return torch.nn.utils.get_total_norm(gradients)

    def rest_bytes(self) -> int:
        """Parameters, gradients and optimizer state between two steps, without the optimizer's counters."""
        state = [value for of_one in self.optimizer.state.values() for value in of_one.values()]
        held = [*self.held(), *(value for value in state if isinstance(value, Tensor) and value.dim())]
        storages = (tensor.untyped_storage() for tensor in held)  # each counts once
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def held(self) -> list[Tensor]:
        """Parameters and gradients between two steps."""
        return with_gradients(self.model.parameters())


class Whole(Assembled):
    """Every rank has and steps everything."""

    @override
    def stepped(self) -> Sequence[Tensor]:
        """All parameters."""
        return list(self.model.parameters())


class HookedDataParallel(Whole):
    """One message for each parameter, from the learner's hooks."""

    name, needs = "ddp", ("data_parallel_hooks",)

    @override
    def backward(self, batch: Batch) -> float:
        """Run the learner's hooks on a copy of the model: they serve one step only, and cannot be removed."""
        self.optimizer.zero_grad()
        replica = copy.deepcopy(self.model)
        layers = InThreeLayers(replica)
        finish = self.parts["data_parallel_hooks"](self.comm, layers, 1)
        loss = next_token(layers, batch)
        loss.backward()
        finish()
        for param, copied in zip(self.model.parameters(), replica.parameters(), strict=True):
            param.grad = copied.grad
        return loss.item()


class BucketedDataParallel(Whole):
    """Gradients travel in the learner's buckets, around the learner's ring."""

    name, needs = "bucketed", ("buckets_assign", "collectives_ring_all_reduce")

    @override
    def backward(self, batch: Batch) -> float:
        """Bucket by bucket, in the order in which backward fills them."""
        self.optimizer.zero_grad()
        loss = next_token(self.model, batch)
        loss.backward()
        params = list(self.model.parameters())
        for bucket in self.parts["buckets_assign"]([param.nbytes for param in params], BUCKET_BYTES):
            gradients = [gradient_of(params[index]) for index in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.parts["collectives_ring_all_reduce"](self.comm, flat)
            means = (flat / self.comm.num_ranks).split([gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        return loss.item()


class ZeRO1OfParts(Assembled):
    """Every rank steps the ranges that the learner's owner map gives it; parameters come back after the step."""

    name, needs = "zero1", ("zero1_owners", "clip_global_norm")

    def __init__(self, parts: Parts, comm: Communicator, model: nn.Module) -> None:
        super().__init__(parts, comm, model)
        self.params = dict(model.named_parameters())
        sizes = {name: param.numel() for name, param in self.params.items()}
        self.pieces = Pieces(sizes, parts["zero1_owners"], comm)
        # Views: a step changes the model's own elements.
        self.shards = {
            name: self.params[name].detach().view(-1)[start:stop]
            for name, (start, stop) in self.pieces.own_ranges.items()
        }

    @override
    def stepped(self) -> Sequence[Tensor]:
        """The elements that are its own."""
        return list(self.shards.values())

    @override
    def backward(self, batch: Batch) -> float:
        """Gradients are made whole, and each rank keeps the mean of its own ranges."""
        self.model.zero_grad()
        loss = next_token(self.model, batch)
        loss.backward()
        means = self.pieces.reduce({name: gradient_of(param) for name, param in self.params.items()})
        for name, (start, stop) in self.pieces.own_ranges.items():
            own = gradient_of(self.params[name]).view(-1)[start:stop]
            self.shards[name].grad = own.copy_(means[name])
        return loss.item()

    @override
    def norm(self, gradients: Sequence[Tensor]) -> Any:
        """Over the shards of all ranks."""
        return self.parts["clip_global_norm"](self.comm, list(gradients), 2.0)

    @override
    def step(self, batch: Batch) -> float:
        """Step this rank's ranges, then all-gather the ranges that the other ranks have stepped."""
        loss = super().step(batch)
        gathered = self.pieces.start_gather(self.shards)()
        for name, param in self.params.items():
            param.detach().view(-1).copy_(gathered[name])
        return loss


def with_gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, and the gradients that they have."""
    found = list(tensors)
    return [*found, *(tensor.grad for tensor in found if tensor.grad is not None)]


def gradient_of(param: Tensor) -> Tensor:
    """Its gradient; zeros where it has none."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
