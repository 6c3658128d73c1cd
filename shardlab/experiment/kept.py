"""What autograd keeps of a forward until backward needs it: the activations, as tensors.

with kept_for_backward(block) as kept:
    y = block(x)
num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def kept_for_backward(module: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the list that is yielded fills with what is kept, each storage once, without the module's parameters.

    Args:
        module: whose parameters and buffers do not count, since they are there anyway.
    """
    seen = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in seen:
            seen.add(key)
            kept.append(tensor)  # which also keeps its storage, so that no other gets the same key
        return tensor.detach()  # an operation that got its own output back would hold itself for ever

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
