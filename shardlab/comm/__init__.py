"""The only room that calls torch.distributed: communicators, meshes, transports and the events they emit.

What is imported here is what an engine needs. ``comm.mesh`` makes a mesh over the running ranks,
``comm.torch_engine_groups`` the groups of torch's own engines.
"""

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.coalesced import broadcast_coalesced
from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, DeviceEvent, Observer, Pending, wait_all
from shardlab.comm.rank_life import become_rank, end_retired, leave_group

__all__ = [
    "BaseMesh", "CollectiveEvent", "Communicator", "DeviceEvent", "Observer", "Pending", "become_rank",
    "broadcast_coalesced", "end_retired", "leave_group", "wait_all",
]  # fmt: skip
