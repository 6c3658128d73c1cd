"""One rank of a divided model without memory: what it holds, and which messages its layers send, before ranks start."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardlab.comm import Communicator
from shardlab.comm.events import CollectiveEvent
from shardlab.comm.without_ranks import SilentCommunicator
from shardlab.tensor_parallel.plan import Plan, checked, divide
from shardlab.vocabulary import MeshAxis


class DryRunRank:
    """The first rank of a tensor axis.

    Args:
        module: on any device; it is copied.
        plan: how it is divided.
        num_ranks: of the tensor axis.
        dtype: of its floating-point parameters; None for their own.
        buffer_dtype: of its floating-point buffers, likewise.

    Attributes:
        module: the divided copy; its parameters have shapes and no memory.
        comm: announces what would be sent.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        num_ranks: int,
        dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
    ) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.comm: Communicator = SilentCommunicator(num_ranks, 0, MeshAxis.TENSOR)
        with self._mode:
            # By identity, so that a tied weight stays one parameter in the copy.
            memo: dict[int, object] = {
                id(param): nn.Parameter(_without_memory(param, dtype), requires_grad=param.requires_grad)
                for param in module.parameters()
            }
            memo |= {id(buffer): _without_memory(buffer, buffer_dtype) for buffer in module.buffers()}
            self.module = copy.deepcopy(module, memo)
            divide(self.module, checked(plan, module, num_ranks), self.comm, leave_as_is, torch.device("cpu"))

    def messages(self, loss: Callable[[], Tensor]) -> list[CollectiveEvent]:
        """What a forward and a backward send over the tensor axis, in order.

        Args:
            loss: computes the loss of a micro-batch with ``module``.

        Raises:
            Exception: what ``loss`` raises, for example because it depends on values.
        """
        log = _Log()
        with self._mode, self.comm.observed_by(log):
            loss().backward()
        return log.events


class _Log:
    """An observer that keeps what is issued."""

    def __init__(self) -> None:
        self.events: list[CollectiveEvent] = []

    def issued(self, event: CollectiveEvent) -> None:
        self.events.append(event)

    def started(self, event: CollectiveEvent) -> None: ...

    def completed(self, event: CollectiveEvent) -> None: ...

    def waited(self, event: CollectiveEvent) -> None: ...


def _without_memory(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(tensor, device="cpu", dtype=dtype if tensor.is_floating_point() else None)


def leave_as_is(name: str, module: nn.Module) -> None:
    """An ``init_fn`` where nothing is to be initialised."""
