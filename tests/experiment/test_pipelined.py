"""Schedules compared: losses of one process, the messages of the plan, and what is refused before ranks start."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardlab.engines.checkpoint.directory import latest
from shardlab.engines.checkpoint.manifest import read_manifest
from shardlab.experiment import CompareConfig, Workload, compare, what_if, write_report
from shardlab.experiment.planned.forecast import forecast_step
from shardlab.experiment.planned.plan import plan_all, to_plan
from shardlab.experiment.told.answer import answer
from shardlab.experiment.told.pipelined import bubble_line, bubble_of, bubbles, stages_of
from shardlab.experiment.told.saved_runs import load_saved
from shardlab.records.store import Records
from shardlab.records.tables import MEMORY, SHARDS
from shardlab.schedules import make_schedule
from shardlab.tensor_parallel import Column, Row
from shardlab.why.causes import causes
from tests.analysis.made_pipeline import AXES, even, recorded


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def layers():
    torch.manual_seed(0)
    parts = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(*parts).double()


def mean_square(model, batch):
    given, wanted = batch
    return (model(given) - wanted).square().mean()


def batches(rows=8):
    given = torch.sin(torch.arange(rows * 6, dtype=torch.float64)).view(rows, 6)
    return [(given + step, given[:, :3] - step) for step in range(3)]


WORKLOAD = Workload(layers, batches(), mean_square)
BASE = {"ranks": 2, "pipe": 2, "device": "cpu", "steps": 4}


def test_losses_are_those_of_one_process_and_all_messages_those_of_the_plan(pools, tmp_path):
    options = {**BASE, "ranks": 4, "schedule": ("1f1b", "zb-h1"), "micro_batches": 4, "clip": 0.5, "save_every": 4}
    found = compare(WORKLOAD, tmp_path / "run", pool=pools(4), strategies=("single", "fsdp"), **options)
    table = found.summary.set_index("strategy")
    assert not found.failed
    assert list(table.index) == ["single", "fsdp+1f1b", "fsdp+zb-h1"]
    assert table["max_loss_difference"].max() < 1e-12
    assert (table["norm_ratio"] - 1).abs().max() < 1e-12
    assert table["as_planned"].all()
    comparison, config = load_saved(tmp_path / "run")
    assert [line.title for line in answer(comparison)].count("BUBBLE") == 1
    assert write_report(comparison, config).stat().st_size > 10_000
    assert read_manifest(latest(tmp_path / "run/checkpoints/fsdp+zb-h1")).num_steps == 4
    sent = found.records.collectives.query("axis == 'pipe' and op == 'send' and step == 3 and run == 'fsdp+1f1b'")
    micro_batch_bytes = 8 // 2 * 16 * 8  # rows of a data rank, hidden, float64
    assert sent.groupby("rank")["bytes"].agg(list).to_dict() == {rank: [micro_batch_bytes] * 4 for rank in range(4)}
    units = found.records.spans.query("run == 'fsdp+1f1b' and step == 3 and rank == 0")["unit"]
    assert {f"0{kind}{number}" for kind in "FB" for number in range(4)} <= set(units)


def test_stages_that_compute_in_16_bits_send_what_is_planned(pools, tmp_path):
    """Stages give what the precision says, here float32, whatever the model's dtype is."""
    options = {**BASE, "schedule": ("zb-h1",), "micro_batches": 4, "precision": "bf16"}
    found = compare(WORKLOAD, tmp_path / "run", pool=pools(2), strategies=("single", "zero1"), **options)
    table = found.summary.set_index("strategy")
    assert table["as_planned"].all()
    cost = next(line.text for line in answer(found) if line.title == "COST")
    assert cost.endswith("messages: zero1+zb-h1 4")  # sent, and as many received
    assert 0 < table.loc["zero1+zb-h1", "max_loss_difference"] < 0.05
    assert found.losses_equal


IN_PARTS = replace(WORKLOAD, tp_plan={"0": Column(), "2": Row()})
GPT = {**BASE, "ranks": 4, "tp": 2, "text": "grammar", "seq_len": 16, "dtype": "float64", "clip": 1.0}


