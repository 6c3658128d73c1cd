"""Which tensors are alive in host memory, whoever made them: those that Python's garbage collector knows.

What no engine, module or optimizer refers to is unattributed: the batch, a data set in memory, saved metrics, a leak.
Tensors that only C++ refers to are not found; in the memory of the process they belong to the heap.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardlab.vocabulary import Role

PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def known_tensors() -> Iterator[Tensor]:
    """Every plain tensor with a storage that the garbage collector lists; it does not list what ``gc.freeze`` froze."""
    # In a rank, all objects from before its first call are frozen, so there are only a few thousand to search.
    return (thing for thing in gc.get_objects() if type(thing) in PLAIN and has_storage(thing))


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor lies in memory of its own; not so on the meta device, or inside ``torch.func``."""
    # Private: a tensor inside torch.func.vmap or grad looks plain, and there is no public way to tell.
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not is_wrapped


def with_unattributed(live: Mapping[Role, Iterable[Tensor]]) -> Mapping[Role, Iterable[Tensor]]:
    """The tensors by role, and last all others in host memory; a storage counts in the first role that names it."""
    if Role.UNATTRIBUTED in live:  # the caller has looked for them already
        return live
    return {**live, Role.UNATTRIBUTED: [tensor for tensor in known_tensors() if tensor.is_cpu]}
