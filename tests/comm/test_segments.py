"""Large messages go in parts, which changes no bit: segments of a reduce-scatter, halves of an all-reduce."""

from itertools import product
from unittest import mock

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.comm.transports import gloo
from shardlab.comm.transports.gloo import HALVES_FROM_BYTES, SEGMENT_BYTES


def scattered(rank, bounds, segment_bytes, in_place):
    """This rank's chunk; what lies outside of it is as it was where the result goes elsewhere."""
    buffer = torch.randn(bounds[-1], generator=torch.Generator().manual_seed(rank))
    start, stop = bounds[rank], bounds[rank + 1]
    output = buffer[start:stop] if in_place else torch.empty(stop - start)
    kept = buffer.clone()
    small = mock.patch.object(gloo, "SEGMENT_BYTES", segment_bytes)
    with small, Mesh({"data": len(bounds) - 1}, transport="gloo") as mesh:
        mesh.data.reduce_scatter(buffer, output, bounds=bounds).wait()
    return output.clone(), in_place or torch.equal(buffer, kept)


@pytest.mark.parametrize("bounds", [(0, 11, 24), (0, 7, 7, 30), (0, 5, 17, 18, 40)], ids=["2", "3", "4"])
def test_segments_change_nothing(pools, bounds):
    num_ranks = len(bounds) - 1
    buffers = [torch.randn(bounds[-1], generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]
    expected = buffers[0].clone()
    for buffer in buffers[1:]:
        expected += buffer  # in the order of the ranks
    for segment_bytes, in_place in product((4, 12, SEGMENT_BYTES), (True, False)):
        results = pools(num_ranks).run(scattered, bounds, segment_bytes, in_place)
        for rank, (chunk, untouched) in enumerate(results):
            assert torch.equal(chunk, expected[bounds[rank] : bounds[rank + 1]])
            assert untouched


def reduced(rank, num_elements, halves_from):
    tensor = torch.arange(num_elements, dtype=torch.float64) + 1000 * rank
    small = mock.patch.object(gloo, "HALVES_FROM_BYTES", halves_from)
    with small, Mesh({"data": torch.distributed.get_world_size()}, transport="gloo") as mesh:
        mesh.data.all_reduce(tensor).wait()
    return tensor


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_halves_change_nothing(pools, num_ranks):
    for num_elements, halves_from in product((1, 2, 25), (0, HALVES_FROM_BYTES)):
        expected = num_ranks * torch.arange(num_elements, dtype=torch.float64) + 1000 * sum(range(num_ranks))
        for tensor in pools(num_ranks).run(reduced, num_elements, halves_from):
            assert torch.equal(tensor, expected)
