"""The one-function version against a plain linear layer, in float64."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.course.sharded_layer import sharded_linear
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


def of_any_shape(rank, leading, has_bias, dtype):
    """What one rank finds, and its share of what a plain layer gives: output, and gradients of x, weight and bias."""
    _, weight, bias = full(2)
    x = torch.randn(2, *leading, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = [tensor.float() if dtype else tensor for tensor in (x, weight, bias)][: 3 if has_bias else 2]
    plain = [tensor.clone().requires_grad_() for tensor in given]
    own = [part.clone().requires_grad_() for part in (given[0][rank], *(one.chunk(2)[rank] for one in given[1:]))]
    with Mesh({"data": 2}) as mesh:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = torch.nn.functional.linear(*plain)
            own_y = sharded_linear(*own, *[None] * (not has_bias), mesh.data)
        y.double().square().sum().backward()
        own_y.double().square().sum().backward()
    grads = [plain[0].grad[rank], *(tensor.grad.chunk(2)[rank] / 2 for tensor in plain[1:])]
    return (own_y.detach(), *(tensor.grad for tensor in own)), (y[rank].detach(), *grads)


def test_any_leading_dims_no_bias_and_autocast(pools):
    for leading, has_bias in (((), True), ((3,), False), ((2, 3), True)):
        for dtype, tolerance in ((None, (1e-12, 0)), (torch.bfloat16, (0.1, 0.02))):
            for found, expected in pools(2).run(of_any_shape, leading, has_bias, dtype):
                assert dtype is None or found[0].dtype == dtype
                torch.testing.assert_close(found, expected, atol=tolerance[0], rtol=tolerance[1])
