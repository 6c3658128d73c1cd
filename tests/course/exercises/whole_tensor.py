"""Blocks divided over a tensor axis: right ones that are written differently, and wrong ones."""

import torch
from torch import nn
from torch.nn import functional

from shardlab.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def of_our_layers(block, comm):
    first, between, second = block
    return nn.Sequential(ColumnParallelLinear(first, comm), between, RowParallelLinear(second, comm))


class ByHooks(nn.Module):
    """Without a function of autograd's own: the sum is a constant, and a hook sums the gradient of x.

    The options are what people get wrong.
    """

    copies, sums_x, bias_first, gathers, puts_back, sums_bias = True, True, False, False, False, False

    def __init__(self, block, comm):
        super().__init__()
        self.comm, (first, self.between, second) = comm, block
        sliced = [each.detach().chunk(comm.num_ranks, dim)[comm.rank] for each, dim in (
            (first.weight, 0), (first.bias, 0), (second.weight, 1))]  # fmt: skip
        self.a, self.b, self.c = (nn.Parameter(each.clone() if self.copies else each) for each in sliced)
        self.d = nn.Parameter(second.bias.detach().clone())
        if self.sums_bias:
            self.d.register_hook(self.summed)

    def summed(self, tensor):
        total = tensor.detach().clone()
        self.comm.all_reduce(total).wait()
        return total

    def forward(self, x):
        x = x.view_as(x)
        if self.sums_x and x.requires_grad:
            x.register_hook(self.summed)
        hidden = self.between(functional.linear(x, self.a, self.b))
        if self.gathers:
            whole = hidden.new_empty(hidden.numel() * self.comm.num_ranks)
            self.comm.all_gather(whole, hidden.detach().flatten()).wait()
        if self.puts_back:
            whole = hidden.new_zeros(self.comm.num_ranks, *hidden.shape)
            whole[self.comm.rank] = hidden
            weights = hidden.new_zeros(self.comm.num_ranks, *self.c.shape)
            weights[self.comm.rank] = self.c
            term = torch.einsum("nri,noi->ro", whole, weights)
        else:
            term = functional.linear(hidden, self.c)
        if self.bias_first:
            term = term + self.d
        total = term + (self.summed(term) - term.detach())
        return total if self.bias_first else total + self.d


class KeepsTheWhole(ByHooks):
    def __init__(self, block, comm):
        super().__init__(block, comm)
        self.before = [block]


class ViewsOfTheWhole(ByHooks):
    copies = False


class TermsOfTheGradient(ByHooks):
    sums_x = False


class BiasOnEveryRank(ByHooks):
    bias_first = True


class BiasGradientSummed(ByHooks):
    sums_bias = True


class GathersFeatures(ByHooks):
    gathers = True


class WholeSizeBetween(ByHooks):
    puts_back = True


RIGHT_TENSOR = [of_our_layers, ByHooks]
WRONG_TENSOR = {
    KeepsTheWhole: "^2 ranks, weighed: rank 0: other of .* B at rest, and 200 B are enough",
    ViewsOfTheWhole: "^2 ranks, weighed: rank 0: parameter of 2592 B at rest, and 1344 B are enough",
    TermsOfTheGradient: r"^3 ranks, trained: rank 0, result\['gradient of x'\]",
    BiasOnEveryRank: r"^3 ranks, trained: rank 0, result\['output'\], element 0",
    BiasGradientSummed: r"^3 ranks, trained: rank 0, result\['output after 3 steps'\]",
    GathersFeatures: "^2 ranks, weighed: rank 0, message 0 is all_gather of 384 B .*; allowed: all_reduce",
    WholeSizeBetween: "^2 ranks, weighed: rank 0 held .* B at once, and 7000 B are allowed",
}
