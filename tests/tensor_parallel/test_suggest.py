"""A suggested plan: what is divided is right in every gradient, and what is not is named with the reason."""

import random
import re
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shardlab.tensor_parallel import Column, OnSequence, OwnDropout, Row, Vocabulary, suggest_tp_plan
from shardlab.tensor_parallel.rng import generator_states
from shardlab.tensor_parallel.suggest import check_tp_plan
from tests.tensor_parallel import strangers
from tests.tensor_parallel.strangers import HEAD_DIM, Stranger, next_word, sequences


def run(model):
    return next_word(model, sequences()[0])


@cache
def suggested(*parts, ranks=2, on_meta=False, **options):
    with torch.device("meta" if on_meta else "cpu"):
        model = Stranger(*parts, **options)
    return suggest_tp_plan(model, ranks, run)


def why(suggestion, module):
    return next(row.why for row in suggestion.modules if row.module == module)


def test_separate_projections_and_a_gated_mlp():
    found = suggested()
    assert found.plan == {
        "words": Vocabulary(),
        "blocks.*.a.q": Column(head_dim=HEAD_DIM),
        "blocks.*.a.k": Column(head_dim=HEAD_DIM),
        "blocks.*.a.v": Column(head_dim=HEAD_DIM),
        "blocks.*.a.o": Row(),
        "blocks.*.a.q_norm": OnSequence(),  # each rank sees its own heads: gradients are summed
        "blocks.*.m.gate": Column(),
        "blocks.*.m.up": Column(),
        "blocks.*.m.down": Row(),
        "head": Column(gather_output=True),
    }
    assert why(found, "words") == "tried: outputs and gradients are the whole model's"


def test_a_fused_projection_is_cut_as_it_lies():
    a, m = "blocks.*.a", "blocks.*.m"
    assert suggested(strangers.Fused, strangers.FusedGate).plan == {
        "words": Vocabulary(), f"{a}.qkv": Column(parts=strangers.Fused.sizes), f"{a}.out.0": Row(),
        f"{m}.gate_up": Column(parts=(20, 20)), f"{m}.down": Row(), "head": Column(gather_output=True),
    }  # fmt: skip
    by_head = suggested(strangers.ByHead, strangers.plain, tied=True).plan
    assert by_head[f"{a}.qkv"] == Column()
    assert {by_head["words"], by_head["head"]} == {Vocabulary(), Column(gather_output=True)}
    assert (by_head[f"{m}.0"], by_head[f"{m}.2"]) == (Column(), Row())


NOT_DIVIDED = [
    ((strangers.FixedHeads,), {}, "blocks.*.a.q", r"strangers.py:\d+: `.*HEADS, HEAD_DIM.*write -1"),
    ((strangers.Separate, strangers.Mixing), {}, "blocks.*.m.up", "the result is another one"),
    ((), {"ranks": 4}, "blocks.*.a.k", "blocks.0.a.k: heads of 6: 2 does not divide over 4"),
    ((), {"ranks": 5}, "words", "words: num_embeddings: 24 does not divide over 5"),
    ((strangers.Fused,), {"on_meta": True}, "blocks.*.a.qkv", "cannot be told without values: it is on the meta"),
    ((), {}, "places", "no vocabulary"),
]


def test_what_cannot_be_divided_is_named_with_the_reason():
    for parts, options, module, reason in NOT_DIVIDED:
        found = suggested(*parts, **options)
        row = next(row for row in found.modules if row.module == module)
        assert row.style == "whole"
        assert re.search(reason, row.why), row.why
        assert not [name for name in found.plan if name.startswith(module.rpartition(".")[0] + ".") and "." in module]


def test_without_memory_shapes_are_tried_and_said():
    found = suggested(on_meta=True)
    assert found.plan == suggested().plan
    assert "values were not tried: it is on the meta device" in why(found, "blocks.*.a.q")
    assert "write -1" in why(suggested(strangers.FixedHeads, on_meta=True), "blocks.*.a.q")