@pytest.mark.parametrize(("strategy", "plan"), [("zero1", "1f1b"), ("fsdp", "interleaved")])
def test_stages_of_divided_layers_train_as_one_process(pools, tmp_path, strategy, plan):
    """Pipe and tensor on one mesh, with a tied embedding; each tensor rank sends to the same one of the next stage."""
    options = {**GPT, "schedule": (plan,), "micro_batches": 2, "batch": 4}
    config = CompareConfig(**options, strategies=("single", strategy))
    found = compare(config, tmp_path / "run", pool=pools(4))
    table, run = found.summary.set_index("strategy"), f"{strategy}+{plan}"
    assert not found.failed
    assert table["max_loss_difference"].max() < 1e-10
    assert (table["norm_ratio"] - 1).abs().max() < 1e-10
    assert table["as_planned"].all()
    comparison, config = load_saved(tmp_path / "run")
    assert config.mesh_axes(run) == {"pipe": 2, "data": 1, "tensor": 2}
    sent = found.records.collectives.query("run == @run and step >= 0")
    assert "setup" not in set(sent["phase"])  # also what is posted between actions, and lent before and behind them
    lent = sent[sent["tag"].str.contains("tied ")]
    assert {(tag.split()[0], phase) for tag, phase in zip(lent["tag"], lent["phase"], strict=True)} == {
        ("tied", "forward"), ("gradient", "backward"),
    }  # fmt: skip
    assert write_report(comparison, config).stat().st_size > 10_000


def test_a_cut_may_find_the_tensor_between_two_divided_layers_in_parts(pools, tmp_path):
    """Then ranks tell each other what comes, and whether all was as planned is not known."""
    options = {**BASE, "ranks": 4, "tp": 2, "schedule": "gpipe", "micro_batches": 2, "begins": "2"}
    found = compare(IN_PARTS, tmp_path / "run", pool=pools(4), strategies=("single", "ddp"), **options)
    assert not found.failed
    assert found.summary["max_loss_difference"].max() < 1e-10


def test_stages_go_on_from_their_checkpoint(pools, tmp_path):
    options = {**BASE, "ranks": 4, "schedule": ("1f1b", "zb-h1"), "micro_batches": 4, "strategies": ("single", "fsdp")}
    whole = compare(WORKLOAD, tmp_path / "whole", pool=pools(4), **options | {"steps": 6})
    compare(WORKLOAD, tmp_path / "first", pool=pools(4), **options, save_every=4)
    resumed = compare(
        WORKLOAD, tmp_path / "rest", pool=pools(4), **options | {"steps": 6}, resume=str(tmp_path / "first")
    )
    assert not resumed.failed
    assert resumed.summary["as_planned"].all()
    losses, rest = (
        one.records.steps.pivot_table(index="step", columns="run", values="loss") for one in (whole, resumed)
    )
    assert list(rest.index) == [4, 5]
    assert (losses.loc[rest.index] - rest).abs().max().max() < 1e-12
    assert (losses.sub(losses["single"], axis=0)).abs().max().max() < 1e-12


def test_the_plan_of_stages_is_that_of_the_formulas():
    cut = to_plan(WORKLOAD, 4, "ddp", pipe=2, begins="2")
    assert list(stages_of(cut, plan_all(cut))["parameter_bytes"]) == [8 * 7 * 16, 8 * (2 * 17 * 16 + 17 * 3)]
    options = {"pipe": 2, "schedule": ("1f1b", "gpipe", "interleaved"), "micro_batches": 6}
    config = to_plan(WORKLOAD, 4, "ddp", **options)
    table = stages_of(config, plan_all(config))
    assert list(table["rank"]) == [0, 2] * 3
    assert list(table["in_flight"]) == [2, 1, 6, 6, (4 + 1) / 2, (2 + 1) / 2]
    assert list(table["idle"]) == pytest.approx([3 / 21] * 4 + [1.5 / 19.5] * 2)  # (p-1)(F+B) of (m+p-1)(F+B), by v
    assert list(table["messages"]) == [6] * 4 + [18] * 2  # m each way, and (2v - 1) m for v stages a rank, shared out
    assert list(table["sent_bytes"]) == [6 * 4 * 16 * 8] * 4 + [18 * 4 * 16 * 8] * 2
    numel = [(6 + 1) * 16 + (16 + 1) * 16, (16 + 1) * 16 + (16 + 1) * 3]
    assert sorted(table["parameter_bytes"][:2]) == sorted(8 * one for one in numel)
    assert (table["optimizer_bytes"] == 2 * table["parameter_bytes"]).all()


@pytest.mark.parametrize("width", [6, 512])  # numbers that a run without values computes, or memory nobody has written
def test_a_weight_that_stages_share_is_planned_as_used_in_all_of_them(width):
    def tied():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        model[2].weight = model[0].weight
        return model

    workload = Workload(tied, [torch.ones(8, width)], lambda model, batch: model(batch).mean())
    config = to_plan(workload, 2, "ddp", pipe=2, begins="1", micro_batches=2)
    assert list(stages_of(config, plan_all(config))["messages"]) == [2 + 1, 2 + 1]


