"""A mesh as engines see it: named axes, and this rank's communicator along each of them.

``Mesh`` (in ``comm.mesh``) makes the groups and chooses their transports; an engine needs none of that, only this.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Observer
from shardlab.comm.observed_group import Process
from shardlab.vocabulary import MeshAxis


class BaseMesh:
    """Named axes over ranks, and a communicator for each.

    Args:
        axes: size of each axis by name, slowest first.
        ranks: global ranks on the mesh, row by row.
        device: where tensors live; None for this rank's own device, the CPU outside a pool.

    Attributes:
        axes: as given.
        ranks: as given.
        device: where tensors live.
    """

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int], device: torch.device | str | None = None) -> None:
        if not isinstance(axes, Mapping):
            raise ValueError(f'axes: {axes!r:.60} was given; give the size of each axis by name, as {{"data": 2}}')
        self.axes = dict(axes)
        self.ranks = tuple(ranks)
        self.device = Process.device if device is None else torch.device(device)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._communicators: dict[str, Communicator] = {}
        self._at_close: list[Callable[[], object]] = []

    @staticmethod
    def alone(device: torch.device | str | None = None) -> "BaseMesh":
        """A mesh with the axis ``data`` of this rank only, for an engine that trains in one process."""
        mesh = BaseMesh({MeshAxis.DATA: 1}, [dist.get_rank() if dist.is_initialized() else 0], device)
        mesh._communicators[MeshAxis.DATA] = Communicator(None, None, mesh.ranks, 0, MeshAxis.DATA)
        return mesh

    @property
    def is_member(self) -> bool:
        """Whether this rank is on the mesh."""
        return self._rank in self.ranks

    @property
    def data(self) -> Communicator:
        """The communicator of the axis ``data``."""
        return self["data"]

    def __getitem__(self, axis: str) -> Communicator:
        if axis not in self.axes:
            raise ValueError(f"axis: {str(axis)!r} is not on this mesh; it has {', '.join(self.axes)}")
        if not self.is_member:
            raise RuntimeError(
                f"mesh: rank {self._rank} is not among its ranks {list(self.ranks)} and takes no part; "
                "ask mesh.is_member first"
            )
        return self._communicators[axis]

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """One per axis, in the order of the axes; none on a rank that is no member."""
        return tuple(self._communicators.values())

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Inside, ``observer`` is told of the collectives of every axis."""
        with contextlib.ExitStack() as stack:
            for communicator in self.communicators:
                stack.enter_context(communicator.observed_by(observer))
            yield

    def call_at_close(self, end: Callable[[], object]) -> None:
        """Have ``end`` called by ``close()``, the last one given first."""
        self._at_close.append(end)

    def close(self) -> None:
        """End the communicators; their process groups go when the next mesh is built.

        In a ``finally`` clause the exception that is under way stays, and gets a note of what would be raised here. An
        ``except`` clause looks the same from here, and may drop that exception: so a warning says it too, or a line on
        stderr where warnings are errors.

        Raises:
            Exception: what a collective raised, where nobody has waited for one that failed.
        """
        self._close(sys.exc_info()[1])

    def _close(self, under_way: BaseException | None) -> None:
        errors: list[Exception] = []
        for end in self._ends():
            try:
                end()
            except Exception as error:  # the others end all the same; but an interrupt waits for none of them
                errors.append(error)
        notes = [f"mesh: closing it raised {type(error).__name__}: {error}" for error in errors]
        if under_way is not None:
            for note in notes:
                under_way.add_note(note)
                _warn(note)  # the handler may never look at the exception
        elif errors:
            for note in notes[1:]:
                errors[0].add_note(note)
            raise errors[0]

    def _ends(self) -> Iterator[Callable[[], object]]:
        # Queues first: a group must not go while a collective in it is still to run.
        yield from (communicator.close for communicator in self.communicators)
        while self._at_close:
            yield self._at_close.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        # After an error the other ranks may never come, so waiting for what is queued could last for ever.
        if exc_type is None:
            self._close(None)  # an error whose handler this block is in is not on its way


def _warn(note: str) -> None:
    """Warn whoever called ``close()``."""
    try:
        warnings.warn(note, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:  # raised where warnings are errors, it would take the place of the one under way
        sys.stderr.write(f"{note}\n")


def groups_along(axes: dict[str, int], ranks: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
    """The groups of ranks along ``axis``: those that differ in that coordinate only."""
    grid = np.reshape(ranks, tuple(axes.values()))
    lines = np.moveaxis(grid, list(axes).index(axis), -1).reshape(-1, axes[axis])
    return [tuple(line) for line in lines.tolist()]
