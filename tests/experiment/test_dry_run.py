"""A step without ranks, values or time holds and sends what a step of ranks does, to the byte; and its clock."""

import time
from functools import partial

import pandas as pd
import psutil
import pytest
import torch
from torch import nn

from shardlab.analysis import peak
from shardlab.comm.foretold import Costs, ForetoldMesh, ToldClock, Wire
from shardlab.experiment import CompareConfig, Workload, compare
from shardlab.experiment.planned.dry_run import dry_run
from shardlab.experiment.planned.forecast import THIN, priced
from shardlab.experiment.told.answer import answer
from shardlab.vocabulary import FLAG
from shardlab.why import critical_path
from shardlab.why.recorded_step import recorded_steps
from tests.experiment.test_run_plan import Tokens, gpt, loss
from tests.planner.test_machine import COSTS

MOMENT = 0.001


def costs_nothing(*_):
    return 0.0


def dry(config, strategy, message=0.0, operation=costs_nothing, **options):
    return dry_run(config, strategy, ToldClock(Wire(lambda _: Costs(message))), operation, **options)


def peak_of(records, run):
    rows = peak(records.memory[(records.memory["run"] == run) & (records.memory["rank"] == 0)])
    rows = rows[rows["bytes"] > 0]
    return dict(zip(rows["role"], rows["bytes"], strict=True))


def sent_in(records, run, step):
    rows = records.collectives[(records.collectives["run"] == run) & (records.collectives["rank"] == 0)]
    rows = rows[(rows["step"] == step) & (rows["phase"] != "metrics")].sort_values("seq")
    return list(rows[["op", "axis", "tag", "dtype", "numel", "bytes"]].itertuples(index=False, name=None))


SMALL = Workload(gpt, Tokens(), loss)


@pytest.mark.parametrize(
    ("ranks", "strategies", "options"),
    [
        (2, ("single", "ddp", "bucketed", "zero1", "fsdp"), {"accumulation": 2, "clip": 1.0, "workload": SMALL}),
        (3, ("zero2", "zero3"), {"precision": "bf16", "workload": SMALL}),
        (2, ("fsdp",), {"prefetch": 0, "offload": "all"}),
        (2, ("fsdp",), {"sharding": "shard_grad_op", "dtype": "float64", "replicate_below": 1000}),
        (2, ("zero2",), {"bucket_mib": 0.25, "partition": "balanced"}),
        (4, ("fsdp",), {"sharding": "hybrid_shard"}),
        (4, ("fsdp",), {"tp": 2}),
    ],
)
def test_peak_by_role_and_messages_are_those_of_ranks(pools, tmp_path, ranks, strategies, options):
    of_text = {} if "workload" in options else {"model": "gpt-1m", "text": "grammar", "seq_len": 16}
    config = CompareConfig(
        strategies=strategies, ranks=ranks, steps=3, batch=4 * ranks, device="cpu", **of_text, **options
    )
    done = compare(config, tmp_path / "out", pool=pools(ranks))
    assert done.summary["as_planned"].all()
    assert (done.summary["planned_rest_bytes"] == done.summary["rest_bytes"]).all()
    assert done.summary["planned_wire_bytes"].tolist() == pytest.approx(done.summary["wire_bytes_per_step"].tolist())
    for strategy in strategies:
        found = dry(config, strategy)
        assert peak_of(found, strategy) == peak_of(done.records, strategy), strategy
        assert sent_in(found, strategy, 1) == sent_in(done.records, strategy, 2), strategy


class Recurrent(nn.Module):
    """One kernel on a CPU as an LSTM, whose library knows what it keeps; as a GRU operations that hide their views."""

    def __init__(self, kind):
        super().__init__()
        self.layers = kind(32, 48, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_peak_of_recurrent_layers_is_that_of_ranks(pools, tmp_path, kind):
    workload = Workload(partial(Recurrent, kind), [torch.ones(4, 16, 32)] * 3, squares)
    config = CompareConfig(workload=workload, strategies=("fsdp",), ranks=2, steps=3, device="cpu")
    done = compare(config, tmp_path / "out", pool=pools(2))
    for strategy in config.strategies:
        assert peak_of(dry(config, strategy), strategy) == peak_of(done.records, strategy), strategy


def cross_entropy(model, rows):
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten())


def long_at(place):
    """Batches of four rows of 8 tokens, and one of rows of 256."""
    return [torch.full((4, 256 if number == place else 8), number) for number in range(10)]


