"""Styles: what a plan says of a module. Each checks its module before anything changes, then makes it parallel.

==============  ==============================================================================================
``Column``      a linear layer by output features
``Row``         a linear layer by input features
``Vocabulary``  an embedding by rows
``OnSequence``  a module with replicated parameters that works on parts of the sequence: LayerNorm
``Scatter``     a module that every rank computes whole; each goes on with a part of its output
``OwnDropout``  dropout where activations are in parts
==============  ==============================================================================================
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from shardlab.comm import Communicator
from shardlab.partition.slices import require_divisible
from shardlab.tensor_parallel.flow import is_layer
from shardlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, check_column
from shardlab.tensor_parallel.rng import PartDropout
from shardlab.tensor_parallel.sequence import SEQUENCE_DIM, compute_on_part, scatter_output
from shardlab.tensor_parallel.sources import InputCheck
from shardlab.tensor_parallel.vocab_parallel import VocabParallelEmbedding, check_embedding

M = TypeVar("M", bound=nn.Module)
_PARAMETERS = ("weight", "bias")  # of a linear layer or an embedding


class Style(Protocol):
    """The methods of a style that ``parallelize_module`` calls."""

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """Raise ValueError, naming the module, unless the style can be applied to it."""

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """The parallel module; the same one where only hooks are added. Collective."""


@dataclass(frozen=True)
class Column:
    """A linear layer by output features, see ``ColumnParallelLinear``.

    ``head_dim`` is the width of an attention head, which is never cut; None if features are independent.
    """

    gather_output: bool = False
    parts: tuple[int, ...] | None = None
    head_dim: int | None = None
    sequence_dim: int | None = None
    regather: bool = False

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """A linear layer whose features, and heads, the ranks divide."""
        linear = _require(name, module, nn.Linear, self)
        if self.head_dim is not None:
            for size in self.parts or (linear.out_features,):
                if size % self.head_dim:
                    raise ValueError(f"{name}: head_dim {self.head_dim} does not divide the {size} output features")
                require_divisible(f"{name}: heads of {self.head_dim}", size // self.head_dim, num_ranks)
        check_column(
            name, linear.out_features, num_ranks, self.gather_output, self.parts, self.sequence_dim, self.regather
        )

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """A ``ColumnParallelLinear``."""
        return ColumnParallelLinear(
            _require(name, module, nn.Linear, self), comm, gather_output=self.gather_output, parts=self.parts,
            sequence_dim=self.sequence_dim, regather=self.regather, name=name,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A linear layer by input features, see ``RowParallelLinear``."""

    input_is_parallel: bool = True
    sequence_dim: int | None = None

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """A linear layer whose features the ranks divide."""
        linear = _require(name, module, nn.Linear, self)
        require_divisible(f"{name}: in_features", linear.in_features, num_ranks)

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """A ``RowParallelLinear``."""
        linear = _require(name, module, nn.Linear, self)
        return RowParallelLinear(
            linear, comm, input_is_parallel=self.input_is_parallel, sequence_dim=self.sequence_dim, name=name
        )


@dataclass(frozen=True)
class Vocabulary:
    """An embedding by rows, see ``VocabParallelEmbedding``."""

    sequence_dim: int | None = None

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """An embedding whose rows the ranks divide."""
        check_embedding(name, _require(name, module, nn.Embedding, self), num_ranks)

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """A ``VocabParallelEmbedding``."""
        embedding = _require(name, module, nn.Embedding, self)
        return VocabParallelEmbedding(embedding, comm, sequence_dim=self.sequence_dim, name=name)


@dataclass(frozen=True)
class OnSequence:
    """Replicated parameters, tokens in parts: their gradients are summed. See ``sequence.compute_on_part``.

    ``gather_along`` makes the output whole along that dim again.
    """

    gather_along: int | None = None

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """Any module that treats each token by itself, without hooks on gradients, which would see a part of them."""
        for key, param in module.named_parameters():
            if num_ranks > 1 and param._backward_hooks:
                raise ValueError(
                    f"plan: {name!r} has hooks on the gradient of '{name}.{key}', which would see a part of it; "
                    "register them afterwards"
                )

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """The module itself, with hooks."""
        compute_on_part(module, comm, name, self.gather_along)
        module.register_forward_pre_hook(InputCheck(comm, name, in_parts=True), with_kwargs=True)
        return module


@dataclass(frozen=True)
class Scatter:
    """Computed whole on every rank; each goes on with its part of the output along ``dim``."""

    dim: int = SEQUENCE_DIM

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """Any module that returns a tensor will do."""

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """The module itself, with a hook."""
        scatter_output(module, comm, self.dim, name)
        return module


@dataclass(frozen=True)
class OwnDropout:
    """Dropout of activations in parts: other elements on each rank, see ``rng``."""

    def check(self, name: str, module: nn.Module, num_ranks: int) -> None:
        """An ``nn.Dropout``; any number of ranks will do."""
        _require(name, module, nn.Dropout, self)

    def apply(self, name: str, module: nn.Module, comm: Communicator) -> nn.Module:
        """A ``PartDropout``."""
        return PartDropout(_require(name, module, nn.Dropout, self), comm, name)


def _require(name: str, module: nn.Module, kind: type[M], style: Style) -> M:
    if not isinstance(module, kind):
        found = type(module).__name__
        article = "an" if found[0] in "AEIOU" else "a"
        raise ValueError(f"plan: {type(style).__name__} takes an nn.{kind.__name__}, and {name!r} is {article} {found}")
    if lost := _lost(module, kind):
        raise ValueError(f"plan: {name!r} has {lost}")
    return module


def _lost(module: nn.Module, kind: type[nn.Module]) -> str:
    """What a module has that its parallel form would not have, and what to do; empty if it has nothing."""
    if not is_layer(module, kind):
        return (
            "a forward of its own, which its parallel form would not have; move that into a module around a plain "
            f"nn.{kind.__name__}, and give the plain one the style"
        )
    # Children, parameters and buffers that a parallel layer has no place for; LoRA, or a parametrization.
    if names := [*module._modules, *(name for name in module._parameters if name not in _PARAMETERS), *module._buffers]:
        return (
            f"{', '.join(names)}, which its parallel form would not have; remove them (as with torch.nn.utils."
            "parametrize.remove_parametrizations), or give the module no style"
        )
    # Private: torch has no public way to ask for hooks.
    of_module = any(hooks for kind, hooks in vars(module).items() if kind.endswith("_hooks"))
    of_params = any(param._backward_hooks or param._post_accumulate_grad_hooks for param in module.parameters())
    if not of_module and not of_params:
        return ""
    where = " on parameters" if of_params else ""
    return f"hooks{where}, which its parallel form would not have; register them afterwards"
