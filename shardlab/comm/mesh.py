"""The mesh: ranks laid out on named axes, and one communicator per axis.

    mesh = Mesh({"data": 4})                      # four ranks, one axis
    mesh = Mesh({"replica": 2, "shard": 2})       # row by row: ranks 0 1 / 2 3
    mesh = Mesh({"data": 2}, ranks=[0, 3])        # a subset; on ranks 1 and 2 ``mesh.is_member`` is False
    mesh = Mesh({"data": 2}, ranks=[0, 1] if rank < 2 else [2, 3])      # two at once, one on each half of the ranks

The last axis varies fastest, so its groups are neighbours: put the axis that communicates most there. Building a mesh
of more than one rank is collective: every rank of the default group builds one at the same time, the one it is on or,
if it is on none, the one of the others.

Each axis has the fastest transport that its ranks can use, or the one that was asked for:

============================  ==============================================================
ranks                         transport
============================  ==============================================================
each with a GPU of its own    NCCL
sharing a GPU, NCCL's switch  NCCL (the switch is in ``launch.placement``)
on one Linux host             shared memory; gloo if asked for
others                        gloo
============================  ==============================================================

With the last two, CUDA tensors are staged through host memory, and an emulated link delays every collective.
"""

import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardlab.comm.async_queues import StreamQueue, ThreadQueue
from shardlab.comm.base_mesh import BaseMesh, Groups, groups_along
from shardlab.comm.communicator import Communicator
from shardlab.comm.failures import Failures
from shardlab.comm.observed_group import Process
from shardlab.comm.rank_life import retire
from shardlab.comm.signed_messages import all_gather_bytes
from shardlab.comm.streams import mark_of
from shardlab.comm.transports.base import Queue, Transport
from shardlab.comm.transports.gloo import GlooTransport
from shardlab.comm.transports.nccl import NcclTransport
from shardlab.comm.transports.rendezvous import share_buffers
from shardlab.comm.transports.shared_memory import SharedMemoryTransport
from shardlab.comm.transports.staged_and_emulated import EmulatedLink, StagedTransport
from shardlab.partition.ring_cost import Link
from shardlab.vocabulary import HostTransport


class Mesh(BaseMesh):
    """Named axes over all ranks or some of them.

    Args:
        axes: size of each axis by name, slowest first; the sizes multiply to the number of ranks.
        ranks: global ranks on the mesh, row by row, ascending along each axis; None for all. The ranks of a mesh all
            name the same; others may build theirs meanwhile.
        device: of the tensors; it decides, with the default group's backend, which transports are used. None for this
            rank's own device, as the pool has placed it; the CPU outside a pool.
        link: emulate this link on every axis, a ``Link`` or text such as ``10Gbps,50us``; not with NCCL.
        transport: ``shared_memory`` or ``gloo``, for tensors that travel through host memory; None for the first of
            them that the ranks of an axis can use.

    Raises:
        ValueError: sizes that do not multiply to the number of ranks; unknown, repeated or unsorted ranks; ranks that
            ask for different meshes; a transport that these ranks cannot use.
        RuntimeError: the default group of a pool's rank has been destroyed.
    """

    def __init__(
        self, axes: Mapping[str, int], *, ranks: Sequence[int] | None = None, device: torch.device | str | None = None,
        link: Link | str | None = None, transport: str | None = None,
    ) -> None:  # fmt: skip
        link = Link.parse(link) if isinstance(link, str) else link
        if not isinstance(link, Link | None):
            raise ValueError(f"link: {link!r} is given; a Link or text such as 10Gbps,50us is needed")
        if Process.timeout is not None and not dist.is_initialized():
            raise RuntimeError(
                "Mesh: dist.destroy_process_group() has destroyed the default group of this rank, which the pool has "
                "made and destroys itself; leave that call out, or call pool.restart() after it"
            )
        check_transport(dist.get_backend() if dist.is_initialized() else "", transport, link)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        super().__init__(axes, range(world_size) if ranks is None else ranks, device)
        _check(self.axes, self.ranks, world_size)
        # Taken before the ranks meet: what is retired from here on may still be in use on another rank.
        no_longer_used = Process.retired
        self._failures, self._way = Failures(), (link, transport and str(transport))
        self._communicators = self._make({str(axis): groups_along(self.axes, self.ranks, axis) for axis in self.axes})
        # Now all ranks have come here, so none still uses the groups retired before. A mesh of this rank alone would
        # say nothing of the others.
        if len(self.ranks) > 1:
            Process.retired = Process.retired[len(no_longer_used) :]
            for end in no_longer_used:
                end()

    def _make(self, groups: Mapping[str, Groups]) -> dict[str, Communicator]:
        found: dict[str, Communicator] = {}
        for name, lines in groups.items():
            for line in lines:
                if list(line) != sorted(line):
                    # Torch numbers a group's ranks in ascending order, whatever the order in which it was given them.
                    raise ValueError(f"ranks: {list(line)} does not ascend along axis {name!r}; use {sorted(line)}")
        asks = tuple((name, tuple(lines)) for name, lines in groups.items())
        for asked in _asked_by_all(_Asked(asks, self.ranks, *self._way)):
            for name, made in asked.groups:
                for line in made:
                    # Every rank must take part in making every group, also of groups it does not belong to.
                    group = dist.new_group(list(line), timeout=Process.timeout) if len(line) > 1 else None
                    if self._rank in line:
                        found[name] = self._communicator(asked, name, line, group)
        return found

    def _communicator(
        self, asked: "_Asked", name: str, line: tuple[int, ...], group: dist.ProcessGroup | None
    ) -> Communicator:
        if group is None:
            return Communicator(None, None, line, 0, name)
        transport = _transport_of(group, self.device, asked.link, asked.transport)
        mark, place = mark_of(self.device), line.index(self._rank)
        thread, on_stream = f"comm-{name}", isinstance(transport, NcclTransport)
        queue: Queue = StreamQueue(self.device) if on_stream else ThreadQueue(thread, self.device, self._failures)
        comm = Communicator(transport, queue, line, place, name, mark)
        self.call_at_close(_retire_with(comm, group, transport))
        return comm