def words():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 50))


@pytest.mark.parametrize(("ranks", "accumulation", "places"), [(2, 1, (0, 3)), (3, 2, (9,))])
def test_the_peak_is_that_of_the_longest_batch_wherever_it_comes(pools, tmp_path, ranks, accumulation, places):
    peaks = {}
    for place in places:
        config = CompareConfig(
            workload=Workload(words, long_at(place), cross_entropy), strategies=("zero2", "fsdp"), ranks=ranks,
            steps=5, accumulation=accumulation, device="cpu",
        )  # fmt: skip
        done = compare(config, tmp_path / str(place), pool=pools(ranks))
        for strategy in config.strategies:
            row = done.summary.set_index("strategy").loc[strategy]
            assert row["peak_step"] == place // accumulation
            assert row["peak_bytes"] > 3 * row["least_peak_bytes"]
            foretold, measured = (peak_of(records, strategy) for records in (dry(config, strategy), done.records))
            assert sum(foretold.values()) == sum(measured.values())
            # What the first batch has left when tracing began at the second is told apart better.
            assert foretold == measured or place % accumulation
            peaks.setdefault((place > 0, strategy), set()).add(row["peak_bytes"])
        assert f"in step {place // accumulation}, and" in answer(done)[0].text
    # In the first step there is no optimizer state.
    assert len(places) == 1 or all(max(peaks[True, name]) > max(peaks[False, name]) for name in ("zero2", "fsdp"))


class Unused(nn.Module):
    """Most of its parameters are in layers that nobody calls."""

    def __init__(self):
        super().__init__()
        self.spare, self.used = nn.ModuleList(nn.Linear(48, 48) for _ in range(4)), nn.Linear(32, 48)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(("ranks", "strategies"), [(2, ("single", "bucketed", "zero3")), (3, ("zero1", "fsdp"))])
def test_parameters_that_no_rank_uses_get_neither_gradient_nor_state(pools, tmp_path, ranks, strategies):
    workload = Workload(Unused, [torch.ones(6, 32)] * 3, squares)
    config = CompareConfig(workload=workload, strategies=strategies, ranks=ranks, steps=3, device="cpu")
    done = compare(config, tmp_path / "out", pool=pools(ranks))
    for strategy in strategies:
        assert peak_of(dry(config, strategy), strategy) == peak_of(done.records, strategy), strategy


