"""Sequence parallelism: between two parallel regions each rank has a part of the tokens instead of all.

LayerNorm, dropout and the residual work on one token at a time. Where activations are whole there, every rank does the
same work and keeps the same bytes; in parts along the sequence it does and keeps 1/N. The all-reduce at the end of a
region becomes a reduce-scatter, and before the next region an all-gather: together as many bytes. Parameters in between
are replicated, but their gradients come from a part of the tokens, so they are summed over the ranks, one small
all-reduce each. Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2.

``SEQUENCE_DIM`` is -2, next to the features: right for (B, S, H) and, of a position embedding, for (S, H).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardlab.comm import Communicator
from shardlab.comm.autograd_collectives import gather, is_copy, reduce, scatter, untraced
from shardlab.tensor_parallel.flow import nodes_below

SEQUENCE_DIM = -2


class _Sum:
    """A gradient hook: what comes from a part of the tokens on each rank becomes their sum."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm, self._name = comm, name

    def __call__(self, gradient: Tensor) -> Tensor:
        return reduce(gradient, self._comm, tag=f"gradient of {self._name}")


@untraced  # a trace does not see which hooks a parameter has
def sum_gradient(param: Tensor, comm: Communicator, name: str) -> None:
    """From now on ``param``'s gradient is summed over the ranks before it is accumulated; once, however often called.

    Each use counts in every backward, so an engine, which looks at what is accumulated, sees the whole gradient.

    Raises:
        ValueError: ``param`` is computed, and not from parameters whose gradients are summed.
    """
    # On the meta device is what is made later.
    if comm.num_ranks == 1 or param.is_meta or is_summed(param):
        return
    if not param.is_leaf:
        _check_computed(param, name)
        return
    # A frozen parameter may be thawed later, but torch takes the hook only while it requires a gradient.
    frozen = not param.requires_grad
    param.requires_grad_(True)
    param.register_hook(_Sum(comm, name))
    param.requires_grad_(not frozen)


def is_summed(param: Tensor) -> bool:
    """Whether ``sum_gradient`` was called for it."""
    # Private: there is no public way to ask for hooks.
    hooks: Mapping[int, object] = param._backward_hooks or {}
    return any(isinstance(hook, _Sum) for hook in hooks.values())


def _check_computed(tensor: Tensor, name: str) -> None:
    """Refuse a tensor in a parameter's place, as ``functional_call`` puts it there, whose gradient would stay a part.

    Computed from parameters whose gradients are summed, it needs no sum: with one of its own it would be summed twice.
    """
    for node in nodes_below(tensor.grad_fn, is_end=is_copy):
        leaf = getattr(node, "variable", None)
        if leaf is not None and not is_summed(leaf):
            raise ValueError(
                f"{name}: it is computed from a tensor whose gradient is not summed over the tensor ranks, and this "
                "rank's is from its part of the tokens; put shardlab.tensor_parallel.copy(tensor, comm) in its place"
            )


def compute_on_part(module: nn.Module, comm: Communicator, name: str, gather_along: int | None = None) -> None:
    """Let a replicated module work on parts of the sequence.

    Args:
        module: treats each token by itself; its class and its parameters stay.
        comm: the tensor axis.
        name: in tags.
        gather_along: dim along which its output, a tensor, is gathered, if it is needed whole after it; else None.
    """
    for key, param in module.named_parameters():
        sum_gradient(param, comm, f"{name}.{key}")
    if comm.num_ranks > 1:
        module.register_forward_pre_hook(partial(_sum_new, comm, name))
    if gather_along is not None:
        dim, tag = gather_along, f"output of {name}"
        module.register_forward_hook(
            lambda _, __, output: gather(_tensor(name, "OnSequence(gather_along)", output), comm, dim, tag=tag)
        )


@untraced
def _sum_new(comm: Communicator, name: str, module: nn.Module, _: tuple[Any, ...]) -> None:
    """Sum the gradients of parameters that are new in the module: the sum belongs to the parameter object."""
    for key, param in module.named_parameters():
        if param.requires_grad:
            sum_gradient(param, comm, f"{name}.{key}")


def scatter_output(module: nn.Module, comm: Communicator, dim: int, name: str) -> None:
    """Let every rank compute ``module`` whole and go on with its part of the output.

    The gradient is gathered in backward, so that the module's own parameters have whole gradients.
    """
    tag = f"output of {name}"
    module.register_forward_hook(lambda _, __, output: scatter(_tensor(name, "Scatter", output), comm, dim, tag=tag))


def _tensor(name: str, style: str, output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{name}: {style} takes a module that returns a tensor, and this one returned a {type(output).__name__}; "
            "put it into a module that returns the tensor alone, and give that the style"
        )
    return output
