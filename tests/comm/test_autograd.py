"""The borders: forward and backward are what the table says, for every dim, for tensors of any strides."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from shardlab.comm import autograd_collectives as borders
from shardlab.comm.mesh import Mesh
from tests.comm.test_communicator import Log

DIMS = {"copy": None, "reduce": None, "gather": True, "scatter": True, "all_gather": True, "reduce_scatter": True}
# name: what goes over the wire forward, backward
SENT = {
    "copy": ([], ["all_reduce"]),
    "reduce": (["all_reduce"], []),
    "gather": (["all_gather"], []),
    "scatter": ([], ["all_gather"]),
    "all_gather": (["all_gather"], ["reduce_scatter"]),
    "reduce_scatter": (["reduce_scatter"], ["all_gather"]),
}


def inputs(num_ranks, seed=0):
    """Each rank's tensor, (4 N, 8 N, 12 N) / 4, whose last two dims are swapped in memory."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_ranks, 3 * num_ranks, 2 * num_ranks)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for _ in range(num_ranks)]


def cross(comm, name, dim, strided):
    x = inputs(comm.num_ranks)[comm.rank]
    x = (x if strided else x.contiguous()).requires_grad_()
    before = x.detach().clone()
    log = Log()
    with comm.observed_by(log):
        y = getattr(borders, name)(x, comm, *([] if dim is None else [dim]), tag="x")
        forward = [(str(e.op), e.tag) for e in log.events]
        gradient = gradient_of(y.shape, comm.rank).transpose(0, 1).contiguous().transpose(0, 1)  # strides of its own
        kept = gradient.clone()
        y.backward(gradient)
    assert torch.equal(gradient, kept)
    assert torch.equal(x.detach(), before)
    return y.detach(), x.grad, forward, [(str(e.op), e.tag) for e in log.events][len(forward) :]


CASES = [
    (name, dim, strided)
    for name in DIMS
    for dim in ((0, 1, 2, -1, -3) if DIMS[name] else (None,))
    for strided in (True, False)
]


def cross_all(rank):
    with Mesh({"tensor": torch.distributed.get_world_size()}) as mesh:
        return [cross(mesh["tensor"], *case) for case in CASES]


def gradient_of(shape, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 + rank), dtype=torch.float64)


def expected(name, dim, num_ranks):
    """All ranks' outputs and gradients, by plain torch."""
    x = inputs(num_ranks)
    y = {
        "copy": lambda: x,
        "reduce": lambda: [sum(x)] * num_ranks,
        "gather": lambda: [torch.cat(x, dim)] * num_ranks,
        "scatter": lambda: [part.chunk(num_ranks, dim)[rank] for rank, part in enumerate(x)],
        "all_gather": lambda: [torch.cat(x, dim)] * num_ranks,
        "reduce_scatter": lambda: list(sum(x).chunk(num_ranks, dim)),
    }[name]()
    g = [gradient_of(out.shape, rank) for rank, out in enumerate(y)]
    dx = {
        "copy": lambda: [sum(g)] * num_ranks,
        "reduce": lambda: g,
        "gather": lambda: [grad.chunk(num_ranks, dim)[rank] for rank, grad in enumerate(g)],
        "scatter": lambda: [torch.cat(g, dim)] * num_ranks,
        "all_gather": lambda: list(sum(g).chunk(num_ranks, dim)),
        "reduce_scatter": lambda: [torch.cat(g, dim)] * num_ranks,
    }[name]()
    return y, dx


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_forward_and_backward(pools, num_ranks):
    for (name, dim, _), *results in zip(CASES, *pools(num_ranks).run(cross_all), strict=True):
        for rank, (y, dx) in enumerate(zip(*expected(name, dim, num_ranks), strict=True)):
            found_y, found_dx, forward, backward = results[rank]
            torch.testing.assert_close(found_y, y, atol=1e-13, rtol=0)
            torch.testing.assert_close(found_dx, dx, atol=1e-13, rtol=0)
            assert forward == [(op, "x") for op in SENT[name][0]]
            assert backward == [(op, "gradient of x") for op in SENT[name][1]]


def check_gradients(rank):
    """A sum over all ranks of what each computes: numerical and analytical gradients agree, of second order too."""
    with Mesh({"tensor": 2}) as mesh:
        comm = mesh["tensor"]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 2, generator=generator, dtype=torch.float64, requires_grad=True)

        def alike(x):
            return borders.reduce((borders.copy(x, comm) * (rank + 1)) ** 3, comm)

        def by_parts(x):
            return borders.gather(borders.scatter(x, comm, 1) ** 3, comm, 1)

        def on_sequence(x):
            whole = borders.all_gather(borders.scatter(x, comm, 0), comm, 0)
            return borders.gather(borders.reduce_scatter((whole * (rank + 1)) ** 3, comm, 0), comm, 0)

        return [gradcheck(fn, x) and gradgradcheck(fn, x) for fn in (alike, by_parts, on_sequence)]


