"""A backward that autograd runs in a thread that begins in C++, as it does on a device."""

import torch
from torch.autograd import Variable

DEPTH = 61  # from which on torch gives a backward inside a backward to another thread


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth, innermost):
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            _nested(ctx.depth - 1, ctx.innermost)
        return gradient, None, None


def in_a_thread_of_autograd(backward):
    """Call a function, in this thread; a backward that it begins runs in another one."""
    _nested(DEPTH, backward)


def _nested(depth, innermost):
    if depth == 0:
        innermost()
        return
    root = Nested.apply(torch.ones((), requires_grad=True), depth, innermost)
    # Past torch.autograd.backward, so that who listens there hears of the innermost alone.
    Variable._execution_engine.run_backward(
        (root,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
