import pytest
import torch
from torch import nn

from shardlab import Workload
from shardlab.course import MemoryPlan, memory_explorer
from shardlab.planner import model_states
from shardlab.plots import summary_of


def total(memory, run):
    return int(memory.loc[memory["run"] == run, "bytes"].sum())


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(3))
        self.head = nn.Linear(8, 10)


def own_models():
    with torch.device("meta"):
        on_meta = Convolutional()
    return [Convolutional(), on_meta, Workload(Convolutional, [], lambda model, batch: batch)]


@pytest.mark.parametrize("model", own_models(), ids=["module", "meta", "workload"])
def test_a_model_of_ones_own_is_planned_and_shown_under_its_name(model):
    numel = sum(param.numel() for param in Convolutional().parameters())
    plan = MemoryPlan(model, ranks=4)
    assert plan.num_params == numel
    held = plan.by_strategy().query("run == 'ddp'").groupby("role")["bytes"].sum()
    assert held["parameter"] == 4 * numel
    panel = memory_explorer(plan)
    assert panel.inputs.model.label == "Convolutional"
    panel.inputs.ranks.value = 8
    assert (panel.plan.num_params, panel.plan.ranks) == (numel, 8)
    panel.inputs.model.value = "gpt-1m"
    assert panel.plan.num_params != numel
    panel.inputs.model.value = model
    assert panel.plan.num_params == numel


def test_a_number_of_parameters_gives_the_papers_formulas():
    """Adam's step counters and padding are the only difference: a few bytes."""
    for precision in ("mixed", "fp32"):
        memory = MemoryPlan(7.5e9, 64, precision).by_strategy()
        for states in model_states(7.5e9, 64, precision):
            assert total(memory, states.strategy) == pytest.approx(states.total_bytes, abs=100)
    for group in (2, 4):
        plan = MemoryPlan(8e6, 8, sharding="hybrid_shard", shard_group=group)
        assert total(plan.by_strategy(), "fsdp") == pytest.approx(16 * 8e6 / group, abs=100)


def test_what_cannot_be_is_refused_by_name():
    for wrong, message in (
        ({"model": [1]}, "model: a list was given; give a module, a Workload, a number"),
        ({"model": "gpt-9z"}, "model: 'gpt-9z' is not one of"),
        ({"model": 0.5}, "model: 0.5 is not a whole number"),
        ({"ranks": 0}, "ranks"),
        ({"precision": "fp8"}, "precision: 'fp8' is not one of mixed, fp32"),
        ({"sharding": "half"}, "sharding: 'half' is not one of full_shard, shard_grad_op"),
        ({"optimizer": "lamb"}, "optimizer: 'lamb' is not one of adamw"),
        ({"sharding": "hybrid_shard", "shard_group": 3}, "shard_group: 3 .*; it must divide the 8 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            MemoryPlan(**wrong)


def test_a_slider_changes_figure_and_table():
    explorer = memory_explorer(MemoryPlan("gpt-1m", 4))
    before = summary_of(explorer.figure.content)
    explorer.inputs.ranks.value = 64
    assert explorer.plan.ranks == 64
    assert summary_of(explorer.figure.content) != before
    assert explorer.figure.content.layout.title.text == "Memory at rest of each of 64 ranks"
    assert explorer.table.content.equals(MemoryPlan("gpt-1m", 64).costs())


def test_only_what_counts_can_be_changed():
    explorer = memory_explorer()
    inputs = explorer.inputs
    assert inputs.num_params.disabled
    assert inputs.strategy.disabled
    assert inputs.shard_group.disabled
    inputs.model.value, inputs.view.value, inputs.sharding.value = "a number of parameters", "ranks", "hybrid_shard"
    for control in (inputs.num_params, inputs.strategy, inputs.shard_group):
        assert not control.disabled
    assert "7.50 G parameters" in explorer.message.text
    assert "under zero2" in explorer.figure.content.layout.title.text
    inputs.model.value = inputs.model.options[inputs.model.index - 1][1]
    assert "69.0 G parameters" in explorer.message.text
    assert inputs.num_params.disabled
    inputs.ranks.value = 6
    assert inputs.shard_group.options == (1, 2, 3, 6)


def test_without_a_notebook_the_panel_is_text():
    text = repr(memory_explorer(MemoryPlan("gpt-1m", 4)))
    assert "memory explorer" in text
    assert "Memory at rest" in text
    assert "saving (%)" in text
