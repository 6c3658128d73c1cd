"""CUDA tensors through host memory: how much is copied, and where to; the device is made up."""

import torch

from shardlab.comm.transports.staged_and_emulated import StagedTransport
from tests.comm.device_streams import Device

BOUNDS = (0, 2, 5, 9)


class Inner:
    """Rank 1 of three: another rank's elements are 7."""

    def all_gather(self, buffer, bounds, tag=""):
        own = buffer[bounds[1] : bounds[2]].clone()
        buffer.fill_(7)
        buffer[bounds[1] : bounds[2]] = own

    def reduce_scatter(self, output, buffer, bounds, tag=""):
        output.copy_(3 * buffer[bounds[1] : bounds[2]])


class Staged(StagedTransport):
    """Takes every tensor for one on the device, and notes how many elements each copy has."""

    def __init__(self):
        super().__init__(Inner(), torch.device("cpu"), 1, Device())
        self.rooms, self.copied = [], []

    def _room_for(self, tensor):
        self.rooms.append(torch.full_like(tensor, -1))
        return self.rooms[-1]

    def _copy(self, target, source):
        to_host = any(target.untyped_storage()._cdata == room.untyped_storage()._cdata for room in self.rooms)
        self.copied.append(("to host" if to_host else "to device", target.numel()))
        super()._copy(target, source)


def test_a_gather_takes_only_the_own_chunk_to_the_host():
    staged, buffer = Staged(), torch.arange(9.0)
    staged.all_gather(buffer, BOUNDS)
    assert buffer.tolist() == [7, 7, 2, 3, 4, 7, 7, 7, 7]
    assert staged.copied == [("to host", 3), ("to device", 9)]


def test_a_reduce_scatter_takes_only_the_own_chunk_back():
    staged, buffer, output = Staged(), torch.arange(9.0), torch.empty(3)
    staged.reduce_scatter(output, buffer, BOUNDS)
    assert output.tolist() == [6, 9, 12]
    assert staged.copied == [("to host", 9), ("to device", 3)]
    assert len(staged.rooms) == 2  # both in pinned memory
