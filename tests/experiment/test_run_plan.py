"""Whether a run fits: what is gathered and kept is counted without running, and equals what an engine has."""

import json
import re
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardlab import Mesh, Workload, build_engine
from shardlab.cli import app
from shardlab.course.gathered_units import watch_gathered
from shardlab.experiment.planned.plan import plan_all, to_plan
from shardlab.experiment.planned.run_plan import RunPlan, kept_for_backward, readable_fit, saved_for_backward
from shardlab.models import GPT, GPTConfig, next_token_loss
from shardlab.partition.ring_cost import Link
from shardlab.planner import Gpu, described
from shardlab.planner.fit import rows_that_fit
from shardlab.planner.gpu import cards, memory_bytes
from shardlab.plots import memory_on_gpu
from shardlab.plots.text import listing
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.conftest import Pools

SIZES = GPTConfig(vocab_size=16, seq_len=8, num_layers=4, num_heads=1, hidden=6)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, place):
        return (torch.arange(9) + place) % 16


class Uneven(nn.Module):
    """Units of different sizes, a buffer, attention, a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, size), nn.GELU(), nn.Linear(size, 8)) for size in (3, 9, 20, 5)
        )
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.leave = nn.Linear(8, 16, bias=False)
        self.leave.weight = self.enter.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x + self.attention(x, x, x, need_weights=False)[0])


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(batch[:, :-1]), batch[:, 1:])


def gpt() -> GPT:
    return GPT(SIZES)


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1)


WORKLOADS = {"gpt": Workload(gpt, Tokens(), loss), "uneven": Workload(Uneven, Tokens(), loss)}


def kept_in_an_engine(workload: Workload, rows: int, precision: str) -> int:
    """Really run, by an engine on a group of one."""
    with Mesh.alone() as mesh, build_engine("zero2", workload.build(0), sgd, mesh, precision=precision) as engine:
        batch = torch.stack([Tokens()[place] for place in range(rows)])
        with saved_for_backward(engine.module) as saved:
            workload.loss(engine, batch)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved)


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_autograd_keeps_is_counted_without_running(name: str) -> None:
    workload = WORKLOADS[name]
    for rows, precision in ((1, "full"), (4, "full"), (4, "bf16")):
        kept = kept_in_an_engine(workload, rows, precision)
        assert kept_for_backward(workload, rows, precision) == kept, (rows, precision)


def gathered_in_an_engine(rank: int, model: Any, options: dict) -> int:
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("fsdp", model(), sgd, mesh, **options)
        batch = torch.stack([Tokens()[place + rank] for place in range(2)])
        with watch_gathered(engine) as samples:  # type: ignore[arg-type]
            engine.backward(loss(engine, batch))
        return int(pd.DataFrame(samples).groupby("sample")["bytes"].sum().max())


def gathered_in_the_plan(model: Any, strategy: str, ranks: int, options: dict) -> int | None:
    workload = Workload(model, Tokens(), loss)
    return plan_all(to_plan(workload, ranks, strategy, **options))[strategy].gathered_bytes


@pytest.mark.parametrize("model", [gpt, Uneven])
def test_what_is_gathered_at_once_is_what_fsdp_gathers(pools: Pools, model: Any) -> None:
    by_turns = ({"prefetch": 0}, {}, {"prefetch": 2}, {"prefetch": 9}, {"precision": "bf16"},
                {"sharding": "shard_grad_op"}, {}, {"wrap": ("blocks.*", "blocks.*.*")})  # fmt: skip
    for options in by_turns[model is Uneven :: 2]:
        planned = gathered_in_the_plan(model, "fsdp", 2, options)
        assert set(pools(2).run(gathered_in_an_engine, model, options)) == {planned}, options


def copied_in_an_engine(rank: int, strategy: str, options: dict, axes: dict | None = None) -> int:
    """The most bytes of gathered parameters that are not the shards themselves."""
    with Mesh(axes) if axes else Mesh.alone() as mesh, build_engine(strategy, gpt(), sgd, mesh, **options) as engine:
        found: list[int] = []

        def look(*_: Any) -> None:
            found.append(bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER])

        for module in engine.module.modules():
            module.register_forward_pre_hook(look)
        engine.backward(loss(engine, torch.stack([Tokens()[place + rank] for place in range(2)])))
        return max(found)


WHOLE = (
    {"sharding": "no_shard"},
    {"sharding": "no_shard", "precision": "bf16"},
    {"sharding": "no_shard", "offload": "all"},
    {"replicate_below": 20},
    {"replicate_below": 20, "precision": "bf16"},
    {"replicate_below": 20, "offload": "parameters", "prefetch": 0},
    {"sharding": "hybrid_shard", "precision": "bf16"},
)


def test_what_every_rank_holds_whole_counts_where_it_is_copied(pools: Pools) -> None:
    for options in WHOLE:
        axes = {"replica": 2, "shard": 1} if options.get("sharding") == "hybrid_shard" else {"data": 2}
        shards = {"shard_group": 1} if "shard" in axes else {}
        planned = gathered_in_the_plan(gpt, "fsdp", 2, options | shards)
        assert set(pools(2).run(copied_in_an_engine, "fsdp", options, axes)) == {planned}, options


def test_one_rank_copies_what_it_casts() -> None:
    rounded: dict = {"precision": "bf16"}
    for strategy, options in (
        ("zero3", {}), ("zero3", rounded), ("fsdp", {}), ("fsdp", rounded), ("fsdp", {**rounded, "prefetch": 0}),
        ("fsdp", {"offload": "all"}),
    ):  # fmt: skip
        planned = gathered_in_the_plan(gpt, strategy, 1, options)
        assert copied_in_an_engine(0, strategy, options) == planned, (strategy, options)
        assert (planned > 0) == ("precision" in options)  # on a CPU what is offloaded is there already


def test_a_gpu_says_what_is_left_and_how_long_it_sends() -> None:
    workload = WORKLOADS["gpt"]
    planned = RunPlan.of(workload, 2, ("ddp", "fsdp"))
    table = planned.on("1MB,1GB/s,10us").set_index("strategy")
    for _, row in table.iterrows():
        assert row["left_bytes"] == 1_000_000 - row["rest_bytes"] - row["gathered_bytes"]
        kept = {rows: kept_for_backward(workload, rows) for rows in (1, int(row["rows_that_fit"]) + 1)}
        assert row["row_bytes"] == pytest.approx(kept[1], rel=0.01)
        assert max(kept.values()) - 1.02 * row["row_bytes"] <= row["left_bytes"] < 1.01 * max(kept.values())
    model = described(gpt())
    messages = len(model.params) + 2  # two by which ranks agree, which carry as many numbers
    assert table.loc["ddp", "sending_ms"] == pytest.approx(messages * 0.02 + 4 * (model.numel + messages) / 1e6)
    slower = planned.on("1MB,0.5GB/s,10us").set_index("strategy")
    assert (slower["sending_ms"] > table["sending_ms"]).all()
    assert planned.on("1kB,1GB/s,10us")["rows_that_fit"].tolist() == [0, 0]


def test_what_is_offloaded_takes_no_memory_of_the_gpu() -> None:
    whole, parameters, states = (
        RunPlan.of(WORKLOADS["gpt"], 3, "fsdp", offload=offload).on("1MB,1GB/s,10us").iloc[0]
        for offload in ("none", "parameters", "all")
    )
    assert parameters["left_bytes"] - whole["left_bytes"] == whole["parameter_bytes"] == parameters["offloaded_bytes"]
    sharded = whole["parameter_bytes"] + whole["gradient_bytes"] + whole["optimizer_bytes"]
    assert states["left_bytes"] - whole["left_bytes"] == sharded == states["offloaded_bytes"]
    assert parameters["rest_bytes"] == states["rest_bytes"] == whole["rest_bytes"]


def test_data_with_batches_of_its_own() -> None:
    batches = [torch.stack([Tokens()[place] for place in range(4)])]
    own = Workload(gpt, batches, loss)
    assert kept_for_backward(own, 4) == kept_for_backward(WORKLOADS["gpt"], 4)
    assert kept_for_backward(own, 1) == kept_for_backward(WORKLOADS["gpt"], 1)
    assert RunPlan.of(own, 2, "fsdp").on("1MB,1GB/s,1us")["rows_that_fit"].item() > 0
    with pytest.raises(ValueError, match="rows: 2 is given, but the data's batches have 4 rows; ask for 1 or 4"):
        kept_for_backward(own, 2)
    one = Workload(gpt, [batches[0][:1]], loss)  # all that is kept counts as that row's
    assert RunPlan.of(one, 2, "fsdp").on("1MB")["row_bytes"].item() == kept_for_backward(one, 1)


def test_what_depends_on_values_is_refused() -> None:
    def by_value(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss(model, batch) * batch.sum().item()

    workload = Workload(gpt, Tokens(), by_value)
    with pytest.raises(ValueError, match="model: what it computes depends on values"):
        kept_for_backward(workload, 1)
    table = RunPlan.of(workload, 2).on("1MB,1GB/s,10us")
    assert_only_rows_are_missing(table, list(table["strategy"]))


def assert_only_rows_are_missing(table: pd.DataFrame, of: list[str]) -> None:
    for name in ("row_bytes", "rows_that_fit"):
        assert table.loc[table[name].isna(), "strategy"].tolist() == of
    assert (table["left_bytes"] == 1_000_000 - table["rest_bytes"] - table["gathered_bytes"]).all()
    assert table["sending_ms"].notna().all()
    unknown = "" if len(of) == len(table) else f": not known of {listing(of)}"
    assert f"without activations{unknown} · GPU" in memory_on_gpu(table, 1e6).layout.title.subtitle.text
    assert readable_fit(table)["rows that fit"].isna().sum() == len(of)


def test_of_divided_layers_it_says_what_is_left() -> None:
    table = RunPlan.of(WORKLOADS["uneven"], 4, ("single", "zero1", "fsdp"), tp=2).on("1MB,1GB/s,10us")
    assert_only_rows_are_missing(table, ["zero1", "fsdp"])


def test_memory_alone_says_what_fits_and_the_name_of_a_card_says_all_three() -> None:
    planned = RunPlan.of(WORKLOADS["gpt"], 2, ("ddp", "fsdp"))
    alone, linked = planned.on("1MB"), planned.on("1MB,1GB/s,10us")
    assert alone.drop(columns="sending_ms").equals(linked.drop(columns="sending_ms"))
    assert alone["sending_ms"].isna().all()
    assert (memory_bytes("24GiB"), memory_bytes("1.5 KiB"), memory_bytes("2GB")) == (24 * 2**30, 1536, 2e9)
    for card in (*cards(), "H100", " 4090 ", "a100-80", "A100 80GB"):
        gpu = Gpu.parse(card)
        assert gpu.memory_bytes > 1e10
        assert gpu.link is not None


def test_bad_input_is_named() -> None:
    for call, said in (
        (lambda: Gpu.parse("h900"), "gpu: 'h900' is not understood; write a card (t4, "),
        (lambda: Gpu.parse("24,32GB/s,1us"), "memory: '24' is not understood"),
        (lambda: Gpu.parse("24GB,fast,1us"), "link: 'fast,1us' is not understood"),
        (lambda: Gpu(0, Link(1, 1)), "memory: 0 is given"),
        (lambda: Gpu.parse("24Gb,32GB/s,1us"), "memory: '24Gb' is not understood; write a number above 0 and kB"),
        (lambda: memory_bytes("-3GB"), "memory: '-3GB' is not understood"),
        (lambda: rows_that_fit(10, {1: 2}), "kept: 1 numbers of rows"),
        (lambda: rows_that_fit(10, {1: 2, 3: 2}), "kept: 3 rows keep 2 bytes"),
        (lambda: kept_for_backward(WORKLOADS["gpt"], 0), "rows: 0 is given"),
    ):
        with pytest.raises(ValueError, match="^" + said.replace("(", r"\(")):
            call()


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", "--ranks", "8", *arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_command_line_says_what_is_left() -> None:
    train = ("--workload", "data/train.py:workload")
    text = said(*train, "--gpu", "24GB,32GB/s,10us", "--precision", "bf16")
    assert "rows sending strategy" in text
    assert "* takes no precision" in text
    assert re.findall(r"(\w+) \* ", text) == 2 * ["single", "ddp", "bucketed"]
    text = said(*train, "--gpu", "h100", "--tp", "2", "--strategies", "zero1")
    assert "On a GPU of h100" in text
    assert "What a row keeps is not known where layers are divided, or depend on values; libraries" in text
    assert re.search(r"ddp 14\.00 14\.00 84\.00 112\.0 24\.50 .* ddp -32\.00 ", said("--params", "7B", "--gpu", "80GB"))
    rows = json.loads(said("--params", "7B", "--gpu", "80GB", "--json"))["strategies"]
    assert [row["left_bytes"] for row in rows] == [80e9 - row["total_bytes"] for row in rows]


def test_the_figure_adds_up_to_what_is_at_rest():
    """Buffers too, which are no role's; step counters are too few to be seen."""
    held = {"parameter_bytes": [4e6], "gradient_bytes": [4e6], "optimizer_bytes": [8e6], "rest_bytes": [17e6]}
    table = pd.DataFrame({"strategy": ["ddp"], **held})
    assert memory_on_gpu(table, None).data[-1].x[0] == pytest.approx(17)  # in MB, the end of the bar
    names = {trace.name for trace in memory_on_gpu(table.assign(rest_bytes=16e6 + 120), None).data}
    assert len(names) == len(memory_on_gpu(table, None).data) - 1
