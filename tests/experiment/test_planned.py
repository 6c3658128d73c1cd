"""The plan beside the record: equal where both are right, and told apart by a byte or a message."""

from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn

from shardlab import DDP, Workload, plan
from shardlab.engines import HFSDP
from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.planned.known_workload import optimizer_of
from shardlab.experiment.planned.plan import plan_runs, setup_of
from shardlab.experiment.told.answer import answer
from shardlab.experiment.told.differences import losses_compared
from shardlab.experiment.told.saved_runs import against_plan, load_saved
from shardlab.experiment.told.verdicts import plan_verdict
from shardlab.planner import ADAM, described
from shardlab.planner.formulas import model_states, precision_named
from tests.conftest import Pools
from tests.experiment.test_workload import Labelled, Nested, OutOfOrder, Residual, keyword_loss, labelled_loss
from tests.oracle.collectives import Forward, counted_collectives

BASE = {"ranks": 2, "steps": 2, "text": "grammar", "device": "cpu", "batch": 4, "seq_len": 16}
OPTIONS = (  # more of them: test_dry_run
    {"strategies": ("zero1", "fsdp"), "partition": "balanced", "offload": "all", "precision": "fp16", "clip": 1.0},
    {"strategies": ("fsdp",), "layout": "dim0", "replicate_below": 200, "prefetch": 2, "wrap": "20000"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, list(options.values())[1:])))
def test_a_run_is_as_planned(pools: Pools, tmp_path, options) -> None:
    result = compare(CompareConfig(**{**BASE, **options}), tmp_path / "run", pool=pools(2))
    assert result.summary["as_planned"].tolist() == [True] * len(options["strategies"])
    assert (result.summary["planned_rest_bytes"] == result.summary["rest_bytes"]).all()
    assert (result.summary["planned_wire_bytes"] == result.summary["wire_bytes_per_step"]).all()
    assert plan_verdict(result) == ""


