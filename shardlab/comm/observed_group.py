"""A group of ranks along an axis, whose collectives are numbered and observed; and what all groups of a process share.

Whoever started a rank's process says what holds for all its groups: device, timeout, observers. So the hang board
observes every mesh, also one made in a notebook cell that knows nothing of it. Other observers use ``observed_by``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.events import CollectiveEvent, Observer, Observers
from shardlab.comm.transports.base import Transport
from shardlab.vocabulary import Collective, dtype_name


class Process:
    """Settings of this process, made by whoever started it and kept for its whole life.

    Attributes:
        device: of meshes that name none.
        observers: get the events of every communicator made from now on.
        timeout: torch ends a collective that takes longer with an error; None for torch's default.
        retired: calls that destroy the groups this rank no longer uses. Destroying one while another rank still uses
            it would end that rank's collectives with an unexplained connection error. So they wait until the next mesh
            is built, or a pool calls the next function, which is when all ranks are known to be done.
    """

    device: torch.device = torch.device("cpu")
    observers: Observers = ()
    retired: tuple[Callable[[], object], ...] = ()
    timeout: timedelta | None = None
    patient: dist.ProcessGroup | None = None
    """Of all ranks, where one may wait for another for days; see ``make_patient_group``."""


class ObservedGroup:
    """Numbers the collectives of a group and tells observers of each.

    Args:
        transport: how bytes move; None for a group of one.
        ranks: the global ranks of the group, in group order.
        rank: this process's position in ``ranks``.
        axis: the axis' name, which every event carries.

    Attributes:
        line: which calls what is issued now, see ``callers.from_one_line``; empty where an observer has to look for it.
        dropped: messages of which nobody has kept, or waited for, what the verb returned.
    """

    def __init__(self, transport: Transport | None, ranks: Sequence[int], rank: int, axis: str) -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.num_ranks = len(self.ranks)
        self.rank = rank
        self._transport = transport
        self._observers: Observers = Process.observers
        self._seq, self.line = 0, ""
        self.dropped: list[CollectiveEvent] = []

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """How it is pickled.

        Raises:
            TypeError: it is of several ranks. The copy of a layer that sends would lack the hooks that make the
                gradients of what all ranks have whole.
        """
        if self.num_ranks > 1:
            raise TypeError(
                f"axis {str(self.axis)!r}: a communicator of {self.num_ranks} ranks cannot be copied; copy or save a "
                "tensor-parallel model before parallelize_module(...), and load engine.full_state_dict() into that copy"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Itself, in a group of one, which sends nothing; of several ranks refused, as for a pickle."""
        return self if self.num_ranks == 1 else self.__reduce_ex__(4)

    @property
    def transport(self) -> str:
        """How bytes travel, as every event says; empty in a group of one."""
        return "" if self._transport is None else self._transport.name

    @property
    def emulated(self) -> bool:
        """Whether an emulated link delays the collectives."""
        return self._transport is not None and self._transport.emulated

    @property
    def observers(self) -> Observers:
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
            # Once: the same observer may be there from outside as well.
            at = [known is observer for known in self._observers].index(True)
            self._observers = self._observers[:at] + self._observers[at + 1 :]

    def announce(
        self, op: Collective, buffers: Sequence[Tensor], tag: str, *, own_chunk_bytes: int | None = None,
        bounds: tuple[int, ...] | None = None, scratch_bytes: int = 0, transport: str | None = None, parts: int = 1,
        is_letter: bool = False,
    ) -> CollectiveEvent:  # fmt: skip
        """Tell the observers of a collective that is issued now, by a verb or by torch itself (``script_collectives``).

        Args:
            op: the collective.
            buffers: whole (unsharded) tensors of one dtype that travel together.
            tag: what it is for.
            own_chunk_bytes: bytes of this rank's chunk where chunks are uneven.
            bounds: offsets of all chunks, in elements.
            scratch_bytes: what the transport holds meanwhile.
            transport: what sends it, if not this communicator's transport.
            parts: how many such buffers make the whole, where a rank has only its part.
            is_letter: see ``CollectiveEvent``.
        """
        assert self._transport is not None
        event = CollectiveEvent(
            seq=self._seq, op=op, axis=self.axis, tag=tag, dtype=dtype_name(buffers[0].dtype) if buffers else "",
            numel=parts * sum(map(Tensor.numel, buffers)), num_bytes=parts * sum([buffer.nbytes for buffer in buffers]),
            group_size=self.num_ranks,
            transport=transport or self._transport.name, emulated=self._transport.emulated, source_line=self.line,
            own_chunk_bytes=own_chunk_bytes, bounds=bounds, scratch_bytes=scratch_bytes,
            storage=buffers[0].untyped_storage()._cdata if buffers else 0, ranks=self.ranks,
            is_letter=is_letter,
        )  # fmt: skip
        self._seq += 1
        for observer in self._observers:
            observer.issued(event)
        return event
