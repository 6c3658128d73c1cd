"""Sequence parallelism: between two parallel regions each rank has a part of the tokens instead of all.

LayerNorm, dropout and the residual work on one token at a time. Where activations are whole there, every rank does the
same work and keeps the same bytes; in parts along the sequence it does and keeps 1/N. The all-reduce at the end of a
region becomes a reduce-scatter, and before the next region an all-gather: together as many bytes. Parameters in between
are replicated, but their gradients come from a part of the tokens, so they are summed over the ranks, one small
all-reduce each. Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2.

``SEQUENCE_DIM`` is -2, next to the features: right for (B, S, H) and, of a position embedding, for (S, H).
"""

import torch
from torch import Tensor, nn

from shardlab.comm import Communicator
from shardlab.comm.autograd import gather, scatter

SEQUENCE_DIM = -2


def sum_gradient(param: nn.Parameter, comm: Communicator, name: str) -> None:
    """From now on ``param``'s gradient is summed over the ranks before it is accumulated.

    Each use counts in every backward, so an engine, which looks at what is accumulated, sees the whole gradient.
    """
    if comm.num_ranks == 1:
        return

    def summed(gradient: Tensor) -> Tensor:
        # A copy: autograd may hand the same tensor to others.
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, tag=f"gradient of {name}").wait()
        return total

    # A frozen parameter may be thawed later, but torch takes the hook only while it requires a gradient.
    frozen = not param.requires_grad
    param.requires_grad_(True)
    param.register_hook(summed)
    param.requires_grad_(not frozen)


def compute_on_part(module: nn.Module, comm: Communicator, name: str, gather_along: int | None = None) -> None:
    """Let a replicated module work on parts of the sequence.

    Args:
        module: treats each token by itself; its class and its parameters stay.
        comm: the tensor axis.
        name: in tags.
        gather_along: dim along which its output is gathered, if whole activations are needed after it; else None.
    """
    for key, param in module.named_parameters():
        sum_gradient(param, comm, f"{name}.{key}")
    if gather_along is not None:
        dim, tag = gather_along, f"output of {name}"
        module.register_forward_hook(lambda _, __, output: gather(output, comm, dim, tag=tag))


def scatter_output(module: nn.Module, comm: Communicator, dim: int, name: str) -> None:
    """Let every rank compute ``module`` whole and go on with its part of the output.

    The gradient is gathered in backward, so that the module's own parameters have whole gradients.
    """
    tag = f"output of {name}"
    module.register_forward_hook(lambda _, __, output: scatter(output, comm, dim, tag=tag))
