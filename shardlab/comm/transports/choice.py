"""Which transport a group of ranks uses: the fastest possible, or the one that was asked for.

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

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardlab.comm.observed_group import Process
from shardlab.comm.transports.base import Transport
from shardlab.comm.transports.gloo import GlooTransport
from shardlab.comm.transports.nccl import NcclTransport
from shardlab.comm.transports.rendezvous import share_buffers
from shardlab.comm.transports.shared_memory import SharedMemoryTransport
from shardlab.comm.transports.staged_and_emulated import EmulatedLink, StagedTransport
from shardlab.partition.ring_cost import Link
from shardlab.vocabulary import HostTransport


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


def transport_of(
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