class _Asked(NamedTuple):
    """What a rank asks for when it builds a mesh."""

    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    ranks: tuple[int, ...]
    link: Link | None
    transport: str | None

    def __str__(self) -> str:
        options = "".join(f", {key}={getattr(self, key)!r}" for key in ("link", "transport") if getattr(self, key))
        axes = {name: len(lines[0]) for name, lines in self.groups}
        return f"Mesh({axes}, ranks={list(self.ranks)}{options})"


def _asked_by_all(own: _Asked) -> list[_Asked]:
    """The meshes that ranks build at this moment, the same list on every rank; collective for more than one rank.

    Raises:
        ValueError: a rank is on a mesh for which it has not asked; on all ranks.
    """
    if len(own.ranks) == 1:
        return [own]
    asked: list[_Asked] = [pickle.loads(told) for told in all_gather_bytes(pickle.dumps(own))]  # signed by ranks
    for rank, wanted in enumerate(asked):
        for member in wanted.ranks:
            if asked[member] != wanted:
                raise ValueError(
                    f"ranks: rank {rank} builds {wanted}, while rank {member}, which is on it, builds {asked[member]}; "
                    "all ranks of a mesh build the same one at the same time"
                )
    # In rank order: torch pairs the calls of new_group by their order, so it must be the same on all ranks.
    return list(dict.fromkeys(asked))


def _retire_with(comm: Communicator, group: dist.ProcessGroup, transport: Transport) -> Callable[[], object]:
    """The call that retires the group: made by ``close()``, or when the communicator is collected as garbage.

    The latter is for a mesh that is dropped without ``close()``, as after an error. Ranks drop it at different times.
    gloo destroys a group on each rank by itself; NCCL needs all ranks at once, so there only ``close()`` does it.
    """
    # The call must not hold the communicator, which would then never be collected.
    end = partial(_end, group, transport)
    if dist.get_backend(group) == "gloo":
        return weakref.finalize(comm, retire, end)
    return partial(retire, end)


def _end(group: dist.ProcessGroup, transport: Transport) -> None:
    transport.close()
    if dist.is_initialized():  # who destroys the default group destroys all others with it
        dist.destroy_process_group(group)


def _check(axes: dict[str, int], ranks: tuple[int, ...], world_size: int) -> None:
    if not axes or any(type(size) is not int or size < 1 for size in axes.values()):
        raise ValueError(f"axes: {axes} is given; each axis needs a whole number of ranks, at least 1")
    if len(set(ranks)) != len(ranks) or any(not 0 <= rank < world_size for rank in ranks):
        raise ValueError(f"ranks: {list(ranks)} is given; distinct ranks from 0 to {world_size - 1} are needed")
    if (needed := prod(axes.values())) > world_size:
        inside = "make the mesh in the function that these run" if world_size == 1 else "start as many"
        raise ValueError(
            f"axes: {axes} hold {needed} ranks, but there are {world_size}; {inside}: RankPool({needed}), or torchrun "
            f"--nproc-per-node {needed}"
        )
    if needed != len(ranks):
        raise ValueError(
            f"axes: {axes} hold {needed} ranks, but there are {len(ranks)}; a mesh over some of the "
            "ranks names them, ranks=[0, 1]"
        )


def check_transport(backend: str, transport: str | None, link: object | None) -> None:
    """Raise ValueError unless these ranks can use the transport and the link.

    Args:
        backend: of torch.distributed, on these ranks.
        transport: a ``HostTransport``; None for any.
        link: one to be emulated; None for the real one.
    """
    if transport is not None and transport not in set(HostTransport):
        raise ValueError(f"transport: {transport!r} is not one of {', '.join(HostTransport)}")
    if backend != "nccl":
        return
    if transport is not None:
        raise ValueError(f"transport: these ranks send by NCCL, not {transport!r}; leave it out or use cpu")
    if link is not None:
        raise ValueError("link: these ranks send by NCCL, which cannot be delayed; leave it out or use cpu")


def _transport_of(
    group: dist.ProcessGroup, device: torch.device, link: Link | None = None, wanted: str | None = None
) -> Transport:
    """The transport of a group with more than one rank; every rank of it calls this.

    Args:
        group: this process is a member of it.
        device: where this rank's tensors live.
        link: to be emulated.
        wanted: a ``HostTransport`` if it must be that one.

    Raises:
        ValueError: ``wanted`` is not possible here.
    """
    if dist.get_backend(group) == "nccl":
        return NcclTransport(group)
    transport: Transport = _through_host(group, wanted)
    if device.type == "cuda":
        transport = StagedTransport(transport, device, dist.get_rank(group))
    # The link outermost: copies through the host then count as part of its time, and do not come on top of it.
    return transport if link is None else EmulatedLink(transport, link, dist.get_world_size(group))


def _through_host(group: dist.ProcessGroup, wanted: str | None) -> GlooTransport:
    buffers = None if wanted == HostTransport.GLOO else share_buffers(group, Process.timeout or default_pg_timeout)
    if buffers is not None:
        return SharedMemoryTransport(group, buffers)
    if wanted == HostTransport.SHARED_MEMORY:
        raise ValueError("transport: 'shared_memory' needs all ranks of an axis on one host with Linux; use 'gloo'")
    return GlooTransport(group)
