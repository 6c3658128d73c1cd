"""``compare`` over a tensor axis: the same losses, and a refusal of what the axis cannot divide, before ranks start."""

import re
from dataclasses import replace

import pytest
import torch

from shardlab.experiment import CompareConfig, Workload, compare, show_tp_plan
from shardlab.experiment.trained.tensor import shown_plan
from shardlab.tensor_parallel import Column, OnSequence, Row
from tests.conftest import Pools
from tests.tensor_parallel import strangers

BASE = {"ranks": 4, "tp": 2, "steps": 2, "text": "grammar", "device": "cpu", "batch": 4, "seq_len": 16}


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"], ids=["whole sequence", "sequence in parts"])
def test_losses_equal_one_process(pools: Pools, tmp_path, strategy) -> None:
    config = CompareConfig(
        **BASE, strategies=("single", strategy), dtype="float64", clip=1.0, sequence_parallel=strategy == "fsdp"
    )
    result = compare(config, tmp_path / "run", pool=pools(4))
    assert (result.summary["max_loss_difference"] <= 1e-9).all()
    assert result.summary["as_planned"].all()
    norms = result.records.steps.pivot_table(index="step", columns="run", values="grad_norm")
    assert ((norms.sub(norms["single"], axis=0)).abs() < 1e-9).all().all()
    collectives = result.records.collectives
    assert set(collectives.loc[collectives["run"] == strategy, "axis"]) == {"data", "tensor"}
    held = result.summary.set_index("strategy")["parameter_bytes"]
    assert held[strategy] < (0.3 if strategy == "fsdp" else 0.55) * held["single"]


def test_hybrid_beside_tensor(pools: Pools, tmp_path) -> None:
    options = {"sharding": "hybrid_shard", "shard_group": 2, "precision": "fp16", "accumulation": 2, "clip": 1.0}
    config = CompareConfig(**{**BASE, "batch": 8}, strategies=("fsdp",), **options)
    assert config.mesh_axes("fsdp") == {"replica": 1, "shard": 2, "tensor": 2}
    result = compare(config, tmp_path / "run", pool=pools(4))
    assert result.losses_equal
    assert result.summary["as_planned"].all()


def test_torch_s_own_divides_the_model_over_the_same_ranks(pools: Pools, tmp_path) -> None:
    """A whole model under torch's plan and parts of ours: the two send as much, but for what ours keeps in parts."""
    config = CompareConfig(**{**BASE, "ranks": 2}, strategies=("single", "bucketed", "torch_tp"), dtype="float64")
    result = compare(config, tmp_path / "run", pool=pools(2))
    assert (result.summary["max_loss_difference"] <= 1e-9).all()
    held = result.summary.set_index("strategy")["parameter_bytes"]
    assert held["bucketed"] < held["torch_tp"] < held["single"]  # ours divides the embedding and the output, too


REFUSED = (
    ({"tp": 3}, "tp: 3 does not divide 4 ranks"),
    ({"tp": 0}, "tp: 0 is below 1"),
    ({"ranks": 3, "tp": 3}, "tp: token_embedding: .*256 does not divide over 3"),
    ({"ranks": 5, "tp": 5, "model": "mlp"}, r"tp: nothing of mlp can be divided over 5 ranks \(.*use 510 or 515"),
    ({"strategies": ("single", "torch_ddp")}, "start torch_ddp without it"),
    ({"strategies": ("zero1", "torch_tp")}, "tp: torch_tp divides the model over all 4 ranks; set tp to 4"),
    ({"strategies": ("torch_tp",), "ranks": 2, "sequence_parallel": True}, "torch_tp keeps the sequence whole"),
    ({"tp": 1, "sequence_parallel": True}, "sequence_parallel: .* set tp to 2"),
    ({"seq_len": 15, "sequence_parallel": True}, "seq_len: 15 does not divide over tp=2"),
    ({"batch": 3}, "among 2 ranks"),
)


def test_what_cannot_be_divided_is_refused() -> None:
    base = {**BASE, "batch": None, "strategies": ("single", "zero1")}
    for fields, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            CompareConfig(**{**base, **fields})
    assert CompareConfig(**base).global_batch == 8, "four a data rank"


def own(**parts) -> Workload:
    return Workload(lambda: strangers.Stranger(**parts), strangers.sequences(), strangers.next_word)


