"""What a verb refuses before anything is sent: tensors that do not fit, unknown words, tensors with a graph.

And what ranks refuse that meet with different tensors: nobody takes another's bytes for numbers of its own. (But in
gloo's own all-reduce, which compares neither dtypes nor reductions.)
"""

import numpy as np
import pytest
import torch

from shardlab.comm.autograd import copy
from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.mesh import Mesh
from shardlab.comm.transports.base import MismatchError, exchange_sizes
from shardlab.launch import RankHang, RankPool


def refused(*calls):
    """Of each call, the field that its error names first."""
    fields = []
    for call in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        fields.append(str(caught.value).partition(":")[0])
    return fields


def wrong_calls(rank):
    with Mesh({"data": 2}) as mesh:
        return refused(
            lambda: mesh.data.reduce_scatter(torch.ones(3)),
            lambda: mesh.data.all_gather(torch.ones(2, 2)),
            lambda: mesh.data.reduce_scatter(torch.ones(4), bounds=(0, 1)),
            lambda: mesh.data.send(torch.ones(1), dst=rank),
            lambda: mesh.data.broadcast(torch.ones(1), src=2),
            lambda: mesh.data.broadcast(torch.ones(1), src=-1),
            lambda: mesh["tensor"],
            lambda: Mesh({"data": 3}),
            lambda: Mesh({"data": 2}, ranks=[0, 5]),
        )


def test_wrong_calls_name_the_field(pools):
    assert (
        pools(2).run(wrong_calls) == [["buffer", "buffer", "bounds", "dst", "src", "src", "axis", "axes", "ranks"]] * 2
    )


OUTPUTS = {
    "too short": torch.zeros(8)[:2],
    "too long": torch.zeros(6),
    "2-D": torch.zeros(2, 2),
    "strided": torch.zeros(4, 2)[:, 0],
    "double": torch.zeros(4).double(),
}


def reduce_scattered_into(rank, output):
    with Mesh({"data": 2}) as mesh:
        fields = refused(lambda: mesh.data.reduce_scatter(torch.ones(8), output))
    return fields, output.untyped_storage().tolist() == [0] * output.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_of_a_reduce_scatter_fits_the_chunk(pools, kind):
    assert pools(2).run(reduce_scattered_into, OUTPUTS[kind]) == [(["output"], True)] * 2


def gathered_from(rank):
    with Mesh({"data": 2}) as mesh:
        fields = refused(
            lambda: mesh.data.all_gather(torch.zeros(8), torch.ones(1)),  # would be broadcast
            lambda: mesh.data.all_gather(torch.zeros(4), torch.tensor([2**24 + 1, 5])),
            lambda: mesh.data.all_gather(torch.zeros(4, dtype=torch.int64), torch.tensor([1.7, 2.2])),
            lambda: mesh.data.all_gather(torch.zeros(8), bounds=(2, 4, 8)),
            lambda: mesh.data.all_gather(torch.zeros(8), bounds=(0, 9, 8)),
        )
        rounded = torch.zeros(4, dtype=torch.bfloat16)
        mesh.data.all_gather(rounded, torch.full((2,), rank + 1.0)).wait()
        number = torch.zeros(2)
        mesh.data.all_gather(number, torch.tensor(float(rank)), bounds=[0, 1, 2]).wait()
        shaped = [torch.zeros(8) for _ in range(2)]
        mesh.data.all_gather(shaped[0], torch.full((2, 2), rank + 1.0)).wait()
        mesh.data.all_gather(shaped[1], torch.full((1, 4), rank + 1.0)).wait()
        assert all(gathered.tolist() == [1.0] * 4 + [2.0] * 4 for gathered in shaped)
    return fields, rounded.tolist(), number.tolist()


def test_a_gathered_chunk_fits_its_place(pools):
    fields = ["chunk", "chunk", "chunk", "bounds", "bounds"]
    assert pools(2).run(gathered_from) == [(fields, [1.0, 1.0, 2.0, 2.0], [0.0, 1.0])] * 2


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
    (torch.int16, torch.uint16),
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
        assert refused(lambda pair=(given, needed): gather(*(torch.zeros(2, dtype=of) for of in pair[::-1]))) == [
            "chunk"
        ]