class ByValue(nn.Module):
    """Experts, of which each row takes one."""

    def __init__(self, number=2):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))

    def forward(self, x):
        return torch.stack([self.experts[int(3 * row[0]) // 2 % len(self.experts)](row) for row in x])


def mean_square(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("signs", [(1.0, 1.0, 1.0), (1.0, -1.0, 1.0)], ids=["one is used", "both are used"])
def test_experts_that_rows_choose_are_planned_and_messages_that_rows_decide_are_marked(pools, tmp_path, signs) -> None:
    workload = Workload(ByValue, [torch.tensor(signs)[:, None] * torch.ones(3, 4)], mean_square)
    planned, tried = plan(workload, ranks=3).set_index("strategy"), ["single", "zero1", "zero3"]
    numel = 2 * (4 * 4 + 4)  # of both experts
    held = planned.loc["ddp", ["parameter_bytes", "gradient_bytes", "optimizer_bytes"]].tolist()
    assert held == [4 * numel, 4 * numel, 8 * numel]
    for column in ("messages_per_step", "wire_bytes_per_step"):
        assert planned.index[planned[column].isna()].tolist() == ["fsdp"]  # each expert is a unit
    found = compare(workload, tmp_path / "run", strategies=tuple(tried), ranks=3, steps=2, pool=pools(3))
    sent = planned["wire_bytes_per_step"][tried].tolist()
    assert found.summary["wire_bytes_per_step"].tolist() == pytest.approx(sent)
    assert found.summary["as_planned"].tolist() == [True if -1.0 in signs else None] * 3
    if -1.0 not in signs:
        said = "what is used or sent depends on the rows, so bytes and messages may differ from the plan's."
        assert plan_verdict(found).endswith(said)


class ByCounter(nn.Module):
    """In every second forward only the first block is called; in others both are."""

    def __init__(self, of_first):
        super().__init__()
        self.blocks, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), of_first

    def forward(self, x):
        self.calls += 1
        return self.blocks[1](self.blocks[0](x)) if self.calls % 2 else self.blocks[0](x)


@pytest.mark.parametrize("of_first", [0, 1], ids=["first both", "first one"])
def test_a_run_whose_steps_use_other_parameters_is_of_no_plan_and_its_bytes_are_means(pools, tmp_path, of_first):
    workload = Workload(partial(ByCounter, of_first), [torch.ones(2, 4)], mean_square)
    found = compare(workload, tmp_path / "run", strategies=("single", "zero1", "fsdp"), ranks=2, steps=4, pool=pools(2))
    rows = found.summary.set_index("strategy")
    assert rows["not_planned"]["single"] in (None, "what it holds differs from step to step")
    assert False not in rows["as_planned"].tolist(), "the plan is of the first step"
    sent = found.records.steps.query("run == 'fsdp'").groupby("step")["wire_bytes"].max()
    assert sent.nunique() == 2
    assert rows["wire_bytes_per_step"]["fsdp"] == pytest.approx(sent.mean())
    assert "; of fsdp means over all steps, of which some send more" in dict(answer(found))["COST"]


def test_a_model_by_rows_that_is_too_large_to_be_tried_is_planned(monkeypatch) -> None:
    monkeypatch.setattr("shardlab.experiment.planned.known_workload.MAX_NUMEL", 39)
    workload = Workload(ByValue, [torch.ones(2, 4)], mean_square)
    planned = plan(workload, 64).set_index("strategy")
    assert planned["rest_bytes"].notna().all()
    assert planned.index[planned["messages_per_step"].isna()].tolist() == ["fsdp"]


def test_losses_in_16_bits_are_judged_as_rounded(pools: Pools, tmp_path) -> None:
    config = CompareConfig(**BASE, model="mlp", strategies=("single", "zero2", "zero3"), precision="bf16")
    result = compare(config, tmp_path / "run", pool=pools(2))
    assert ", within the rounding of bf16 · " in dict(answer(result))["CAN I TRUST IT"]
    held = result.summary.set_index("strategy")
    # 2 bytes for each parameter that is whole, 4 for the shards, which are the master weights; 16 P in all else.
    padded = held["parameter_bytes"]["zero2"] // 2
    assert held["parameter_bytes"]["zero3"] == 4 * padded // 2
    assert held["gradient_bytes"].tolist()[1:] == [4 * padded // 2] * 2
    assert held["optimizer_bytes"]["zero2"] == held["optimizer_bytes"]["zero3"] + 4 * padded // 2
    compare(replace(config, precision="full"), tmp_path / "full", pool=pools(2))
    compared = losses_compared(load_saved(tmp_path / "full"), load_saved(tmp_path / "run"))
    assert all(equal and "are equal" in said for equal, said in compared)
    apart = [float(said.rpartition(" ")[2].rstrip(".")) for _, said in compared]
    assert apart[0] <= 1e-4 < max(apart), "a run that rounds has the tolerance of its precision"


def test_a_byte_or_a_message_that_was_not_planned_is_told(pools: Pools, tmp_path) -> None:
    config = CompareConfig(**BASE, model="mlp", strategies=("zero1",))
    records = compare(config, tmp_path / "run", pool=pools(2)).records
    plan = plan_runs(config)["zero1"]
    assert against_plan("zero1", records, plan)["as_planned"]
    assert against_plan("zero1", records, "nobody knows")["as_planned"] is None
    memory, moved = records.memory, records.collectives
    for changed in (
        {"memory": memory.assign(bytes=memory["bytes"] + (memory["role"] == "gradient").astype("Int64"))},
        {"collectives": moved.iloc[:-3]},
        {"collectives": moved.assign(seq=-moved["seq"])},
    ):
        assert not against_plan("zero1", replace(records, **changed), plan)["as_planned"]


def hundredth(model, rows):
    return model(rows).mean() / 100


def test_a_step_that_the_scaler_skipped_is_told_and_not_counted(pools: Pools, tmp_path) -> None:
    """The last one: its messages are no step's."""
    rows = torch.ones(2, 4)
    config = CompareConfig(
        ("single", "zero1", "fsdp"), ranks=2, steps=3, precision="fp16", device="cpu",
        workload=Workload(partial(nn.Linear, 4, 1), [rows, rows, 300 * rows], hundredth),
    )  # fmt: skip
    result = compare(config, tmp_path / "run", pool=pools(2))
    said = dict(answer(result))
    skipped = (
        "steps skipped, because gradients overflowed in fp16: 1 of zero1 and 1 of fsdp · bytes and messages as planned"
    )
    assert skipped in said["CAN I TRUST IT"]
    found = result.summary.set_index("strategy").loc["zero1"]
    assert found["wire_bytes_per_step"] == found["planned_wire_bytes"]


def test_an_error_of_the_data_is_the_plans_too() -> None:
    def unreadable(rank: int, ranks: int, seed: int) -> None:
        raise OSError("no such file")

    with pytest.raises(ValueError, match=r"^data: its first batch, .* raised OSError \(no such file\); plan where"):
        plan(Workload(Residual, unreadable, keyword_loss), ranks=2)


def of_marked_tensors(tensors):
    """Momentum for what a user has marked."""
    marked = [[t for t in tensors if getattr(t, "has_momentum", False) is wanted] for wanted in (True, False)]
    return torch.optim.SGD([{"params": marked[0], "momentum": 0.9}, {"params": marked[1], "momentum": 0.0}], lr=0.1)


def test_groups_by_attributes_are_planned() -> None:
    module = Residual()
    first, *_ = names = [name for name, _ in module.named_parameters()]
    module.get_parameter(first).has_momentum = True
    found = optimizer_of(Workload(Residual, Labelled(), keyword_loss, of_marked_tensors), module)
    assert [found[name].values_per_element for name in names] == [1] + [0] * (len(names) - 1)


@pytest.mark.parametrize(
    ("order", "options"),
    [((2, 0, 1), {"sharding": "no_shard"}), ((2, 0, 1), {"replicate_below": 43}), ((0, 2, 3), {"replicate_below": 7})],
    ids=str,
)
def test_units_that_all_ranks_hold_whole_are_reduced_in_the_modules_order(pools: Pools, tmp_path, order, options):
    workload = Workload(partial(OutOfOrder, order), Labelled(), labelled_loss)
    found = compare(workload, tmp_path / "run", strategies="fsdp", ranks=2, steps=2, pool=pools(2), **options)
    assert found.summary["as_planned"].all()


class FrozenFirst(nn.Module):
    """Blocks of which the first ones are frozen; the root's layer computes before or behind them, or is frozen too."""

    def __init__(self, num_frozen: int, root: str) -> None:
        super().__init__()
        self.root = root
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.own = nn.Linear(6, 6).requires_grad_(root != "frozen")
        self.blocks[:num_frozen].requires_grad_(False)
        self.double()

    def forward(self, x):
        x = self.own(x) if self.root == "before" else x
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x if self.root == "before" else self.own(x)


FROZEN_FIRST = [(1, "behind"), (4, "behind"), (2, "frozen"), (2, "before")]


@pytest.mark.parametrize(("num_frozen", "root"), FROZEN_FIRST)
def test_frozen_units_that_backward_does_not_reach_are_gathered_only_ahead(pools, tmp_path, root, num_frozen):
    workload = Workload(partial(FrozenFirst, num_frozen, root), Labelled(), labelled_loss)
    prefetch = FROZEN_FIRST.index((num_frozen, root)) % 3  # the dry run is counted at two depths each, below
    options = {"strategies": "fsdp", "ranks": 2, "steps": 2, "prefetch": prefetch, "accumulation": 2}
    found = compare(workload, tmp_path / "run", pool=pools(2), **options)
    assert found.summary["as_planned"].all()


UNITS = [f"blocks.{place}" for place in range(4)]
FORWARDS = (  # a model; its units in the order of their calls; those that backward does not reach
    (partial(FrozenFirst, 1, "behind"), UNITS, UNITS[:1]),
    (partial(FrozenFirst, 4, "behind"), UNITS, UNITS),
    (partial(FrozenFirst, 2, "frozen"), UNITS, UNITS[:2]),
    (partial(FrozenFirst, 2, "before"), UNITS, ()),
    (partial(OutOfOrder, (3, 0, 2)), (UNITS[3], UNITS[0], UNITS[2]), ()),
)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("model", "called", "unreached"), FORWARDS, ids=range(len(FORWARDS)))
def test_the_dry_run_follows_the_forward_as_it_is_counted(model, called, unreached, prefetch) -> None:
    options = {"ranks": 3, "prefetch": prefetch, "accumulation": 2, "wrap": "blocks.*"}
    workload = Workload(model, Labelled(), labelled_loss)
    config = CompareConfig(workload=workload, strategies=("fsdp",), **options)
    setup = setup_of(config, "fsdp", config.on_meta, {name: ADAM for name, _ in config.on_meta.named_parameters()})
    counted = counted_collectives(described(config.on_meta), setup, Forward(tuple(called), tuple(unreached)))
    pd.testing.assert_frame_equal(plan_runs(config)["fsdp"].collectives, counted)


class AsksForValues(FrozenFirst):
    """Cannot be tried without a rank's batch."""

    def forward(self, x):
        if torch.distributed.is_initialized():
            return super().forward(x)
        raise RuntimeError("only on ranks")


def test_what_a_step_sends_that_only_ranks_can_take_is_not_guessed(pools: Pools, tmp_path) -> None:
    workload = Workload(partial(AsksForValues, 2, "behind"), Labelled(), labelled_loss)
    options = {"strategies": ("zero3", "fsdp"), "ranks": 2}
    found = compare(workload, tmp_path / "run", steps=2, pool=pools(2), **options).summary
    assert found["as_planned"].isna().all()
    assert set(found["not_planned"]) == {"its step cannot be run without values: RuntimeError: only on ranks"}
    assert (found["planned_rest_bytes"] == found["rest_bytes"]).all()
    planned = plan(workload, **options)
    assert planned["messages_per_step"].isna().all()
    assert planned["rest_bytes"].tolist() == found["rest_bytes"].tolist()


def test_what_is_wrong_with_a_class_is_no_matter_of_planning() -> None:
    wrong = type("Own", (DDP,), {"name": "own", "lay_out": lambda *_: None})
    with pytest.raises(ValueError, match=r"^strategy: lay_out\(\) of 'own' must return a LaidOut"):
        plan(Workload(Residual, Labelled(), keyword_loss), 2, wrong())


def test_bytes_by_axis_are_in_the_table_of_what_sends_over_several() -> None:
    table = plan(Workload(Residual, Labelled(), keyword_loss), 4, ("ddp", HFSDP())).set_index("strategy")
    by_axis = table[["replica_wire_bytes", "shard_wire_bytes"]]
    assert by_axis.loc["ddp"].isna().all()
    assert by_axis.loc["hfsdp"].sum() == table.loc["hfsdp", "wire_bytes_per_step"]
    assert "data_wire_bytes" not in table


class Steered(FrozenFirst):
    """Calls its blocks in an order that the values of its input decide."""

    def forward(self, x):
        blocks = self.blocks if float(x.detach().abs().sum()) > 0 else reversed(self.blocks)
        for block in blocks:
            x = torch.tanh(block(x))
        return self.own(x)


def test_a_route_that_values_decide_is_not_guessed() -> None:
    """Without values it would be another one. Strategies to which the route makes no difference are planned."""
    workload = Workload(partial(Steered, 0, "behind"), Labelled(), labelled_loss)
    planned = plan(workload, 2, ("zero1", "fsdp"), batch=28)
    assert planned["messages_per_step"].isna().tolist() == [False, True]


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {"sharding": "hybrid_shard", "shard_group": 1})], ids=str)
def test_nested_units_are_planned_where_a_rank_holds_everything(pools: Pools, tmp_path, ranks, options) -> None:
    workload = Workload(Nested, Labelled(), labelled_loss, wrap=("blocks.*", "blocks.*.0"))
    found = compare(workload, tmp_path / "run", strategies="fsdp", ranks=ranks, steps=2, pool=pools(ranks), **options)
    assert found.summary["as_planned"].tolist() == [True]


