"""What an operation costs on a machine that was calibrated: a matrix product by its FLOPs, any other by its bytes."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardlab.comm.trees import tensors_in
from shardlab.planner.machine import RankCosts

PRODUCT, OTHER, MESSAGE = range(3)  # places in ``RankCosts.largest``
# A product of a short inner dim takes as long as additions of its bytes, so many: measured, (1024, 16) by (16, 512).
THIN = 3


def priced(
    costs: RankCosts, func: Any, args: tuple[Any, ...], result: Any, pace: float = 1.0
) -> tuple[int, float, float]:
    """Of an operation, by its overload, its arguments and its result: what kind it is, its size, and seconds."""
    kind, size, work = _work(costs, func, args, result)
    return kind, size, costs.floors[phase_of_autograd()] + work * pace


def _work(costs: RankCosts, func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, float, float]:
    packet = func.overloadpacket
    if "scaled_dot_product" in (name := packet.__name__):
        backward = "backward" in name
        query, key = [tensor for tensor in args if isinstance(tensor, Tensor)][backward : backward + 2]
        flops = 4.0 * query.numel() * key.size(-2) * (2.5 if backward else 1.0)
        return PRODUCT, flops, costs.product("attention_backward" if backward else "attention", flops)
    sizes = {id(tensor): tensor.nbytes for tensor in tensors_in((args, result))}
    # An operation in place reads and writes what it has.
    num_bytes = float(sum(sizes.values()))
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, out_val=result))
        seconds = costs.product(_form(packet.__name__, args), max(1.0, flops))
        return PRODUCT, flops, max(seconds, THIN * costs.operation("add", num_bytes))
    return OTHER, num_bytes, costs.operation(packet.__name__, num_bytes)


def _form(name: str, args: tuple[Any, ...]) -> str:
    left = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2), None)
    if name == "mm" and left is not None:
        return "weight" if left.stride(0) == 1 and left.size(1) > 1 else "input"
    return "forward"


def phase_of_autograd() -> str:
    """Forward, backward, or optimizer, where gradients are not recorded."""
    # Private: there is no public way to tell that a backward is under way in this thread.
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "optimizer"
