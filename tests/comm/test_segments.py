"""A reduce-scatter in many segments sums what one in a single segment sums, bit for bit, and holds less."""

import pytest
import torch

from shardlab.comm import Mesh
from shardlab.comm.transports import gloo
from shardlab.comm.transports.gloo import SEGMENT_BYTES, GlooTransport


def scattered(rank, bounds, segment_bytes, in_place):
    """This rank's chunk; what lies outside of it is as it was where the result goes elsewhere."""
    before, gloo.SEGMENT_BYTES = gloo.SEGMENT_BYTES, segment_bytes
    try:
        buffer = torch.randn(bounds[-1], generator=torch.Generator().manual_seed(rank))
        start, stop = bounds[rank], bounds[rank + 1]
        output = buffer[start:stop] if in_place else torch.empty(stop - start)
        kept = buffer.clone()
        with Mesh({"data": len(bounds) - 1}) as mesh:
            mesh.data.reduce_scatter(buffer, output, bounds=bounds).wait()
        return output.clone(), in_place or torch.equal(buffer, kept)
    finally:
        gloo.SEGMENT_BYTES = before


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("bounds", [(0, 11, 24), (0, 7, 7, 30), (0, 5, 17, 18, 40)], ids=["2", "3", "4"])
def test_segments_change_nothing(pools, bounds, in_place):
    num_ranks = len(bounds) - 1
    buffers = [torch.randn(bounds[-1], generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]
    expected = buffers[0].clone()
    for buffer in buffers[1:]:
        expected += buffer  # in the order of the ranks
    for segment_bytes in (4, 12, SEGMENT_BYTES):
        results = pools(num_ranks).run(scattered, bounds, segment_bytes, in_place)
        for rank, (chunk, untouched) in enumerate(results):
            assert torch.equal(chunk, expected[bounds[rank] : bounds[rank + 1]])
            assert untouched


def scratch(rank):
    transport = GlooTransport(torch.distributed.group.WORLD)
    whole = 3 * (SEGMENT_BYTES + 8)
    return [transport.scratch_bytes(size, reduces_and_scatters=True) for size in (12, whole)]


def test_what_is_held_is_a_segment_from_each_other_rank(pools):
    assert pools(3).run(scratch) == [[2 * 4, 2 * SEGMENT_BYTES]] * 3