def test_the_module_is_not_changed_and_random_numbers_go_on():
    model = Stranger()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = generator_states()
    suggest_tp_plan(model, 2, run)
    assert model.training
    assert all(param.grad is None for param in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert generator_states() == states


def test_random_numbers_go_on_where_training_draws_them():
    for draw in (random.random, np.random.random, lambda: torch.rand(())):
        model, states = InTraining(lambda h, draw=draw: h * float(draw())), generator_states()
        assert "in training mode it draws random" in why(suggest_tp_plan(model, 2, lambda model: model(X)), "up")
        check_tp_plan(model, {"up": Column(), "down": Row()}, 2, lambda model: model(X))
        assert generator_states() == states


def test_a_given_plan_is_tried():
    model = Stranger(mlp=strangers.FusedGate)
    good = {"blocks.*.m.gate_up": Column(parts=(20, 20)), "blocks.*.m.down": Row()}
    assert "given, tried: outputs" in why(check_tp_plan(model, good, 2, run), "blocks.*.m.down")
    with pytest.raises(ValueError, match="tp_plan: tried in one process, it fails: the result is another"):
        check_tp_plan(model, {**good, "blocks.*.m.gate_up": Column()}, 2, run)
    with pytest.raises(ValueError, match="'nothing' matches no module"):
        check_tp_plan(model, {"nothing": Row()}, 2, run)


def test_a_run_that_fails_is_said():
    with pytest.raises(ValueError, match=r"run: it cannot be called .*no tensor that depends on a parameter"):
        suggest_tp_plan(Stranger(), 2, lambda model: 3)


class Dropped(nn.Module):
    """Dropout of features in parts (``inside``), of whole ones (``behind``), and of both (``both``)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.inside, self.behind, self.both = (nn.Dropout(0.5) for _ in range(3))
        self.double()

    def forward(self, x):
        return self.both(self.behind(self.down(self.both(self.inside(torch.relu(self.up(x)))))))


X = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_dropout_between_columns_and_rows_is_each_ranks_own():
    found = suggest_tp_plan(Dropped(), 2, lambda model: model(X))
    assert found.plan == {"up": Column(), "down": Row(), "inside": OwnDropout()}
    assert "each rank drops other features" in why(found, "inside")
    assert "also called where features are whole" in why(found, "both")


class OneDropout(nn.Module):
    """One dropout, named as its argument is, between two columns and their rows each."""

    def __init__(self, dropout=nn.Dropout):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 8)]) for _ in range(2))
        self.drop = dropout(0.5)
        self.double()

    def forward(self, x):
        for up, down in self.blocks:
            x = x + down(self.drop(input=torch.relu(up(x))))
        return x


def test_one_dropout_of_several_regions_is_each_ranks_own_or_named():
    plan = {"blocks.*.0": Column(), "blocks.*.1": Row()}
    assert suggest_tp_plan(OneDropout(), 2, lambda model: model(X)).plan == {**plan, "drop": OwnDropout()}
    found = suggest_tp_plan(OneDropout(nn.AlphaDropout), 2, lambda model: model(X))
    assert found.plan == plan
    reason = "draws one mask for the parts of all ranks: OwnDropout takes an nn.Dropout, and 'drop' is an AlphaDropout"
    assert reason in why(found, "drop")


class InTraining(nn.Module):
    """Does more in training than in evaluation; dropout of every kind is no reason to refuse."""

    def __init__(self, more=lambda h: h):
        super().__init__()
        self.up, self.down, self.more = nn.Linear(8, 32), nn.Linear(32, 8), more
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.double()

    def forward(self, x):
        h = self.drop(functional.dropout(torch.relu(self.up(self.norm(x))), 0.3, self.training))
        return self.drop(self.down(self.more(h) if self.training else h))


def test_what_is_done_in_training_alone_is_tried_too():
    normed = InTraining(lambda h: h / h.norm(dim=-1, keepdim=True))
    found = suggest_tp_plan(normed, 2, lambda model: model(X))
    assert found.plan == {}
    assert "the result is another one" in why(found, "up")
    layers = {"up": Column(), "down": Row()}
    with pytest.raises(ValueError, match="it fails: the result is another"):
        check_tp_plan(normed, layers, 2, lambda model: model(X))
    assert suggest_tp_plan(normed.eval(), 2, lambda model: model(X)).plan.items() >= layers.items()
    assert suggest_tp_plan(normed, 2, lambda model: model.train()(X)).plan == {}
    found = suggest_tp_plan(InTraining(), 2, lambda model: model(X))
    assert found.plan.items() >= layers.items()
    assert why(found, "up") == "tried: outputs and gradients are the whole model's"
