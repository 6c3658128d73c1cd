"""A mesh as engines see it: named axes, and this rank's communicator along each of them, their parts and products.

    outer, inner = mesh.split("data", inner=2)       # across pairs of neighbours, and inside this rank's pair
    every = mesh.flatten("replica", "shard")         # over both axes at once

``Mesh`` (in ``comm.mesh``) makes the groups and chooses their transports; an engine needs none of that, only this.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.comm.observed_group import Process
from shardlab.vocabulary import MeshAxis

Groups = list[tuple[int, ...]]
"""Ranks that are together, in group order."""


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
        self._parts: dict[str, Communicator] = {}  # of axes, and products of them
        self._factors: dict[str, tuple[str, ...]] = {}  # of each product
        self._watching: list[tuple[Observer, contextlib.ExitStack]] = []
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

    def split(self, axis: str, *, inner: int) -> tuple[Communicator, Communicator]:
        """Cut an axis into groups of ``inner`` neighbours, such as the ranks of a host.

        Collective like the mesh itself, over all ranks of the process group, the first time; later the same
        communicators come back.

        Args:
            axis: one of the mesh.
            inner: ranks of a group; it divides the axis.

        Returns:
            The outer part, this rank's counterparts in all groups, and the inner part, this rank's group: named
            ``data.outer`` and ``data.inner``.

        Raises:
            ValueError: there is no such axis, ``inner`` does not divide it, or it has been cut into groups of another
                size.
        """
        num_ranks = self[axis].num_ranks
        if type(inner) is not int or inner < 1 or num_ranks % inner:
            fit = ", ".join(str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0)
            raise ValueError(f"inner: {inner} does not divide the {num_ranks} ranks of axis {str(axis)!r}; use {fit}")
        names = f"{axis}.outer", f"{axis}.inner"
        axes: dict[str, int] = {}
        for name, size in self.axes.items():
            axes |= {names[0]: size // inner, names[1]: inner} if name == axis else {name: size}
        known = self._parts.get(names[1])
        if known is not None and known.num_ranks != inner:
            raise ValueError(
                f"inner: {inner} is given, and axis {str(axis)!r} is cut into groups of {known.num_ranks} already; an "
                "axis is cut in one way"
            )
        self._add({name: groups_along(axes, self.ranks, name) for name in names})
        return self._parts[names[0]], self._parts[names[1]]

    def flatten(self, *axes: str) -> Communicator:
        """One communicator over the product of axes, named ``replica_shard``; collective like the mesh, the first time.

        Args:
            axes: of the mesh, in its order; a product that was made counts as its axes.

        Raises:
            ValueError: an axis that is not there, or twice; another order than the mesh's.
        """
        axes = tuple(one for axis in axes for one in self._factors.get(axis, (axis,)))
        for axis in axes:
            self[axis]  # which refuses an axis that is not there
        if not axes or list(axes) != [axis for axis in self.axes if axis in axes]:
            raise ValueError(f"axes: {list(axes)} is given; give axes of {list(self.axes)} in this order, each once")
        if len(axes) == 1:
            return self[axes[0]]
        name = "_".join(axes)
        self._factors[name] = axes
        self._add({name: groups_along(self.axes, self.ranks, *axes)})
        return self._parts[name]

    def _add(self, groups: Mapping[str, Groups]) -> None:
        """Make the communicators of groups that are not there yet, for the observers of now too."""
        missing = {name: lines for name, lines in groups.items() if name not in self._parts}
        made = self._make(missing) if missing else {}
        self._parts |= made
        for observer, stack in self._watching:
            for communicator in made.values():
                if not any(known is observer for known in communicator.observers):  # of all that is made, it knows
                    stack.enter_context(communicator.observed_by(observer))

    def _make(self, groups: Mapping[str, Groups]) -> dict[str, Communicator]:
        """This rank's communicators of some groups; here for a mesh of one rank."""
        assert len(self.ranks) == 1
        return {name: Communicator(None, None, (self._rank,), 0, name) for name in groups}

    def take_dropped(self) -> CollectiveEvent | None:
        """The first message since the last call, over any axis, part or product, for which nobody can wait any more."""
        found = []
        for communicator in (*self.communicators, *self._parts.values()):
            found += communicator.dropped
            communicator.dropped.clear()
        return min(found, key=lambda event: event.issue_ns, default=None)

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Inside, ``observer`` is told of the collectives of every axis, and of parts and products of them."""
        with contextlib.ExitStack() as stack:
            for communicator in (*self.communicators, *self._parts.values()):
                stack.enter_context(communicator.observed_by(observer))
            watching = observer, stack
            self._watching.append(watching)
            try:
                yield
            finally:
                self._watching = [one for one in self._watching if one is not watching]

    def call_at_close(self, end: Callable[[], object]) -> None:
        """Have ``end`` called by ``close()``, the last one given first."""
        self._at_close.append(end)

    def close(self) -> None:
        """End the communicators; their process groups go when the next mesh is built.

        In a ``finally`` clause the exception that is under way stays, and gets a note of what would be raised here. An
        ``except`` clause looks the same from here, and may drop that exception: so a line on stderr says it too.

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
                sys.stderr.write(f"{note}\n")  # the handler may never look at the exception
        elif errors:
            for note in notes[1:]:
                errors[0].add_note(note)
            raise errors[0]

    def _ends(self) -> Iterator[Callable[[], object]]:
        # Queues first: a group must not go while a collective in it is still to run.
        yield from (communicator.close for communicator in (*self.communicators, *self._parts.values()))
        while self._at_close:
            yield self._at_close.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        # After an error the other ranks may never come, so waiting for what is queued could last for ever.
        if exc_type is None:
            self._close(None)  # an error whose handler this block is in is not on its way


def groups_along(axes: Mapping[str, int], ranks: Sequence[int], *along: str) -> Groups:
    """The groups of ranks along axes: those that differ in these coordinates only, the last one fastest."""
    grid = np.reshape(ranks, tuple(axes.values()))
    places = [list(axes).index(axis) for axis in along]
    lines = np.moveaxis(grid, places, range(-len(along), 0)).reshape(-1, prod(axes[axis] for axis in along))
    return [tuple(line) for line in lines.tolist()]