def made_anew(rank, ranks, seed):
    while True:
        yield batches(2)[0]


def test_peaks_of_stages_are_foretold_to_the_byte_and_grow_by_what_is_in_flight(pools, tmp_path):
    options = {**BASE, "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1"), "strategies": ("zero1",)}
    peaks = {}
    for number in (4, 8):
        config = CompareConfig(workload=replace(WORKLOAD, data=made_anew), micro_batches=number, **options)
        found = compare(config, tmp_path / f"{number}", pool=pools(2))
        for (run, rank), own in found.records.steps.dropna(subset="peak_bytes").groupby(["run", "rank"]):
            told = forecast_step(config, run, None, rank).records.steps["peak_bytes"]
            assert list(own["peak_bytes"]) == list(told)
            peaks[run, rank, number] = own["peak_bytes"].max()
    grown = {(run, rank): size - peaks[run, rank, 4] for (run, rank, number), size in peaks.items() if number == 8}
    micro_batches = 4 * (2 * 6 + 2 * 3) * 8  # with targets
    assert [grown["zero1+1f1b", 0], grown["zero1+zb-h1", 0]] == [micro_batches] * 2
    assert [grown["zero1+1f1b", 1], grown["zero1+zb-h1", 1]] == [micro_batches + 4 * 8] * 2  # and losses
    assert grown["zero1+gpipe", 0] > 4 * 2 * 16 * 8 + micro_batches


def two_tensors():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Pair(), nn.Identity()).double()


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


def under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch[0])
    return (output.float() - batch[1]).square().mean()


def with_loss(loss):
    return {"workload": replace(WORKLOAD, loss=loss)}


def of_model(model):
    return {"workload": replace(WORKLOAD, model=model)}


LISTS = {
    "stands_still.csv": "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
    "lacks.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n",
    "twice.csv": "0F0,0F0,0B0\n1F0,1B0\n",
    "right.csv": "0F0,0B0\n1F0,1B0\n",
    "words.csv": "stage,micro_batch\n0,0\n",
}
REFUSED = [
    ({"pipe": 3}, "pipe: 3 does not divide 2 ranks"),
    ({"schedule": ("1f2b",)}, "schedule: '1f2b' is not one of gpipe, 1f1b, interleaved, zb-h1, nor a file"),
    ({"schedule": ()}, "schedule: none given; at least one is needed of gpipe, 1f1b, interleaved, zb-h1"),
    ({"schedule": ("interleaved",), "micro_batches": 3}, "micro_batches: 3; interleaved takes a multiple of 2"),
    ({"ranks": 8, "pipe": 8}, "stages: 8 of a model with 7 parts; give 1 to 7"),
    ({"tp": 2, "ranks": 2}, "pipe: 2, with tp 2, does not divide 2 ranks; take 4 or a multiple"),
    (
        {"workload": IN_PARTS, "tp": 2, "ranks": 4, "begins": "3"},
        "tp: no layer of rank 1 of the pipeline is divided; cut elsewhere, by 'begins', among 0, 2",
    ),
    ({"precision": "fp16", "strategies": ("zero1",)}, "precision: 'fp16' scales the loss.*take 'bf16' or 'full'"),
    (
        of_model(tied) | {"precision": "bf16", "strategies": ("zero1",)},
        "precision: '0.weight' is tied over ranks; take",
    ),
    (with_loss(under_autocast), "loss: it calls the model under autocast.*take precision='bf16'"),
    ({"strategies": ("torch_ddp",)}, "strategies: pipe makes no stages of torch's own 'torch_ddp'"),
    ({"begins": ("0",)}, "the stages behind the first; give 1 of 1, 2, 3, 4, 5, 6, in this"),
    ({"wrap": 200, "begins": "6", "strategies": ("fsdp",)}, "no module has 200 .*; said of the stages of rank 1"),
    ({"accumulation": 2}, "accumulation: 2; with pipe micro_batches says it"),
    ({"pipe": 1, "micro_batches": 4}, "micro_batches: only with stages; set pipe to 2 or more"),
    ({**of_model(two_tensors), "pipe": 4, "ranks": 4}, "have no parameters; name others in 'begins'"),
    (of_model(lambda: nn.Sequential(nn.Linear(6, 2), Pair(), nn.Linear(2, 64)).double()), "stage 0 gives tuple; cut"),
    (of_model(lambda: nn.Bilinear(6, 6, 3).double()), "model: Bilinear does not say where it may be cut"),
    (with_loss(lambda model, batch: model(*batch).sum()), "loss: with pipe it has to call the model with one tensor"),
    ({"schedule": ("stands_still.csv",), "micro_batches": 2}, "it deadlocks: 0B0 of rank 0 waits for 1B0 of rank 1"),
    ({"schedule": ("lacks.csv",), "micro_batches": 2}, "schedule: lacks.csv: 1B1 is missing on rank 1"),
    ({"schedule": ("twice.csv",), "micro_batches": 1}, "schedule: twice.csv: 0F0 stands twice on rank 0"),
    ({"schedule": ("right.csv",), "micro_batches": 4}, "micro_batches: 4, and .*right.csv is for 1; set"),
    ({"schedule": ("words.csv",)}, "schedule: words.csv: action: 'stage' is none; write stage, F, B, I or W"),
    ({"schedule": ("no_text.csv",)}, "schedule: no_text.csv cannot be read: it is no text; name a table of actions"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:24] for _, said in REFUSED])
