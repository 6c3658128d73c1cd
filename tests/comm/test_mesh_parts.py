"""Parts and products of axes: their ranks, their sums, who observes them, and the same groups where none is there."""

import contextlib

import pytest
import torch

from shardlab.comm import BaseMesh
from shardlab.comm.foretold import ForetoldMesh
from shardlab.comm.mesh import Mesh
from shardlab.partition.ring_cost import Link

ALL = {"data": 4}
GRID = {"replica": 2, "shard": 2}


class Seen:
    def __init__(self):
        self.axes = []

    def issued(self, event):
        self.axes.append((event.axis, event.group_size, event.emulated))

    def started(self, event):
        pass

    completed = waited = started


def parts(mesh):
    """Two cuts and a product, whatever the mesh."""
    if "data" in mesh.axes:
        return *mesh.split("data", inner=2), mesh.flatten("data")
    return *mesh.split("shard", inner=1), mesh.flatten("replica", "shard")


def groups_of(rank, axes, link):
    before, inside = Seen(), Seen()
    with Mesh(axes, link=link) as mesh, mesh.observed_by(before):
        made = parts(mesh)
        with mesh.observed_by(inside):
            sums = [torch.full((3,), float(rank + 1)) for _ in made]
            for comm, value in zip(made, sums, strict=True):
                comm.all_reduce(value).wait()
        assert parts(mesh) == made  # the same objects
        made[-1].all_reduce(torch.ones(1)).wait()
    return [(comm.axis, comm.ranks) for comm in made], [float(value[0]) for value in sums], before.axes, inside.axes


@pytest.mark.parametrize("axes", [ALL, GRID], ids=["data", "replica and shard"])
def test_parts_and_products_add_up_are_observed_and_foretold(pools, axes):
    results = pools(4).run(groups_of, axes, Link.parse("10Gbps,10us"))
    for rank, (groups, sums, before, inside) in enumerate(results):
        assert sums == [float(sum(one + 1 for one in ranks)) for _, ranks in groups]
        assert inside == [(axis, len(ranks), True) for axis, ranks in groups if len(ranks) > 1]
        assert before == [*inside, (groups[-1][0], 4, True)]
        foretold = ForetoldMesh(axes, rank)
        assert [(comm.axis, comm.ranks) for comm in parts(foretold)] == groups
    outer, inner, _ = results[1][0]
    if axes is ALL:
        assert (outer, inner) == (("data.outer", (1, 3)), ("data.inner", (0, 1)))
    else:  # a group of one is right, too
        assert (outer, inner) == (("shard.outer", (0, 1)), ("shard.inner", (1,)))


def two_halves(rank):
    own = [0, 2] if rank in (0, 2) else [1, 3]
    with Mesh({"data": 2}, ranks=own) as mesh:
        outer, inner = mesh.split("data", inner=2)
        value = torch.full((1,), float(rank))
        inner.all_reduce(value).wait()
        return outer.ranks, inner.ranks, float(value)


def test_two_meshes_cut_their_axes_at_once(pools):
    results = pools(4).run(two_halves)
    assert results == [((rank,), own, float(sum(own))) for rank, own in enumerate([(0, 2), (1, 3)] * 2)]


def test_what_cannot_be_cut_is_refused():
    mesh = ForetoldMesh({"replica": 2, "shard": 6}, 0)
    for refused, said in (
        (lambda: mesh.split("data", inner=2), r"axis: 'data' is not on this mesh; it has replica, shard"),
        (lambda: mesh.split("shard", inner=4), r"inner: 4 does not divide the 6 ranks of axis 'shard'; use 1, 2, 3, 6"),
        (lambda: mesh.split("shard", inner=0), r"inner: 0 does not divide"),
        (lambda: mesh.flatten("shard", "replica"), r"\['shard', 'replica'\] is given; give axes of \['replica', 'sh"),
        (lambda: mesh.flatten("shard", "shard"), r"each once"),
        (lambda: mesh.flatten(), r"axes: \[\]"),
        (lambda: mesh.flatten("tensor"), r"axis: 'tensor' is not on this mesh"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            refused()
    assert [comm.ranks for comm in mesh.split("shard", inner=3)] == [(0, 3), (0, 1, 2)]
    with pytest.raises(ValueError, match=r"inner: 2 is given, and axis 'shard' is cut into groups of 3 already"):
        mesh.split("shard", inner=2)
    with contextlib.closing(BaseMesh.alone()) as alone:
        assert [comm.num_ranks for comm in alone.split("data", inner=1)] == [1, 1]
