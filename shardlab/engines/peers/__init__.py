"""Torch's own engines under our instruments. Read base, torch_ddp, dtensor_peer, torch_fsdp2, torch_tp."""

from shardlab.engines.peers.base import Peer
from shardlab.engines.peers.torch_ddp import TorchDDP, TorchZeRO1
from shardlab.engines.peers.torch_fsdp2 import TorchFSDP2
from shardlab.engines.peers.torch_tp import GPT_PLAN, TorchTP

__all__ = ["GPT_PLAN", "Peer", "TorchDDP", "TorchFSDP2", "TorchTP", "TorchZeRO1"]