class Wide(nn.Module):
    """About 2 GB of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8192, 8192, bias=False) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def wide_batches(rank, ranks, seed):
    while True:
        yield torch.ones(4, 8192)


def squares(model, batch):
    return model(batch).square().mean()


def test_no_step_is_skipped_for_what_lay_in_memory_before():
    """What nobody has written is filled with NaN here; a pool of memory that was used before has anything in it."""
    options = {"ranks": 4, "sharding": "hybrid_shard", "precision": "fp16", "accumulation": 2, "workload": SMALL}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        records = dry(CompareConfig(strategies=("fsdp",), device="cpu", **options), "fsdp")
    finally:
        torch.use_deterministic_algorithms(False)
    sent = records.collectives[records.collectives["tag"] == FLAG].query("rank == 0 and step == 1")
    assert set(sent["phase"]) == {"backward", "step"}


def test_a_large_module_takes_little_memory_and_time():
    workload = Workload(Wide, wide_batches, squares, wrap="layers.*")
    config = CompareConfig(workload=workload, strategies=("fsdp",), ranks=1024, steps=3, device="cpu")
    before, began = resident_bytes(), time.process_time()
    found = dry(config, "fsdp")
    assert resident_bytes() - before < 2e8
    assert time.process_time() - began < 30  # (a backward of this takes longer in one thread)
    held = peak_of(found, "fsdp")
    layer = 4 * 8192**2
    assert held["parameter"] == 8 * layer // 1024
    assert held["gathered_parameter"] == 2 * layer


def resident_bytes():
    return psutil.Process().memory_info().rss


def test_operations_move_the_clock_and_messages_hide_behind_them():
    config = CompareConfig(
        strategies=("bucketed",), ranks=2, steps=3, model="gpt-1m", text="grammar", seq_len=16, batch=4, device="cpu"
    )
    alone = dry(config, "bucketed", operation=lambda *_: MOMENT).steps["step_us"].iloc[-1]
    short = dry(config, "bucketed", MOMENT, lambda *_: MOMENT).steps["step_us"].iloc[-1]
    only = dry(config, "bucketed", MOMENT).steps["step_us"].iloc[-1]
    assert alone > 100 * only > 0
    assert alone < short < alone + only  # most of them moved beside backward


@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "fsdp"])
def test_the_record_of_a_foretold_step_is_replayed_in_its_time(strategy):
    """The clock of a forecast and the replay of a record have one arithmetic, whatever slows what."""
    config = CompareConfig(
        strategies=(strategy,), ranks=2, steps=3, model="gpt-1m", text="grammar", seq_len=16, batch=4, device="cpu"
    )
    wire = Wire(lambda event: Costs(1e-5 + event.num_bytes / 1e9, 1e-4, 1e-5), 0.2, 0.3, meeting=1e-5)
    found = dry_run(config, strategy, ToldClock(wire), lambda *_: MOMENT)
    tables = [pd.concat([table, table.assign(rank=1)]) for table in (found.collectives, found.spans, found.steps)]
    again = recorded_steps(*tables)
    lengths = found.steps["step_us"].tolist()
    assert [one.us for one in again] == pytest.approx(lengths, abs=1)
    assert critical_path(again[-1])["duration_us"].sum() / 2 == pytest.approx(lengths[-1], abs=1)


def test_a_clock_lets_messages_of_an_axis_move_one_after_another_and_slows_what_is_beside():
    clock = ToldClock(Wire(lambda _: Costs(2.0), slows_compute=0.5, slowed_by_compute=1.0))
    with ForetoldMesh({"data": 2}, 0, clock) as mesh:
        first, second = (mesh.data.all_reduce(torch.ones(4), tag=tag) for tag in "ab")
        clock.compute(2.0)  # takes 3 s beside them; the first would take 4 s, and has done three quarters
        assert clock.now == pytest.approx(3.0)
        first.wait()
        assert clock.now == pytest.approx(3.5)
        second.wait()
        assert clock.now == pytest.approx(5.5)
        clock.compute(1.0)
        assert clock.now == pytest.approx(6.5)
        second.wait()
        assert clock.now == pytest.approx(6.5)


def test_a_message_that_waits_for_a_link_slows_nobody_and_a_late_meeting_is_waited_for():
    clock = ToldClock(Wire(lambda _: Costs(1.0, 10.0), slows_compute=1.0, meeting=0.5))
    with ForetoldMesh({"data": 2}, 0, clock) as mesh:
        clock.compute(0.2)
        pending = mesh.data.all_reduce(torch.ones(4))
        clock.compute(2.0)  # the first half of it beside the message, at half the pace
        assert clock.now == pytest.approx(0.2 + 1.0 + 1.5)
        pending.wait()
        assert clock.now == pytest.approx(0.2 + 10.0 + 0.2)  # no later than it has computed


@pytest.mark.parametrize(("computed", "ends"), [(0.0, 1.2), (1.0, 1.4)])
def test_the_time_of_a_link_begins_when_ranks_have_met_which_takes_longer_beside_compute(computed, ends):
    clock = ToldClock(Wire(lambda _: Costs(0.1, 1.0, 0.2), slowed_by_compute=1.0))
    with ForetoldMesh({"data": 2}, 0, clock) as mesh:
        pending = mesh.data.all_reduce(torch.ones(4))
        clock.compute(computed)
        pending.wait()
        assert clock.now == pytest.approx(ends)


def test_a_thin_product_takes_as_long_as_its_bytes():
    given = torch.zeros(64), torch.zeros(64, 1), torch.zeros(1, 64)
    _, flops, seconds = priced(COSTS, torch.ops.aten.addmm.default, given, torch.addmm(*given))
    assert flops == 2 * 64 * 64
    assert seconds == pytest.approx(COSTS.floors["forward"] + THIN * COSTS.operation("add", 4.0 * (3 * 64 + 4096)))


def test_an_operation_has_the_floor_of_its_phase_and_a_pace():
    x, y = torch.zeros(100), torch.zeros(25)  # 500 bytes
    alone = COSTS.operation("atan2", 500)
    for grads, floor, pace in ((True, "forward", 1.0), (False, "optimizer", 2.0)):
        with torch.set_grad_enabled(grads):
            _, size, seconds = priced(COSTS, torch.ops.aten.atan2.default, (x,), y, pace)
        assert (size, seconds) == (500, pytest.approx(COSTS.floors[floor] + pace * alone))
