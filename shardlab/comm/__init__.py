"""The only room that calls torch.distributed: communicators, meshes, transports and the events they emit."""

from shardlab.comm.communicator import Communicator
from shardlab.comm.copies import broadcast_coalesced
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.comm.mesh import Mesh
from shardlab.comm.pending import Pending, wait_all
from shardlab.comm.process import become_rank, leave_group
from shardlab.comm.transports.choice import check_transport

__all__ = [
    "CollectiveEvent",
    "Communicator",
    "Mesh",
    "Observer",
    "Pending",
    "become_rank",
    "broadcast_coalesced",
    "check_transport",
    "leave_group",
    "wait_all",
]
