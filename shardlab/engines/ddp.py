"""Naive data parallel: after backward, one all-reduce per parameter.

What differs from ``single``: every rank trains on its own rows, and the gradients become means over the ranks.
Everything is replicated. Per rank for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P state; on the wire
2P(N-1)/N elements a step, in one message per parameter, none of them hidden behind compute. A parameter that this rank
did not use is sent as zeros, since others may have used it.
"""

import torch
from torch import nn

from shardlab.comm.events import Pending, wait_all
from shardlab.engines.strategy import Strategy


class DDP(Strategy):
    """Replicated parameters; gradients are all-reduced one by one when backward has ended."""

    name = "ddp"

    def make_means(self) -> None:
        """All-reduce each gradient that is due, one message for each, and divide the sums."""
        if self.num_ranks == 1:
            return
        due = [(name, param) for name, param in self.params.items() if self.is_due(param)]
        # All are issued before the first is waited for, in the module's order on every rank, used here or not.
        wait_all([self._send(name, param) for name, param in due])
        for _, param in due:
            assert param.grad is not None
            param.grad.div_(self.num_ranks)

    def _send(self, name: str, param: nn.Parameter) -> Pending:
        # Sent even if it was not used here: other ranks may have used it, and wait for this rank's part.
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        else:
            # After create_graph=True its graph is that of this rank's own gradient, and not of the mean.
            param.grad = param.grad.detach()
            if 0 in param.grad.stride():
                param.grad = param.grad.clone()  # expanded, as autograd.grad returns that of a sum
        return self.comm.all_reduce(param.grad, tag=f"gradient of {name}")
