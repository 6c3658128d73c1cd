"""What a script sends before a step, with the line that sends it and the gradients that are in it."""

from collections.abc import Callable, Sequence

from torch import Tensor

from shardlab.comm.callers import locate
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.recording.script_collectives import TorchCalls
from shardlab.recording.torch_callers import Caller
from shardlab.same.notes import Message
from shardlab.vocabulary import Collective


class Messages(Observer):
    """Notes messages.

    Args:
        names_of: the parameters or gradients that lie in a tensor's memory.
        backward: how many there were in this step.
    """

    def __init__(self, names_of: Callable[[Tensor], tuple[str, ...]], backward: Callable[[], int]) -> None:
        self._names_of, self._backward = names_of, backward
        self._names: tuple[str, ...] = ()
        self._caller = ""
        self._found: list[Message] = []
        self.calls = TorchCalls(self, self._tag)
        """Messages are noted while this is entered."""

    def taken(self) -> list[Message]:
        """Those since the last call."""
        self.calls.end_waits()
        self.calls.forget_ended()
        found, self._found = self._found, []
        return found

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        line, number = locate(event), self._backward()
        sent = str(event.op), self._caller, line, event.ranks, event.dtype, self._names, number, event.numel
        self._found.append(Message(*sent))

    def _tag(self, op: Collective, caller: Caller, tensors: Sequence[Tensor]) -> str:
        self._caller = caller.name
        self._names = tuple(name for tensor in tensors for name in self._names_of(tensor)) if not caller.name else ()
        return caller.name or "the script"