def test_what_cannot_be_is_refused_before_ranks_start(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in LISTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "no_text.csv").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=said):
        CompareConfig(**{"workload": WORKLOAD, **BASE, "strategies": ("ddp",), **options})


def test_a_list_of_ones_own_is_a_schedule(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    config = CompareConfig(workload=WORKLOAD, **BASE, schedule=str(tmp_path / "mine.csv"), micro_batches=2)
    assert config.strategies == ("single", "ddp+mine")
    assert config.alone("ddp+mine").strategies == ("ddp+mine",)
    assert config.mesh_axes("ddp+mine") == {"pipe": 2, "data": 1}
    assert replace(config, steps=5).micro_batches == 2


def test_what_another_list_would_take_and_what_is_said_of_the_bubble(tmp_path):
    """As long as a record of it, the median of two ranks of which one ends earlier; WHY says the same of it."""
    schedule, run = make_schedule("1f1b", 2, 4), "ddp+1f1b"
    tables = (table.assign(run=run) for table in recorded(schedule, even))
    collectives, spans, steps = tables
    manifest = {"schedule": schedule.to_csv(), "mesh": AXES}
    records = Records(collectives, spans, MEMORY.frame([]), SHARDS.frame([]), steps, {run: manifest})
    config = CompareConfig(workload=WORKLOAD, **BASE, micro_batches=4)
    own, halves = tmp_path / "mine.csv", make_schedule("zb-h1", 2, 4)
    own.write_text(halves.to_csv())
    twice = make_schedule("1f1b", 2, 8), lambda action: even(action) / 2
    tried = [({"schedule": name}, halves, even) for name in ("zb-h1", str(own))]
    for changes, other, us_of in [({"micro_batches": 8}, *twice), *tried]:
        found = what_if(records, config, run, **changes)
        assert found.is_reproduced is True  # no numpy's, which is no JSON
        of_it = recorded(other, us_of)[2]["step_us"]  # of all steps, each of two ranks
        assert 1e6 * found.changed == pytest.approx(of_it.mean())
    (bubble,) = (one for one in causes(collectives, spans, steps, axes=AXES) if one.name == "pipeline bubble")
    found = what_if(records, config, run, **bubble.settings)
    assert bubble.gain_us == pytest.approx(1e6 * (found.recorded - found.changed))
    with pytest.raises(ValueError, match="prefetch: with stages only micro_batches and schedule can be changed"):
        what_if(records, config, run, prefetch=2)
    found = bubble_of(run, bubbles(records))
    assert found.pop("bubble_unknown") is None
    assert list(found.values()) == pytest.approx([0.2, 0.2, 0.2, 2])
    assert bubble_of("single", bubbles(records)) == {}
    assert bubble_line(bubbles(records)).startswith(f"ranks wait for other stages: {run} 20 % (foretold 20 %, of equal")
    for lost, why in (
        (spans[spans["rank"] == 0], "spans: rank 1 has none"),
        (spans[:0], "spans: those of no step are whole"),
    ):
        row = bubble_of(run, bubbles(replace(records, spans=lost)))
        assert (row["bubble"], row["even_bubble"]) == (None, pytest.approx(0.2))
        assert row["bubble_unknown"].startswith(why)
        line = bubble_line(bubbles(replace(records, spans=lost)))
        assert line.startswith(f"ranks wait for other stages: {run}: not known, because of {why}")