def loss_of_two_calls(model, batch):
    return (labelled_loss(model, batch) + labelled_loss(model, {**batch, "x": -batch["x"]})) / 2


def loss_behind_a_look(model, batch):
    with torch.no_grad():
        model(batch["x"])
    return labelled_loss(model, batch)


@pytest.mark.parametrize(
    ("loss", "strategies"), [(loss_of_two_calls, ("zero2", "fsdp")), (loss_behind_a_look, ("zero3", "fsdp"))]
)
def test_a_loss_that_calls_the_model_twice_is_planned(pools: Pools, tmp_path, loss, strategies) -> None:
    workload = Workload(partial(OutOfOrder, (0, 1)), Labelled(), loss)
    found = compare(workload, tmp_path / "run", strategies=strategies, ranks=2, steps=2, pool=pools(2)).summary
    assert found["as_planned"].all()


class Partial(torch.optim.SGD):
    """Makes one tensor of its state at once, and another in ``step()``."""

    shardlab_looks_at = "element"

    def __init__(self, tensors) -> None:
        super().__init__(tensors, lr=0.1)
        for tensor in self.param_groups[0]["params"]:
            self.state[tensor]["at_once"] = torch.zeros_like(tensor)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        super().step(closure)
        for tensor in self.param_groups[0]["params"]:
            if tensor.grad is not None:
                self.state[tensor].setdefault("stepped", torch.zeros_like(tensor))