def test_gradients_of_first_and_second_order(pools):
    assert pools(2).run(check_gradients) == [[True] * 3] * 2


def around(rank, waits):
    """Each tensor passes all ranks; in which order what is done in backward, and the gradient."""
    with Mesh({"tensor": 3}) as mesh:
        comm, found, log = mesh["tensor"], [], Log()
        own = inputs(3)[rank].requires_grad_()
        travelling, total = own, 0
        for hop in range(3):
            arriving = borders.begin_shift(travelling, comm, tag=f"hop {hop + 1}") if hop < 2 else None
            if waits and arriving is not None:
                arriving = borders.end_shift(*arriving), None
            part = (travelling * (rank + 1)).sin()
            part.register_hook(
                lambda _, hop=hop: found.append((hop, [str(event.tag)[-1] for event in log.events[::2]]))
            )
            total = total + part
            if arriving is not None:
                travelling = arriving[0] if waits else borders.end_shift(*arriving)
        with comm.observed_by(log):
            total.sum().backward()
        return found, own.grad


def test_gradients_of_what_goes_around_travel_while_ranks_compute(pools):
    found, waited = (pools(3).run(around, waits) for waits in (False, True))
    for rank, ((order, gradient), (_, same)) in enumerate(zip(found, waited, strict=True)):
        x = inputs(3)[rank]
        wanted = sum((other + 1) * (x * (other + 1)).cos() for other in range(3))
        torch.testing.assert_close(gradient, wanted, atol=1e-13, rtol=0)
        assert torch.equal(gradient, same)
        # The part that came last first: its gradient is on its way before that of the part before it is computed.
        assert order == [(2, []), (1, ["2"]), (0, ["2", "1"])]


def exchanged(rank):
    with Mesh({"tensor": 2}) as mesh:
        x = torch.arange(4.0, requires_grad=True)
        borders.exchange((x * (rank + 1)).view(2, 2), mesh["tensor"]).sum().backward()  # a gradient with strides of 0
        return x.grad.tolist()


def test_a_gradient_that_sum_has_expanded_is_exchanged(pools):
    assert pools(2).run(exchanged) == [[1.0] * 4, [2.0] * 4]


def recomputed(rank, use_reentrant):
    with Mesh({"tensor": 2}) as mesh:
        comm = mesh["tensor"]
        x = inputs(2)[0].requires_grad_()
        log = Log()

        def region(x):
            return borders.reduce((borders.copy(x, comm, tag="x") * (rank + 1)).sin(), comm, tag="y")

        with comm.observed_by(log):
            checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
        plain = inputs(2)[0].requires_grad_()
        sum((plain * (other + 1)).sin() for other in range(2)).sum().backward()
        return torch.allclose(x.grad, plain.grad, atol=1e-13), [(str(e.op), e.tag) for e in log.events]


def test_activation_checkpointing_sends_again(pools):
    for use_reentrant in (True, False):
        for right, sent in pools(2).run(recomputed, use_reentrant):
            assert right
            assert sent[0] == ("all_reduce", "y")
            assert sent[-1] == ("all_reduce", "gradient of x")
            assert set(sent[1:-1]) <= {("all_reduce", "y")}


def test_a_group_of_one_moves_nothing():
    with Mesh({"tensor": 1}, ranks=[0]) as mesh:
        x = torch.randn(3, requires_grad=True)
        assert borders.copy(x, mesh["tensor"]) is x
        assert borders.gather(x, mesh["tensor"], 0) is x
        assert borders.reduce_scatter(x, mesh["tensor"], 0) is x


def uneven(rank):
    with Mesh({"tensor": 2}) as mesh:
        messages = []
        for name, dim in (("scatter", 0), ("reduce_scatter", 0), ("gather", 2)):
            with pytest.raises(ValueError, match=r".") as error:
                getattr(borders, name)(torch.zeros(3, 2), mesh["tensor"], dim, tag="x")
            messages.append(str(error.value))
        return messages


def test_sizes_that_do_not_divide_are_refused(pools):
    for messages in pools(2).run(uneven):
        assert messages == [
            "dim 0 of x: 3 does not divide over 2 tensor-parallel ranks; use 2 or 4",
            "dim 0 of x: 3 does not divide over 2 tensor-parallel ranks; use 2 or 4",
            "dim: 2 is not one of the 2 dims of x",
        ]
