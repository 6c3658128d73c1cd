"""The idea of fully sharded data parallel in one autograd function: gather, multiply, free, and the same backward.

    y = sharded_linear(x, weight_shard, bias_shard, comm)

Read it before the hooks of ``fsdp``. Each rank holds 1/N of the rows of the weight and of the bias, and its own rows of
x. Forward gathers both and frees them; backward gathers the weight again, since it was not kept, and reduce-scatters
the gradients, so that each rank receives the mean over ranks for its own rows.

Legend: I in features, O out features, N ranks; O is a multiple of N.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardlab.comm.communicator import Communicator


def sharded_linear(x: Tensor, weight_shard: Tensor, bias_shard: Tensor | None, comm: Communicator) -> Tensor:
    """``x @ weight.T + bias``, where this rank holds shards of weight and bias.

    Communicated: O x I + O elements gathered in forward, O x I in backward, O x I + O reduced.

    Args:
        x: [..., I], this rank's rows.
        weight_shard: [O/N, I], rows ``rank * O/N`` onwards; as many on every rank.
        bias_shard: [O/N]; None on all ranks for a layer without bias.
        comm: the ranks that hold the other shards.

    Returns:
        [..., O]. Gradients of the shards are means over the ranks; they have no gradients of their own.
    """
    result: Tensor = _ShardedLinear.apply(x, weight_shard, bias_shard, comm)  # type: ignore[no-untyped-call]
    return result


class _ShardedLinear(torch.autograd.Function):
    runs_no_backward = True  # for engines that ask what a backward will reach

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_shard: Tensor, bias_shard: Tensor | None, comm: Communicator) -> Tensor:
        # The shard: the gathered weight is freed when forward returns.
        ctx.save_for_backward(x, weight_shard)
        ctx.comm, ctx.has_bias = comm, bias_shard is not None
        weight = _gather(weight_shard, comm, "weight")
        return functional.linear(x, weight, None if bias_shard is None else _gather(bias_shard, comm, "bias"))

    @staticmethod
    @torch.autograd.function.once_differentiable  # what is gathered here has no graph: d/dweight of this would be zero
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_shard = ctx.saved_tensors
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        # Three collectives in this order on every rank; another order on one of them would hang.
        # Under autocast forward ran in grad_y's dtype, and the tensors that came in have their own.
        grad_x = (grad_y @ _gather(weight_shard, ctx.comm, "weight").to(grad_y.dtype)).to(x.dtype)
        full_grad = (rows.t() @ x.reshape(-1, x.shape[-1]).to(grad_y.dtype)).to(weight_shard.dtype)
        grad_weight = _reduce_scatter(full_grad, ctx.comm, "weight")
        grad_bias = _reduce_scatter(rows.sum(0).to(weight_shard.dtype), ctx.comm, "bias") if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


def _gather(shard: Tensor, comm: Communicator, name: str) -> Tensor:
    full = shard.new_empty(comm.num_ranks * shard.numel())
    comm.all_gather(full, shard.detach().reshape(-1), tag=f"parameters: {name}").wait()
    return full.view(-1, *shard.shape[1:])


def _reduce_scatter(gradient: Tensor, comm: Communicator, name: str) -> Tensor:
    flat = gradient.contiguous().view(-1)
    shard = flat.new_empty(flat.numel() // comm.num_ranks)
    comm.reduce_scatter(flat, shard, tag=f"gradients: {name}").wait()
    return shard.div_(comm.num_ranks).view(-1, *gradient.shape[1:])
