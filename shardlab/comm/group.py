"""A group of ranks along one axis: it numbers their collectives and tells observers of each."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.comm.process import Process
from shardlab.comm.transports.base import Transport
from shardlab.vocabulary import Collective, dtype_name

_LIBRARY = (
    *(
        str(Path(__file__).parent.parent / room)
        for room in ("comm", "engines", "faults/inject.py", "faults/kinds.py", "recording", "tensor_parallel", "trace")
    ),
    contextlib.__file__,  # an engine's gather in a ``with`` block enters through it
    str(Path(torch.__file__).parent),
)


class ObservedGroup:
    """Numbers the collectives of a group and tells observers of each.

    Args:
        transport: how bytes move; None for a group of one.
        ranks: the global ranks of the group, in group order.
        rank: this process's position in ``ranks``.
        axis: the axis' name, which every event carries.
    """

    def __init__(self, transport: Transport | None, ranks: Sequence[int], rank: int, axis: str) -> None:
        if (transport is None) != (len(ranks) == 1):
            raise ValueError(f"transport: a group of {len(ranks)} ranks needs {'none' if len(ranks) == 1 else 'one'}")
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self._transport = transport
        self._observers: tuple[Observer, ...] = Process.observers
        self._seq = 0

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return len(self.ranks)

    @property
    def transport(self) -> str:
        """How bytes travel, as every event says; empty in a group of one."""
        return "" if self._transport is None else self._transport.name

    @property
    def emulated(self) -> bool:
        """Whether an emulated link delays the collectives."""
        return self._transport is not None and self._transport.emulated

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those who get the events of collectives issued now."""
        return self._observers

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Inside, ``observer`` is told of every collective that is issued."""
        # A new tuple each time: collectives in flight keep the observers they were issued with.
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(known for known in self._observers if known is not observer)

    def announce(
        self,
        op: Collective,
        buffers: Sequence[Tensor],
        tag: str,
        *,
        own_chunk_bytes: int | None = None,
        scratch_bytes: int = 0,
        transport: str | None = None,
        parts: int = 1,
    ) -> CollectiveEvent:
        """Tell the observers of a collective that is issued now, by a verb or by torch itself (``script_collectives``).

        Args:
            op: the collective.
            buffers: whole (unsharded) tensors of one dtype that travel together.
            tag: what it is for.
            own_chunk_bytes: bytes of this rank's chunk where chunks are uneven.
            scratch_bytes: what the transport holds meanwhile.
            transport: what sends it, if not this communicator's transport.
            parts: how many such buffers make the whole, where a rank has only its part.
        """
        assert self._transport is not None
        event = CollectiveEvent(
            seq=self._seq,
            op=op,
            axis=self.axis,
            tag=tag,
            dtype=dtype_name(buffers[0].dtype) if buffers else "",
            numel=parts * sum(buffer.numel() for buffer in buffers),
            num_bytes=parts * sum(buffer.nbytes for buffer in buffers),
            group_size=self.num_ranks,
            transport=transport or self._transport.name,
            emulated=self._transport.emulated,
            source_line=_line_of_caller(),
            own_chunk_bytes=own_chunk_bytes,
            scratch_bytes=scratch_bytes,
            storage=buffers[0].untyped_storage()._cdata if buffers else 0,
            ranks=self.ranks,
        )
        self._seq += 1
        for observer in self._observers:
            observer.issued(event)
        return event


def _line_of_caller() -> str:
    """``file:line`` of the first frame outside the rooms that only pass calls on: the line a person can look at."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@cache
def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARY)
