"""What an optimizer looks at: torch's own are in a table, which is held against what they do; others say so."""

import pytest
import torch

from shardlab.engines.guards.optimizer_fit import KNOWN, LooksAt, check_fits, looks_at
from shardlab.vocabulary import Partition
from tests.dist import whole_optimizers

optim = torch.optim
CUT, WHOLE = Partition.ELEMENTS, Partition.BALANCED
SHAPE = (6, 4)
WAYS = {
    "SGD": [{}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}, {"lr": torch.tensor(0.1), "foreach": False}],
    "AdamW": [{"weight_decay": 0.5}, {"fused": True}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9, "weight_decay": 0.1}],
    "Adagrad": [{"initial_accumulator_value": 0.3, "lr_decay": 0.1}],
    "ASGD": [{"t0": 1, "weight_decay": 0.1}],
}


def stepped(kind, options, cut):
    """A matrix after three steps, and the same stepped in pieces."""
    drawn = torch.Generator().manual_seed(0)
    whole = torch.randn(SHAPE, generator=drawn)
    parts = [part.clone().requires_grad_() for part in cut(whole)]
    optimizer = kind(parts, **options)
    for _ in range(3):
        for part, gradient in zip(parts, cut(torch.randn(SHAPE, generator=drawn)), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
    return torch.cat([part.detach().flatten() for part in parts])


ROWS, FLAT = lambda whole: whole.split(2), lambda whole: whole.flatten().split(5)
CUTS = {LooksAt.ELEMENT: (ROWS, FLAT), LooksAt.TENSOR: (ROWS,)}  # Muon takes matrices alone
# LBFGS takes a closure, and SparseAdam other gradients.
TRIED = [kind for kind in KNOWN if KNOWN[kind] is not LooksAt.MODEL and kind is not optim.SparseAdam]


@pytest.mark.parametrize("kind", TRIED, ids=lambda kind: kind.__name__)
def test_the_table_says_what_torchs_own_do(kind):
    for options in WAYS.get(kind.__name__, [{}]):
        expected = stepped(kind, options, lambda whole: [whole])
        for cut in CUTS[KNOWN[kind]]:
            is_same = torch.allclose(stepped(kind, options, cut), expected, rtol=0, atol=1e-7)
            assert is_same is (KNOWN[kind] is LooksAt.ELEMENT)


def test_all_of_torchs_own_are_known():
    own = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert own - {optim.Optimizer} == set(KNOWN)


def test_who_says_it_is_believed():
    optimizer = whole_optimizers.Plain([torch.zeros(1)])
    for word in LooksAt:
        optimizer.shardlab_looks_at = word.value
        assert looks_at(optimizer) is word
    optimizer.shardlab_looks_at = "rows"
    with pytest.raises(ValueError, match=r"optimizer: Plain.shardlab_looks_at is 'rows', not one of element, tensor"):
        looks_at(optimizer)


class Silent(optim.SGD):
    """A subclass may do anything else."""


def test_who_says_nothing_is_refused_where_tensors_are_cut_or_spread():
    optimizer = Silent([torch.nn.Parameter(torch.zeros(SHAPE))])
    for cut in (CUT, WHOLE):
        with pytest.raises(ValueError, match="Silent is none of torch's own"):
            check_fits(optimizer, cut)
    check_fits(optimizer, None)
