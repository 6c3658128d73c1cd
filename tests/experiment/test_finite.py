"""On which rank numbers stopped being numbers: one rank's own look."""

from math import inf, nan

import pytest
import torch
from torch import nn

from shardlab.experiment.run.rank_checks import GRADIENTS, LOSS, FiniteCheck


def backward(model, factor, rows):
    model(rows).mul(factor).sum().backward()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, nan), (torch.float32, inf), (torch.float64, nan)])
def test_a_backward_that_makes_no_number_is_noticed_once(dtype, factor):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    model[0].weight.requires_grad_(False)  # the next one is looked at
    check, rows = FiniteCheck(model.parameters()), torch.ones(2, 3, dtype=dtype)
    backward(model, 1.0, rows)
    check.ended(0, 1.0)
    assert check.lost == {}
    backward(model, factor, rows)
    backward(model, 1.0, rows)  # another micro-batch of the step
    check.ended(1, 1.0)
    backward(model, factor, rows)
    check.ended(2, nan)
    assert check.lost == {GRADIENTS: 1, LOSS: 2}
    check.remove()
    backward(model, 1.0, rows)
    assert check._sums == []


def test_the_sum_of_many_large_gradients_is_a_number():
    model = nn.Linear(300, 300, bias=False).half()
    check = FiniteCheck(model.parameters())
    backward(model, 60000.0, torch.ones(1, 300, dtype=torch.float16))
    check.ended(0, 1.0)
    assert check.lost == {}


def test_a_sparse_gradient_is_looked_at_too_and_without_a_parameter_only_losses():
    for factor, lost in ((1.0, {}), (nan, {GRADIENTS: 0})):
        model = nn.Embedding(5, 3, sparse=True)
        check = FiniteCheck(model.parameters())
        backward(model, factor, torch.tensor([1, 2]))
        check.ended(0, 1.0)
        assert check.lost == lost
    check = FiniteCheck(None)
    check.ended(0, inf)
    check.remove()
    assert check.lost == {LOSS: 0}
