"""What an operation costs on a machine that was calibrated: a matrix product by its FLOPs, any other by its bytes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from shardlab.planner.machine import RankCosts

PLAIN = 256  # the smallest dim of a product that is no matrix product, such as a convolution


def seconds_of(costs: RankCosts, func: Any, args: tuple[Any, ...], result: Any) -> float:
    """Seconds of an operation alone, by its overload, its arguments and its result."""
    packet = func.overloadpacket
    if packet in flop_registry:
        flops = flop_registry[packet](*args, out_val=result)
        return costs.product(max(1.0, float(flops)), _smallest_dim(packet.__name__, args))
    given = {id(tensor): tensor.nbytes for tensor in (*tensors_in(args), *tensors_in(result))}
    return costs.operation(packet.__name__, sum(given.values()))


def _smallest_dim(name: str, args: tuple[Any, ...]) -> float:
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return PLAIN
    left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return float(min(*left.shape[-2:], right.shape[-1]))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of any nest."""
    leaves, _ = tree_flatten(tree)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