def exchanged(rank):
    with Mesh({"data": 2}) as mesh:
        return refused(
            lambda: mesh.data.all_to_all(torch.zeros(4), torch.arange(4, dtype=torch.int32)),
            lambda: mesh.data.all_to_all(torch.zeros(2, 2), torch.ones(4)),
            lambda: mesh.data.all_to_all(torch.zeros(4), torch.ones(4), sizes=[5, -1]),
            lambda: mesh.data.all_to_all(torch.zeros(4), torch.ones(4), output_sizes=[1, 2]),
            lambda: mesh.data.all_to_all(torch.zeros(4), torch.ones(3)),
            # What a rank sends itself is as long in both: the other rank could not know, and would wait.
            lambda: mesh.data.all_to_all(torch.zeros(4), torch.ones(4), output_sizes=[3, 1], sizes=[1, 3]),
            lambda: mesh.data.all_to_all(torch.zeros(8), torch.ones(4)),
        )


def test_what_is_exchanged_fits(pools):
    fields = ["output", "output", "sizes", "output_sizes", "buffer", "output", "output"]
    assert pools(2).run(exchanged) == [fields] * 2


def test_an_exchange_that_does_not_divide_names_its_sizes():
    for sizes, message in (
        (None, r"^output: 3 elements .* 2 equal parts; pass output_sizes$"),
        ([4, -1], r"^output_sizes: \[4, -1\] is given; 2 numbers, none of them negative, .* 3 are needed$"),
    ):
        with pytest.raises(ValueError, match=message):
            exchange_sizes(torch.zeros(3), torch.zeros(4), sizes, None, num_ranks=2, rank=0)


def with_a_graph(rank):
    weight = torch.ones(4, requires_grad=True)
    taped, plain = weight.sigmoid(), torch.zeros(4)
    with Mesh({"data": 2}) as mesh:
        comm = mesh.data
        fields = refused(
            lambda: comm.all_reduce(taped),
            lambda: comm.broadcast(taped),
            lambda: comm.reduce_scatter(taped),
            lambda: comm.reduce_scatter(plain, taped[:2]),
            lambda: comm.all_gather(plain, taped[:2]),
            lambda: comm.all_gather(taped),
            lambda: comm.all_to_all(plain, taped),
            lambda: comm.recv(taped, 1 - rank),
        )
        # Of a parameter, and without a graph, all is as before; the buffer gets no graph of the own part alone.
        comm.all_reduce(weight).wait()
        comm.all_gather(plain, weight[:2].detach()).wait()
        comm.all_gather(plain, torch.nn.Parameter(torch.full((2,), rank + 1.0))).wait()
        comm.all_reduce(taped.detach()).wait()
        with torch.no_grad():
            comm.all_reduce(weight * 2).wait()
    return fields, plain.tolist(), plain.requires_grad, weight.tolist()


def test_a_tensor_with_a_graph_is_refused(pools):
    fields = ["tensor", "tensor", "buffer", "output", "chunk", "buffer", "buffer", "tensor"]
    assert pools(2).run(with_a_graph) == [(fields, [1.0, 1.0, 2.0, 2.0], False, [2.0] * 4)] * 2


def with_views_of_a_leaf(rank):
    """What each verb leaves in the memory of a parameter."""
    left = []
    with Mesh({"data": 2}) as mesh:
        comm = mesh.data
        for call in (
            lambda view: comm.all_reduce(view),
            lambda view: comm.broadcast(view, 1),
            lambda view: comm.reduce_scatter(view),
            lambda view: comm.reduce_scatter(torch.ones(8), view),
            lambda view: comm.all_gather(view, torch.full((2,), rank + 3.0)),
            lambda view: comm.all_to_all(view, torch.arange(4.0) + rank),
            lambda view: (comm.recv if rank else comm.send)(view, 1 - rank),
        ):
            weight = torch.nn.Parameter(torch.full((2, 2), rank + 1.0))
            call(weight.view(-1)).wait()
            left.append(weight.flatten().tolist())
    return left


def test_a_view_of_a_parameter_is_as_good_as_the_parameter(pools):
    for rank, left in enumerate(pools(2).run(with_views_of_a_leaf)):
        assert left == [
            [3.0] * 4,
            [2.0] * 4,
            [[3.0, 3.0, 1.0, 1.0], [2.0, 2.0, 3.0, 3.0]][rank],
            [2.0] * 4,
            [3.0, 3.0, 4.0, 4.0],
            [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank],
            [1.0] * 4,
        ]


def with_views_that_have_a_backward_of_their_own(rank):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with Mesh({"data": 2}) as mesh:
        fields = refused(
            lambda: mesh.data.all_reduce(copy(weight, mesh.data)),
            lambda: mesh.data.broadcast(copy(weight.t(), mesh.data)[1:].t()),
        )
        mesh.data.all_reduce(weight[1:].view(2, 6).t()).wait()
    return fields, weight.sum().item()


def test_a_view_of_a_parameter_by_a_function_with_a_backward_of_its_own_is_refused(pools):
    assert pools(2).run(with_views_that_have_a_backward_of_their_own) == [(["tensor"] * 2, 4 + 2 * 12)] * 2


