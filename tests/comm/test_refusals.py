"""What a verb refuses before anything is sent: tensors that do not fit, unknown words, tensors with a graph.

And what ranks refuse that meet with different tensors: nobody takes another's bytes for numbers of its own. (But in
gloo's own all-reduce, which compares neither dtypes nor reductions.)
"""

import numpy as np
import pytest
import torch

from shardlab.comm.autograd_collectives import copy
from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.mesh import Mesh
from shardlab.comm.transports.base import MismatchError
from shardlab.launch import RankHang, RankPool


def refused(call):
    """The field that the error names first."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    return str(caught.value).partition(":")[0]


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def wrong_calls(comm, rank):
    """(call, the field that its error names)"""
    weight, plain, ones = torch.ones(4, requires_grad=True), torch.zeros(4), torch.ones(4)
    taped, column = weight.sigmoid(), torch.zeros(4, 2)[:, 0]
    square = torch.nn.Parameter(torch.ones(4, 4))
    return [
        (lambda: comm.reduce_scatter(torch.ones(3)), "buffer"),
        (lambda: comm.all_gather(torch.ones(2, 2)), "buffer"),
        (lambda: comm.reduce_scatter(ones, bounds=(0, 1)), "bounds"),
        (lambda: comm.send(torch.ones(1), dst=rank), "dst"),
        (lambda: comm.broadcast(torch.ones(1), src=2), "src"),
        (lambda: comm.broadcast(torch.ones(1), src=-1), "src"),
        (lambda: comm.all_reduce(ones, reduction="mean"), "reduction"),
        # An output of a reduce-scatter fits the chunk.
        (lambda: comm.reduce_scatter(torch.ones(8), torch.zeros(8)[:2]), "output"),
        (lambda: comm.reduce_scatter(torch.ones(8), torch.zeros(6)), "output"),
        (lambda: comm.reduce_scatter(torch.ones(8), torch.zeros(2, 2)), "output"),
        (lambda: comm.reduce_scatter(torch.ones(8), column), "output"),
        (lambda: comm.reduce_scatter(torch.ones(8), plain.double()), "output"),
        # A gathered chunk fits its place.
        (lambda: comm.all_gather(torch.zeros(8), torch.ones(1)), "chunk"),  # would be broadcast
        (lambda: comm.all_gather(plain, ints(2**24 + 1, 5)), "chunk"),
        (lambda: comm.all_gather(torch.zeros(4, dtype=torch.int64), torch.tensor([1.7, 2.2])), "chunk"),
        (lambda: comm.all_gather(torch.zeros(8), bounds=(2, 4, 8)), "bounds"),
        (lambda: comm.all_gather(torch.zeros(8), bounds=(0, 9, 8)), "bounds"),
        # What is exchanged fits.
        (lambda: comm.all_to_all(plain, torch.arange(4, dtype=torch.int32)), "output"),
        (lambda: comm.all_to_all(torch.zeros(2, 2), ones), "output"),
        (lambda: comm.all_to_all(torch.zeros(3), torch.ones(3)), "buffer"),
        (lambda: comm.all_to_all(torch.zeros(8), ones), "output"),
        # A tensor has no graph, and is no view of a parameter by a function with a backward of its own.
        (lambda: comm.all_reduce(taped), "tensor"),
        (lambda: comm.broadcast(taped), "tensor"),
        (lambda: comm.reduce_scatter(taped), "buffer"),
        (lambda: comm.reduce_scatter(plain, taped[:2]), "output"),
        (lambda: comm.all_gather(plain, taped[:2]), "chunk"),
        (lambda: comm.all_gather(taped), "buffer"),
        (lambda: comm.all_to_all(plain, taped), "buffer"),
        (lambda: comm.recv(taped, 1 - rank), "tensor"),
        (lambda: comm.all_reduce(copy(square, comm)), "tensor"),
        (lambda: comm.broadcast(copy(square.t(), comm)[1:].t()), "tensor"),
        (lambda: Mesh({"data": 3}), "axes"),
        (lambda: Mesh({"data": 2}, ranks=[0, 5]), "ranks"),
    ]


def named(rank):
    with Mesh({"data": 2}) as mesh:
        fields = [(refused(call), field) for call, field in wrong_calls(mesh.data, rank)]
        return [*fields, (refused(lambda: mesh["tensor"]), "axis")]


def test_wrong_calls_name_the_field(pools):
    for fields in pools(2).run(named):
        for number, (found, field) in enumerate(fields):
            assert found == field, number


def gathered(rank):
    """Chunks of other dtypes and shapes, and of parameters; nothing has a graph of the own part alone."""
    chunks = [
        torch.full((2,), rank + 1.0, dtype=torch.float64),
        torch.full((1, 2), rank + 1.0),
        torch.nn.Parameter(torch.full((2,), rank + 1.0)),
    ]
    with Mesh({"data": 2}) as mesh:
        for chunk in chunks:
            mesh.data.all_gather(buffer := torch.zeros(4), chunk).wait()
            assert (buffer.tolist(), buffer.requires_grad) == ([1.0, 1.0, 2.0, 2.0], False)
        mesh.data.all_gather(number := torch.zeros(2), torch.tensor(float(rank)), bounds=[0, 1, 2]).wait()
        assert number.tolist() == [0.0, 1.0]
        mesh.data.all_reduce(weight := torch.ones(4, requires_grad=True)).wait()
        mesh.data.all_reduce(weight.sigmoid().detach()).wait()
        with torch.no_grad():
            mesh.data.all_reduce(weight * 2).wait()
    return weight.tolist()


def test_what_fits_without_being_alike(pools):
    assert pools(2).run(gathered) == [[2.0] * 4] * 2


ROUNDED = (  # chunk and buffer
    (torch.int32, torch.int64),
    (torch.uint8, torch.int16),
    (torch.float64, torch.float16),
    (torch.float32, torch.float8_e5m2),
    (torch.complex128, torch.complex64),
)
REFUSED = (
    (torch.int64, torch.int32),
    (torch.int8, torch.uint8),
    (torch.int32, torch.float64),
    (torch.bool, torch.int32),
    (torch.int32, torch.bool),
    (torch.complex64, torch.float32),
    (torch.float32, torch.complex64),
)


def test_a_chunk_is_rounded_or_widened_and_nothing_else():
    gather = BaseMesh.alone().data.all_gather
    for given, needed in ROUNDED:
        buffer = torch.zeros(2, dtype=needed)
        gather(buffer, torch.tensor([1, 2]).to(given))
        assert buffer.to(given).tolist() == [1, 2]
    for given, needed in REFUSED:
        assert refused(lambda pair=(needed, given): gather(*(torch.zeros(2, dtype=of) for of in pair))) == "chunk"


def test_what_to_do_is_said():
    vector = torch.nn.utils.parameters_to_vector(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"^tensor: the result of CatBackward0.*; pass tensor\.detach\(\)"):
        BaseMesh.alone().data.broadcast(vector)
    assert refused(lambda: BaseMesh.alone().data.all_reduce(torch.ones(2), reduction="mean")) == "reduction"


def with_views_of_a_leaf(rank):
    """What verbs leave in the memory of a parameter."""
    weight, columns = torch.nn.Parameter(torch.full((2, 2), rank + 1.0)), torch.nn.Parameter(torch.ones(4, 4))
    with Mesh({"data": 2}) as mesh:
        mesh.data.all_reduce(weight.view(-1)).wait()
        mesh.data.reduce_scatter(torch.ones(4), weight.view(-1)[:2]).wait()
        mesh.data.all_reduce(columns[1:].view(2, 6).t()).wait()
    return weight.tolist(), columns.sum().item()


def test_a_view_of_a_parameter_is_as_good_as_the_parameter(pools):
    assert pools(2).run(with_views_of_a_leaf) == [([[2.0, 2.0], [3.0, 3.0]], 4 + 2 * 12)] * 2


def fours(rank):
    """Four ones of another dtype on each rank, and as many bytes."""
    return torch.ones(4, dtype=(torch.float32, torch.int32)[rank])


MEETINGS = {
    "reduction": lambda comm, rank: comm.all_reduce(torch.ones(4), reduction=("sum", "max")[rank]),
    "bounds of a gather": lambda comm, rank: comm.all_gather(torch.ones(8), bounds=(0, 3 + rank, 8)),
    "bounds of a scatter": lambda comm, rank: comm.reduce_scatter(torch.ones(8), bounds=(0, 3 + rank, 8)),
    "root": lambda comm, rank: comm.broadcast(torch.ones(4), src=rank),
    "dtype": lambda comm, rank: comm.broadcast(fours(rank)),
    "length": lambda comm, rank: comm.broadcast(torch.ones(4 + rank)),
    "dtype of an exchange": lambda comm, rank: comm.all_to_all(fours(rank), fours(rank)),
    "dtype of a gather": lambda comm, rank: comm.all_gather(fours(rank)),
    "dtype of a scatter": lambda comm, rank: comm.reduce_scatter(fours(rank)),
    "collective": lambda comm, rank: (comm.broadcast, comm.all_reduce)[rank](torch.ones(4)),
}
OVER_GLOO = {  # not the reduction, which gloo does not notice
    **{kind: MEETINGS[kind] for kind in ("bounds of a scatter", "root")},
    "dtype of a message": lambda comm, rank: (comm.recv if rank else comm.send)(fours(rank), 1 - rank),
    "length of an exchange": lambda comm, rank: comm.all_to_all(torch.ones(4 + 2 * rank), torch.ones(4 + 2 * rank)),
}


def meeting(rank):
    for meet in MEETINGS.values():
        with Mesh({"data": 2}, transport="shared_memory") as mesh:
            pending = meet(mesh.data, rank)
            with pytest.raises(MismatchError, match="meets"):
                pending.wait()


def test_through_shared_memory_different_calls_do_not_meet(pools):
    pools(2).run(meeting)


def of_any_size(rank):
    """Bounds are equal whatever integers they are."""
    bounds, src = ((0, 1, 4), 0) if rank else (np.array([0, 1, 4]), np.int64(0))
    found = []
    for transport in ("shared_memory", "gloo"):
        with Mesh({"data": 2}, transport=transport) as mesh:
            buffer = torch.full((4,), rank + 1.0)
            mesh.data.all_gather(buffer, bounds=bounds).wait()
            found.append(buffer.tolist())
            mesh.data.reduce_scatter(buffer, bounds=bounds).wait()
            mesh.data.broadcast(buffer, src).wait()
            found.append(buffer.tolist()[0])
    return found


def test_sizes_that_are_equal_or_agreed_meet(pools):
    alike = [[1.0, 2.0, 2.0, 2.0], 2.0]
    assert pools(2).run(of_any_size) == [alike * 2] * 2


@pytest.fixture(scope="module")
def short_pool():
    with RankPool(2, device="cpu", timeout_s=1.0) as pool:
        yield pool


def meeting_over_gloo(rank, kind):
    with Mesh({"data": 2}, transport="gloo") as mesh:
        OVER_GLOO[kind](mesh.data, rank).wait()


@pytest.mark.parametrize("kind", OVER_GLOO)
def test_over_gloo_different_calls_wait_and_are_reported(short_pool, kind):
    with pytest.raises(RankHang) as caught:
        short_pool.run(meeting_over_gloo, kind)
    assert caught.value.waiting == (0, 1)


def leaf_of_another_tree(rank):
    with Mesh({"data": 4}, transport="gloo") as mesh:
        # Rank 3 is the parent of rank 1 in both trees, and rank 1 is a leaf of both.
        mesh.data.broadcast(torch.full((4,), float(rank)), src=2 if rank == 1 else 3).wait()


def test_over_gloo_another_root_waits_where_the_tree_would_do():
    with RankPool(4, device="cpu", timeout_s=1.0) as pool, pytest.raises(RankHang) as caught:
        pool.run(leaf_of_another_tree)
    assert 1 in caught.value.waiting