@pytest.mark.parametrize(
    ("ranks", "strategy", "workload"),
    [
        (4, "fsdp", own()),  # fewer key and value heads, norms of heads, a gated MLP
        (2, "bucketed", own(attention=strangers.Fused, mlp=strangers.FusedGate, tied=True)),
        (2, "bucketed", own(attention=strangers.ByHead, mlp=strangers.plain)),
    ],
    ids=["separate", "fused", "by head"],
)
def test_a_model_that_nobody_planned_trains_as_one_process_does(pools: Pools, tmp_path, ranks, strategy, workload):
    workload = replace(workload, optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9))
    options = {"strategies": ("single", strategy), "steps": 3, "clip": 0.3, "tp": 2}
    result = compare(workload, tmp_path / "run", ranks=ranks, pool=pools(ranks), **options)
    assert (result.summary["max_loss_difference"] <= 1e-10).all()
    assert result.summary["as_planned"].all()
    norms = result.records.steps.pivot_table(index="step", columns="run", values="grad_norm")
    assert ((norms.sub(norms["single"], axis=0)).abs() < 1e-10).all().all()
    held = result.summary.set_index("strategy")["parameter_bytes"]
    assert held[strategy] < 0.65 * held["single"]


def test_the_plan_of_layers_is_shown_without_ranks() -> None:
    found = show_tp_plan(own(attention=strangers.FixedHeads), 2).set_index("module")
    assert found.loc["blocks.*.m.gate", "style"] == "Column()"
    assert "write -1" in found.loc["blocks.*.a.q", "why"]
    with pytest.raises(ValueError, match="tp: 1 ranks divide nothing"):
        show_tp_plan(own(), 1)


def without(name):
    return lambda plan: {pattern: style for pattern, style in plan.items() if not pattern.endswith(name)}


def twice(model, batch, axis):
    return 2 * strangers.next_word(model, batch)


WRONG_PLANS = {
    "a norm of heads without a style": ({}, without("q_norm"), {}, "with 'blocks.0.a.q_norm.bias', which is whole"),
    "a sum too many": ({}, lambda plan: {**plan, "head": OnSequence()}, {}, "head: it takes an input in parts"),
    "a fused projection cut as it does not lie": (
        {"mlp": strangers.FusedGate}, lambda plan: {**plan, "blocks.*.m.gate_up": Column()}, {}, "result is another",
    ),
    "columns without rows": ({}, without("m.down"), {}, "shapes cannot be multiplied"),
    "a loss of parts": ({}, dict, {"tp_loss": twice}, "the result is another one than the whole model's"),
}  # fmt: skip


def test_a_plan_that_is_given_is_tried_before_ranks_start() -> None:
    for parts, change, more, said in WRONG_PLANS.values():
        workload = replace(own(**parts), tp_plan=change(shown_plan(own(**parts), 2)[0].tp_plan), **more)
        with pytest.raises(ValueError, match=f"^tp_plan: tried in one process, it fails: .*{said}"):
            CompareConfig(workload=workload, ranks=2, tp=2, strategies="zero1")


class Untried(torch.nn.Module):
    """Between its two layers it does what a process without ranks may not be able to do."""

    def __init__(self, what) -> None:
        super().__init__()
        self.up, self.down, self.what = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), what

    def forward(self, x):
        return self.down(self.what(self.up(x)))


def fails(x):
    raise RuntimeError("only on ranks")


def loss_of_a_function_of_values(model, x):
    return model(x).square().mean() * (1 + int(x.sum() > 0))


def unreadable(rank, ranks, seed):
    raise OSError("no such file")


DATA = [torch.ones(4, 4)]
SQUARE = Workload(torch.nn.Tanh, DATA, lambda model, x: model(x).square().mean())
UNTRIED = {
    "values": (
        replace(SQUARE, model=lambda: Untried(torch.relu), loss=loss_of_a_function_of_values),
        "given, tried: out",
    ),
    "an error": (
        replace(SQUARE, model=lambda: Untried(fails)),
        r"\(not tried, for the whole module fails.*only on ranks",
    ),
    "noise": (replace(SQUARE, model=lambda: Untried(lambda x: x + torch.rand_like(x))), "not tried: it draws random"),
    "infinite": (replace(SQUARE, model=lambda: Untried(lambda x: x / 0)), "with random parameters it is not finite"),
    "no data": (replace(SQUARE, model=lambda: Untried(torch.relu), data=unreadable), "given, sizes fit$"),
}


def test_a_plan_that_is_given_is_not_refused_where_it_cannot_be_tried() -> None:
    for workload, said in UNTRIED.values():
        workload = replace(workload, tp_plan={"up": Column(), "down": Row()})
        assert re.search(said, show_tp_plan(workload, 2).set_index("module").loc["up", "why"])
        assert CompareConfig(workload=workload, ranks=2, tp=2, strategies="zero1").trained is workload


def test_a_built_in_model_without_a_plan_gets_one(pools: Pools, tmp_path) -> None:
    config = CompareConfig(**{**BASE, "ranks": 2}, strategies=("single", "zero1"), model="mlp")
    result = compare(config, tmp_path / "run", pool=pools(2))
    assert result.losses_equal
    assert result.summary["as_planned"].all()