class PartlyTrained(nn.Module):
    """A frozen layer, an unused one, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(6, size) for size in (6, 3, 2))
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.double()

    def forward(self, x):
        return self.used(torch.tanh(self.frozen(x))) + self.empty.sum()


@pytest.mark.parametrize(
    ("optimizer", "strategies", "options"),
    [
        (Partial, ("ddp", "zero3"), {}),
        (torch.optim.Adagrad, ("zero1", "fsdp"), {}),
        (torch.optim.AdamW, ("fsdp",), {"sharding": "no_shard"}),
    ],
)
def test_state_made_at_once_and_in_steps_is_planned_of_any_parameter(
    pools: Pools, tmp_path, optimizer, strategies, options
):
    workload = Workload(PartlyTrained, Labelled(), labelled_loss, optimizer)
    found = compare(workload, tmp_path / "run", strategies=strategies, ranks=2, steps=2, pool=pools(2), **options)
    assert found.summary["as_planned"].all()


def test_a_number_of_parameters_and_a_workload_send_and_keep_the_same_bytes() -> None:
    """Gradients in 32 bits, as engines keep and send them: only sharded parameters have no 16-bit copy here."""
    rows = [torch.ones(4, 64)] * 8
    workload = Workload(lambda: nn.Linear(64, 64, bias=False), rows, mean_square)
    planned = plan(workload, ranks=8, precision="bf16").set_index("strategy")
    counted = {one.strategy: one for one in model_states(64 * 64, 8, precision_named("2+4+4+4+4"))}
    for name in ("zero1", "zero2", "zero3"):
        flags = 2 * 3 * 4 * 7 / 8  # two numbers by which ranks raise together, and one by which they know what is used
        assert planned.loc[name, "wire_bytes_per_step"] - flags == counted[name].wire_bytes
        copy = 2 * 64 * 64 / 8 if name == "zero3" else 0
        step_counter = 4
        assert planned.loc[name, "rest_bytes"] - step_counter == counted[name].total_bytes - copy


def test_a_model_that_engines_refuse_has_no_plan():
    def spectral():
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
        return model

    with pytest.raises(ValueError, match=r"^model: parameters \['weight'\] are complex; only real ones are supported"):
        plan(Workload(spectral, [torch.ones(4, 2)], lambda model, batch: model.weight.abs().sum()), 2)