def test_what_to_do_with_a_graph_is_said():
    vector = torch.nn.utils.parameters_to_vector(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"^tensor: the result of CatBackward0.*; pass tensor\.detach\(\)"):
        BaseMesh.alone().data.broadcast(vector)


def unknown_reductions(rank):
    with Mesh({"data": 2}) as mesh:
        return refused(*(lambda word=word: mesh.data.all_reduce(torch.ones(2), reduction=word) for word in WORDS))


WORDS = ("mean", "min")


def test_an_unknown_reduction_is_refused_at_the_call(pools):
    assert pools(2).run(unknown_reductions) == [["reduction"] * 2] * 2
    alone = BaseMesh.alone()
    assert refused(lambda: alone.data.all_reduce(torch.ones(2), reduction="mean")) == ["reduction"]


DTYPES = (torch.float32, torch.int32)
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
OVER_GLOO = {
    **{kind: meet for kind, meet in MEETINGS.items() if kind != "reduction"},  # which gloo does not notice
    "dtype of a message": lambda comm, rank: (comm.recv if rank else comm.send)(fours(rank), 1 - rank),
    "length of a message": lambda comm, rank: (comm.recv if rank else comm.send)(torch.ones(4 + rank), 1 - rank),
    "length of an exchange": lambda comm, rank: comm.all_to_all(
        torch.ones(4), torch.ones(4), output_sizes=[1, 3], sizes=[1, 3]
    ),
}


def fours(rank):
    """Four ones of another dtype on each rank, and as many bytes."""
    return torch.ones(4, dtype=DTYPES[rank])


def meeting(rank, kind):
    with Mesh({"data": 2}, transport="shared_memory") as mesh:
        pending = MEETINGS[kind](mesh.data, rank)
        with pytest.raises(MismatchError, match="meets"):
            pending.wait()


@pytest.mark.parametrize("kind", MEETINGS)
def test_through_shared_memory_different_calls_do_not_meet(pools, kind):
    pools(2).run(meeting, kind)


def gathered_by_other_integers(rank, transport):
    bounds, src = ((0, 1, 4), 0) if rank else (np.array([0, 1, 4]), np.int64(0))
    with Mesh({"data": 2}, transport=transport) as mesh:
        buffer = torch.full((4,), rank + 1.0)
        mesh.data.all_gather(buffer, bounds=bounds).wait()
        gathered = buffer.tolist()
        mesh.data.reduce_scatter(buffer, bounds=bounds).wait()
        mesh.data.broadcast(buffer, src).wait()
    return gathered, buffer.tolist()[0]


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_equal_bounds_meet_whatever_integers_they_are(pools, transport):
    assert pools(2).run(gathered_by_other_integers, transport) == [([1.0, 2.0, 2.0, 2.0], 2.0)] * 2


def exchanges_of_any_size(rank):
    with Mesh({"data": 2}, transport="shared_memory") as mesh:
        sent, received = torch.full((3 + rank,), float(rank)), torch.zeros(2 + 3 * rank)
        sizes = ((1, 2), (1, 3))
        mesh.data.all_to_all(received, sent, output_sizes=[pair[rank] for pair in sizes], sizes=sizes[rank]).wait()
    return received.tolist()


def test_in_an_exchange_ranks_send_as_much_as_they_like(pools):
    assert pools(2).run(exchanges_of_any_size) == [[0, 1], [0, 0, 1, 1, 1]]


@pytest.fixture(scope="module")
def short_pool():
    with RankPool(2, device="cpu", timeout_s=1.0) as pool:
        yield pool


def meeting_over_gloo(rank, kind):
    with Mesh({"data": 2}, transport="gloo") as mesh:
        OVER_GLOO[kind](mesh.data, rank).wait()


def leaf_of_another_tree(rank):
    with Mesh({"data": 4}, transport="gloo") as mesh:
        # Rank 3 is the parent of rank 1 in both trees, and rank 1 is a leaf of both.
        mesh.data.broadcast(torch.full((4,), float(rank)), src=2 if rank == 1 else 3).wait()


def test_over_gloo_another_root_waits_where_the_tree_would_do():
    with RankPool(4, device="cpu", timeout_s=1.0) as pool, pytest.raises(RankHang) as caught:
        pool.run(leaf_of_another_tree)
    assert 1 in caught.value.waiting


@pytest.mark.parametrize("kind", OVER_GLOO)
def test_over_gloo_different_calls_wait_and_are_reported(short_pool, kind):
    with pytest.raises(RankHang) as caught:
        short_pool.run(meeting_over_gloo, kind)
    assert caught.value.waiting == (0, 1)
