"""The one-function version against a plain linear layer, in float64."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.lab.sharded_linear import sharded_linear
from tests.comm.test_communicator import Log


def full(num_ranks):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(2 * num_ranks, 5), draw(3 * num_ranks, 5), draw(3 * num_ranks)


def sharded(rank, num_ranks):
    log = Log()
    x, weight, bias = full(num_ranks)
    with Mesh({"data": num_ranks}) as mesh, mesh.observed_by(log):
        own = x[2 * rank : 2 * rank + 2].clone().requires_grad_()
        weight_shard, bias_shard = (part[3 * rank : 3 * rank + 3].clone().requires_grad_() for part in (weight, bias))
        y = sharded_linear(own, weight_shard, bias_shard, mesh.data)
        y.square().mean().backward()
        events = [(event.op, event.tag, event.numel) for event in log.events]
    return y.detach(), own.grad, weight_shard.grad, bias_shard.grad, events


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equals_the_plain_layer(pools, num_ranks):
    x, weight, bias = (part.requires_grad_() for part in full(num_ranks))
    y = torch.nn.functional.linear(x, weight, bias)
    y.square().mean().backward()
    close = {"atol": 1e-12, "rtol": 0}
    for rank, (own_y, grad_x, grad_weight, grad_bias, events) in enumerate(pools(num_ranks).run(sharded, num_ranks)):
        torch.testing.assert_close(own_y, y[2 * rank : 2 * rank + 2].detach(), **close)
        torch.testing.assert_close(grad_x / num_ranks, x.grad[2 * rank : 2 * rank + 2], **close)
        torch.testing.assert_close(grad_weight, weight.grad[3 * rank : 3 * rank + 3], **close)
        torch.testing.assert_close(grad_bias, bias.grad[3 * rank : 3 * rank + 3], **close)
        assert events == [
            ("all_gather", "parameters: weight", weight.numel()),
            ("all_gather", "parameters: bias", bias.numel()),
            ("all_gather", "parameters: weight", weight.numel()),
            ("reduce_scatter", "gradients: weight", weight.numel()),
            ("reduce_scatter", "gradients: bias", bias.numel()),
        ]


def any_leading_dims(rank, leading, has_bias):
    """What one rank finds, and its share of what a plain layer gives: output, and gradients of x, weight and bias."""
    _, weight, bias = full(2)
    x = torch.randn(2, *leading, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    y = torch.nn.functional.linear(plain[0], plain[1], plain[2] if has_bias else None)
    y.square().sum().backward()
    own = [part.clone().requires_grad_() for part in (x[rank], weight.chunk(2)[rank], bias.chunk(2)[rank])]
    with Mesh({"data": 2}) as mesh:
        own_y = sharded_linear(own[0], own[1], own[2] if has_bias else None, mesh.data)
        own_y.square().sum().backward()
    own_grads = [tensor.grad for tensor in own[: 3 if has_bias else 2]]
    grads = [plain[0].grad[rank], *(tensor.grad.chunk(2)[rank] / 2 for tensor in plain[1 : 3 if has_bias else 2])]
    return (own_y.detach(), *own_grads), (y[rank].detach(), *grads)


def test_any_leading_dims_and_no_bias(pools):
    for leading, has_bias in (((), True), ((3,), False), ((2, 3), True)):
        for found, expected in pools(2).run(any_leading_dims, leading, has_bias):
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def under_autocast(rank, has_bias):
    """What one rank finds, and its share of what a plain layer gives, both computed in half precision."""
    x, weight, bias = (part.float() for part in full(2))
    plain = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    own = [part.chunk(2)[rank].clone().requires_grad_() for part in (x, weight, bias)]
    with Mesh({"data": 2}) as mesh:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.nn.functional.linear(plain[0], plain[1], plain[2] if has_bias else None)
            own_y = sharded_linear(own[0], own[1], own[2] if has_bias else None, mesh.data)
        y.float().square().sum().backward()
        own_y.float().square().sum().backward()
    grads = [plain[0].grad.chunk(2)[rank], *(t.grad.chunk(2)[rank] / 2 for t in plain[1 : 3 if has_bias else 2])]
    own_grads = [tensor.grad for tensor in own[: 3 if has_bias else 2]]
    return (own_y.detach(), *own_grads), (y.chunk(2)[rank].detach(), *grads)


def test_autocast_gives_the_dtypes_that_torch_gives(pools):
    for has_bias in (True, False):
        for found, expected in pools(2).run(under_autocast, has_bias):
            assert found[0].dtype == torch.bfloat16
            torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)


def refused(rank):
    log, messages = Log(), []
    with Mesh({"data": 2}) as mesh, mesh.observed_by(log):
        for x, weight, bias in (
            ((2, 4), (3, 5), (3,)),
            ((2, 5), (3, 5), (6,)),
            ((), (3, 5), (3,)),
            ((2, 5), (3,), (3,)),
        ):
            with pytest.raises(ValueError, match="is given") as error:
                sharded_linear(torch.ones(x), torch.ones(weight), torch.ones(bias), mesh.data)
            messages.append(str(error.value))
    return messages, len(log.events)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_sent(pools):
    for messages, num_sent in pools(2).run(refused):
        assert messages == [
            "x: shape (2, 4) is given; with this weight_shard it must be (..., 5)",
            "bias_shard: shape (6,) is given; beside this weight_shard it is (3,)",
            "x: shape () is given; with this weight_shard it must be (..., 5)",
            "weight_shard: shape (3,) is given; it must be (out / ranks, in)",
        ]
        assert num_sent == 0
