"""Collectives of torch.distributed that a loss sends by itself are refused: one process that trains alone would wait.

A call is seen where torch's dispatcher takes it, whatever function of torch.distributed it came from. What our
communicators send, and what a layer of torch sends (a synchronised BatchNorm), passes.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from shardlab.comm.callers import callers
from shardlab.comm.torch_engine_groups import VERBS

# Private: there is no public way to see calls that torch's own functions make.
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_SHARDLAB, _TORCH = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)
_LAYERS = str(Path(torch.__file__).parent / "nn")

PAST = (
    "sends by torch.distributed itself, which nobody counts; send over self.comm, or over communicators of given.mesh"
)


def num_sent_by_torch() -> int:
    """How many collectives the default group has sent: of a step those that went past every communicator."""
    # Private: there is no public way to ask.
    group: Any = dist.group.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())


class OwnCallsRefused:
    """Inside, a collective that a user's file calls in a ``watched`` block raises ValueError.

    Args:
        advice: what the error says.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._thread: int | None = None  # that runs the watched block

    def __enter__(self) -> Self:
        """Begin to look at calls."""
        self._library = torch.library.Library("c10d", "IMPL")
        for name in (known for plain in VERBS for known in (plain, f"{plain}_")):
            if (op := getattr(torch.ops.c10d, name, None)) is not None:
                self._library.impl(name, self._kernel(op.default), "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Let all calls pass again."""
        self._library._destroy()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The block whose calls are refused, on this thread alone: what is queued is sent on others."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _kernel(self, op: Any) -> Callable[..., Any]:
        def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if self._thread == threading.get_ident() and _is_own():
                raise ValueError(self._advice)
            return op.redispatch(keys & _BELOW, *args, **kwargs)

        return call


def _is_own() -> bool:
    """Whether a call came from a file of the user, through nothing but torch.distributed."""
    # A dispatch mode, as of a traced step, only passes calls on.
    frames = (frame.f_code for frame in callers(sys._getframe(2)))
    files = (code.co_filename for code in frames if code.co_name != "__torch_dispatch__")
    caller = next((file for file in files if not file.startswith(_TORCH) or file.startswith(_LAYERS)), "")
    return bool(caller) and not caller.startswith((_SHARDLAB, _LAYERS))
