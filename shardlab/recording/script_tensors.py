"""What a recorded script holds, by role, as far as its modules and optimizers tell.

Parameters, buffers and gradients are those of the modules that were called and of the optimizers that stepped; state is
that of the optimizers. What DDP has reduced are its buckets, as long as they live: of several models that train in turn
those of all. All other tensors that Python's garbage collector knows are unattributed: the batch, saved metrics, whole
models that did not train. Tensors that only C++ refers to are not found.
"""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardlab.comm.trees import tensors_in
from shardlab.trace.memory_by_role import PLAIN, known_tensors, with_storage
from shardlab.vocabulary import Role


class ScriptTensors:
    """The modules and optimizers of a script, seen so far; none of them is kept alive."""

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._buckets = WeakTensorKeyDictionary()

    def add_buckets(self, tensors: Iterable[Tensor]) -> None:
        """What DDP reduces: its buckets, for as long as it holds them; a sparse gradient is in none."""
        self._buckets.update({tensor: None for tensor in tensors if not tensor.is_sparse})

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """Every tensor this process holds, under each role that it may have; the first role that names it counts."""
        params = list({id(param): param for param in self._params()}.values())
        state = [entry for optimizer in self.optimizers for entry in _state_of(optimizer)]
        buffers = [buffer for root in self.roots for buffer in root.buffers()]
        counters = [value for key, value in state if key == "step"]
        buckets = {tensor.untyped_storage()._cdata for tensor in self._buckets}
        known = list(known_tensors())
        return {
            Role.PARAMETER: list(_local(params)),
            Role.GRADIENT: list(_local(param.grad for param in params if param.grad is not None)),
            Role.OPTIMIZER_STATE: list(_local(value for key, value in state if key != "step")),
            Role.OTHER: list(_local((*buffers, *counters))),
            Role.COMMUNICATION_BUFFER: [tensor for tensor in known if tensor.untyped_storage()._cdata in buckets],
            Role.UNATTRIBUTED: known,
        }

    @property
    def has_ddp(self) -> bool:
        """Whether DistributedDataParallel reduces gradients."""
        return any(isinstance(root, nn.parallel.DistributedDataParallel) for root in self.roots)

    @property
    def device(self) -> torch.device:
        """Where the first module computes; the CPU if none was called."""
        params = (param for root in self.roots for param in root.parameters())
        return next((param.device for param in params), torch.device("cpu"))

    def _params(self) -> Iterator[nn.Parameter]:
        for root in self.roots:
            yield from root.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for state in optimizer.state.values():
        if isinstance(state, dict):
            # Some keep a list: LBFGS its history, Shampoo a matrix for each dim.
            yield from ((key, tensor) for key, value in state.items() for tensor in tensors_in(value))


def _local(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, those of this rank in place of DTensors."""
    for tensor in tensors:
        # Private: the public to_local() makes a node of autograd, and may wait for a collective.
        local = getattr(tensor, "_local_tensor", tensor)
        if type(local) in PLAIN:
            yield from with_storage(local)
