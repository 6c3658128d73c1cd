"""What is said of time: of a config.json, and of a workload on a machine that was calibrated."""

import json
import re
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from typer.testing import CliRunner

from shardlab.bench import validated_here
from shardlab.cli import app
from shardlab.cli.job_words import verdict
from shardlab.forecast import published
from shardlab.forecast import search as all_ways
from shardlab.forecast.machine import Machine
from shardlab.planner.gpu import Gpu
from tests.planner.test_machine import COSTS
from tests.planner.test_search import LLAMA


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


ODD = """
import torch
from shardlab import Workload

class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lstm = torch.nn.Conv1d(4, 4, 3), torch.nn.LSTM(6, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(self.conv(x))[0]

workload = Workload(Odd, [torch.ones(4, 4, 8)] * 4, lambda model, batch: model(batch).square().mean())
"""


def said(*words, columns="100"):
    done = CliRunner().invoke(app, words, env={"COLUMNS": columns})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_model_like_llama_is_forecast_by_its_number_of_parameters():
    found = json.loads(said("forecast", "--params", "13B", "--ranks", "4", "--gpu", "h100", "--json"))
    assert found["num_params"] == 13_015_864_320  # Llama 2 13B, to the parameter
    assert (found["arguments"]["hidden"], found["arguments"]["layers"]) == (5120, 40)
    assert found["notes"] == ["Its sizes are assumed, with a vocabulary of 32,000; --config takes those of a file."]


def test_a_card_without_bf16_is_forecast_by_its_fp16(tmp_path):
    card = replace(Gpu.preset("a100-40gb"), name="V100, measured", peaks={"fp16": 1.1e14}, product_fractions={})
    card.write(tmp_path / "card.json")
    words = ("--params", "7B", "--ranks", "8", "--gpu", str(tmp_path / "card.json"))
    found = json.loads(said("forecast", *words, "--json"))
    assert found["arguments"]["precision"] == "fp16"
    assert found["seconds"] > 0
    assert json.loads(said("search", *words, "--json"))["ways"]


def test_a_step_that_was_measured_moves_the_others(config, tmp_path):
    options, step = ("forecast", "--config", config, "--ranks", "8", "--json"), tmp_path / "step.json"
    found = json.loads(said(*options))
    step.write_text(json.dumps(found | {"seconds": 2 * found["seconds"]}))
    moved = json.loads(said(*options, "--batch", "16", "--measured", str(step)))
    assert moved["seconds"] == pytest.approx(2 * json.loads(said(*options, "--batch", "16"))["seconds"], rel=0.1)
    step.write_text("{}")
    done = CliRunner().invoke(app, [*options, "--measured", str(step)])
    assert done.exit_code != 0
    assert "is no step; write one with shardlab forecast" in " ".join(done.output.split())


def test_a_config_gets_time_and_memory_and_what_was_left_out(config):
    words = ("forecast", "--config", config, "--ranks", "8", "--recompute", "full", "--network", "nvlink4")
    text = " ".join(said(*words).split())
    for part in (
        "TIME", "tokens a second", "(MFU)", "PLANNED", "GB in tensors at the peak, of 85.9 GB: it fits",
        "MISSES BY up to 20%: 26 measured steps like this one, of 2 machines, were missed by", "NOT IN IT", "matrix",
    ):  # fmt: skip
        assert part in text
    assert "TIME 1.1 to 1.7 s a step, 57,000 to 38,000 tokens a second" in text
    assert "% of the peak of bf16 (MFU)" in " ".join(said(*words, "--fp8").split())
    found = json.loads(said(*words, "--json"))
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert found["most_seconds"] == found["seconds"]
    assert found["arguments"]["recompute"] == "full"
    assert found["miss"]["share"] == pytest.approx(0.2, abs=0.005)


def test_who_has_four_h100_and_13b_reads_time_memory_what_to_try_and_how_sure_that_is():
    text = said("forecast", "--params", "13B", "--ranks", "4", "--gpu", "h100")
    titles = [line.split("  ")[0] for line in text.splitlines() if re.match("[A-Z]{2}", line)]
    assert titles == ["MODEL", "PLANNED", "TIME", "MEMORY", "TRY NEXT", "MISSES BY", "NOT IN IT"]
    text = " ".join(text.split())
    for words in (
        "TIME it does not fit; if it did, about 0.76 to 1.3 s a step, ", "; outside of what is known: see MISSES BY",
        "TRY NEXT --tp 4 --batch 4: 5% slower, 1 s a step, and fits, 60.4 GB", "MISSES BY outside of what is known: ",
        "LoRA and pipelines are not forecast",
    ):  # fmt: skip
        assert words in text
    of_plan = " ".join(said("plan", "--params", "13B", "--ranks", "4", "--gpu", "h100", "--precision", "fp32").split())
    command = "shardlab forecast --params 13B --ranks 4 --gpu h100 --precision fp32"
    assert f"TIME not in this plan: {command} says it, the peak, what to try, and how sure that is NEXT" in of_plan
    of_memory = " ".join(said("plan", "--params", "13B", "--ranks", "4", "--gpu", "24GB,32GB/s,10us").split())
    assert "Its link counts with --workload alone" in of_memory
    assert "shardlab forecast --params 13B --ranks 4 --gpu h100 says it" in of_memory  # of a memory no time is known


def test_rows_over_hosts_are_printed_as_json_too():
    found = json.loads(said("plan", "--params", "7B", "--ranks", "64", "--per-host", "8", "--json"))
    across = {row["strategy"]: row["across_bytes"] for row in found["over_hosts"]}
    assert across["hpz"] == 2 * 2 * 7e9 * 63 / 64


def test_what_no_option_makes_fit_is_told_the_cards_that_would_do():
    text = " ".join(said("forecast", "--params", "7B", "--ranks", "1", "--gpu", "rtx4090").split())
    words = "TRY NEXT no single option makes it fit. What would do: 6 cards, with a sequence for each: fsdp, tp 2, "
    assert words in text
    # Several options together may do on as many.
    words = ("--params", "13B", "--ranks", "8", "--gpu", "a100-40", "--seq-len", "16384")
    would_do = "What would do: 8 cards, with a sequence for each: single, tp 8, micro-batch 1, accumulation 8, "
    assert would_do in " ".join(said("forecast", *words).split())


@pytest.mark.parametrize(
    ("params", "heads", "layers"), [("7B", 32, 32), ("70B", 72, 68), ("30B", 56, 48), ("100M", 6, 7)]
)
def test_a_model_like_llama_has_as_many_parameters_as_was_said_and_heads_that_cards_can_share(params, heads, layers):
    words = ("--params", params, "--ranks", "64", "--tp", "2", "--recompute", "full")
    found = json.loads(said("forecast", *words, "--json"))
    assert (found["arguments"]["heads"], found["arguments"]["layers"]) == (heads, layers)
    asked = float(params[:-1]) * {"B": 1e9, "M": 1e6}[params[-1]]
    assert found["num_params"] == pytest.approx(asked, rel=0.05)


def test_a_card_without_a_speed_says_how_to_measure_it():
    text = " ".join(said("forecast", "--params", "13B", "--ranks", "8", "--gpu", "mi300x").split())
    assert "or measure yours: shardlab calibrate --device cuda, and then --gpu card.json" in text


def test_what_is_warned_of_is_marked_in_tables_too():
    words = ("--params", "13B", "--ranks", "8", "--gpu", "a100-40", "--seq-len", "512")
    way = ("--recompute", "full", "--batch", "128", "--micro-batch", "16")
    assert "WARNING Beside the peak" in " ".join(said("forecast", *words, *way).split())
    table = said("forecast", *words, *way, "--strategy", "all")
    assert re.search(r"\nfsdp .* ([\d.]+) to ([\d.]+) \* ", table)
    assert not re.search(r"\nzero1 .*( to |\*)", table)
    assert "* Warned of: a range, to what that may cost" in table
    found = json.loads(said("search", *words, "--batch", "128", "--json"))["ways"]
    assert {why.partition(" ")[0] for way in found for why in way["warnings"]} >= {"Beside", "A"}


def test_what_is_not_known_is_a_range_or_no_error(config):
    text = " ".join(said("forecast", "--config", config, "--ranks", "64", "--recompute", "full").split())
    assert "TIME about 1.1 to 2.1 s a step, 470,000 to 250,000 tokens" in text
    assert "links between hosts of 400 to 100Gb/s per GPU; outside of what is known: see MISSES BY" in text
    assert "MISSES BY outside of what is known: the nearest measured step, MPT" in text
    found = json.loads(said("forecast", "--config", config, "--ranks", "8", "--tp", "8", "--json"))
    assert found["miss"]["share"] is None
    reason = "outside of what is known: only 12 measured steps are like this one, of nanotron"
    assert found["miss"]["reason"].startswith(reason)
    words = ("forecast", "--config", config, "--ranks", "64", "--batch", "128")
    found, text = json.loads(said(*words, "--json")), " ".join(said(*words).split())
    assert f"TIME about {' to '.join(f'{end:.2g}' for end in found['range_seconds'])} s a step, " in text
    assert f"TRY NEXT {found['try_next']} MISSES BY" in text
    assert f"by {found['miss']['usual_share']:.0%} at most" in text


def test_all_strategies_stand_in_one_table_with_the_numbers_that_each_has_alone(config):
    words = ("forecast", "--config", config, "--ranks", "16", "--recompute", "full", "--strategy")
    rows = json.loads(said(*words, "all", "--json"))["strategies"]
    assert [row["strategy"] for row in rows] == ["ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp"]
    alone = json.loads(said(*words, "zero2", "--json"))
    assert rows[3] == {name: alone.get(name) for name in rows[3]} | {
        "strategy": "zero2",
        "message_seconds": alone["parts"]["waiting for messages"] + alone["parts"]["slowed by messages"],
    }
    table = said(*words, "all")
    narrow = said(*words, "all", columns="80")
    assert all(f"\n{row['strategy']} " in narrow for row in rows), "no name goes on in the next line"
    assert re.search(r"\nddp +128 .*does not fit *\n", table)
    assert re.search(r"\nfsdp +8\.03 .* fits", table)
    assert "Links between hosts are not given: 400 to 100Gb/s per GPU are assumed." in " ".join(table.split())
    ends = [f"{alone[f'{end}_seconds']:.2g}" for end in ("least", "most")]
    assert re.search(rf"\nzero2 .* {' to '.join(ends)} ", table)
    assert " s a step" not in said(*words, "all", "--gpu", "24GB")
    done = CliRunner().invoke(app, [*words[:4], "1", "--strategy", "all"])
    assert "strategy: all is given, and on one data rank they are alike" in " ".join(done.output.split())


def test_a_step_of_one_gpu_has_something_to_try_next(config):
    words = ("forecast", "--config", config, "--ranks", "1", "--seq-len", "512", "--precision", "pure-bf16")
    assert "TRY NEXT --recompute selective: 15% slower, " in " ".join(said(*words, "--batch", "4").split())


def test_an_option_that_is_better_left_out_is_what_to_try_next(config):
    words = ("--config", config, "--ranks", "16", "--seq-len", "2048", "--compiled", "--recompute", "full")
    assert re.search(r"TRY NEXT without --recompute: \d+% faster, ", " ".join(said("forecast", *words).split()))


def test_a_step_that_waits_for_its_host_says_so_and_less_where_layers_are_compiled(config):
    words = ("forecast", "--config", config, "--ranks", "4", "--seq-len", "512")
    text = " ".join(said(*words).split())
    assert re.search(r"WARNING Host-bound: \d+% of a step the GPU waits for the next kernel to be launched", text)
    assert "Layers are taken to be written as in Llama, compiled, with" in " ".join(said(*words, "--compiled").split())
    eager, faster = (json.loads(said(*words, "--json", *more))["seconds"] for more in ((), ("--compiled", "--fp8")))
    assert faster < 0.85 * eager


def test_what_to_try_next_fits_or_is_faster_and_is_the_forecast_of_its_options(config):
    words = ("forecast", "--config", config, "--ranks", "4", "--seq-len", "8192")
    text = " ".join(said(*words).split())
    assert "it does not fit" in text
    found = re.search(r"TRY NEXT (--.*?): (\d+)% slower, ([\d.]+) s a step, and fits, ", text)
    option, change, seconds = found.groups()
    tried = json.loads(said(*words, *option.split(), "--json"))
    assert tried["seconds"] == pytest.approx(float(seconds), rel=0.05)
    assert tried["fits"].startswith("it fits")
    assert int(change) > 0


def test_a_nearly_full_memory_is_a_warning(config):
    text = " ".join(said("forecast", "--config", config, "--ranks", "8", "--seq-len", "9216").split())
    assert re.search("outside of what is known: see WARNING WARNING Beside the peak .* MEMORY ", text)
    assert "WARNING" not in said("forecast", "--config", config, "--ranks", "8", "--seq-len", "4096")


def test_logits_that_do_not_fit_are_named_with_what_helps(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "vocab_size": 128256}))
    words = ("forecast", "--config", str(path), "--ranks", "64", "--recompute", "full", "--seq-len")
    assert "it does not fit; 168 GB of it are logits, 131,072 tokens x 128,256 words: a chunked loss" in " ".join(
        said(*words, "131072").split()
    )
    assert "logits" not in said(*words, "4096").split("MISSES BY")[0]


LONG = """
import torch
from torch import nn
from shardlab import Workload

def model():
    return nn.Sequential(nn.Embedding(32000, 64), nn.Linear(64, 64), nn.Linear(64, 32000, bias=False))

def loss(model, rows):
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten())

workload = Workload(model, [torch.zeros(2, 131072, dtype=torch.long)] * 2, loss)
"""


def test_of_a_workload_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.py").write_text(LONG)
    text = said("plan", "--workload", "long.py:workload", "--ranks", "2", "--strategies", "ddp", "--gpu", "8GB")
    assert "and one row keeps more. Checkpoint layers in the model, or compute" in " ".join(text.split())
    assert "where logits are most of it, a chunked loss helps" in " ".join(text.split())


@pytest.fixture
def searched_once(monkeypatch):
    """What a command has found is found by the next, too."""
    found, search = {}, all_ways.search

    def once(sizes, ranks, sequences, **options):
        if (ranks, sequences) not in found:
            found[ranks, sequences] = search(sizes, ranks, sequences, **options)
        return found[ranks, sequences]

    monkeypatch.setattr(all_ways, "search", once)


def test_a_search_names_the_fastest_and_why_others_fall_out(config, searched_once):
    text = said("search", "--config", config, "--ranks", "64", "--batch", "128")
    titles = [line.split("  ")[0] for line in text.splitlines() if re.match("[A-Z]{2}", line)]
    assert titles[:2] == ["MODEL", "FASTEST THAT FITS"]
    assert "--seq-len gives others" in text
    for words in ("AS FAST", "by which a forecast may miss", "slower", "may reserve;"):
        assert words in " ".join(text.split())
    found = json.loads(said("search", "--config", config, "--ranks", "64", "--batch", "128", "--json"))
    ways = found["ways"]
    assert (ways[0]["why_not"], ways[0]["fits"], found["cards_that_would_do"]) == ("", True, None)
    assert any(way["why_not"].startswith("needs") and not way["fits"] for way in ways)
    ends = [f"{ways[0][f'{end}_seconds']:.2g}" for end in ("least", "most")]
    assert f"{' to '.join(dict.fromkeys(ends))} " in text
    assert ways[-1]["most_seconds"] is None, "of the first alone, as in the table"
    assert f" {' to '.join(f'{end:.2g}' for end in found['fastest']['range_seconds'])} s a step, " in text
    assert ways[0]["tokens_per_second"] == pytest.approx(128 * 8192 / ways[0]["seconds"])


def test_a_search_takes_the_options_of_a_forecast(config, searched_once):
    words = ("--config", config, "--ranks", "8", "--batch", "16", "--compiled", "--fp8", "--attention", "unfused")
    found = json.loads(said("search", *words, "--json"))["ways"][0]
    text = " ".join(said("search", *words).split())
    options = re.search(r"NEXT shardlab forecast with (.*?): what", text)[1].split()
    same = json.loads(said("forecast", *words, *options, "--json"))
    assert (same["seconds"], same["peak_bytes"]) == (found["seconds"], found["peak_bytes"])
    assert same["arguments"]["compiled"]
    assert "MISSES BY outside of what is known: " in text
    assert "9 of 10 were missed by 26% at most, each laboratory counting alike" in text


def test_a_search_without_a_way_says_how_many_cards_would_do(config, searched_once):
    words = ("search", "--config", config, "--ranks", "2", "--gpu", "4090")
    cards = json.loads(said(*words, "--json"))["cards_that_would_do"]
    text = " ".join(said(*words).split())
    assert f"WOULD DO {cards} cards, with a sequence for each: " in text
    assert "FASTEST THAT FITS none of" in text


def test_what_is_kept_of_a_parameter_and_how_micro_batches_add_up_are_options(config):
    words = ("forecast", "--config", config, "--ranks", "8", "--batch", "32", "--strategy", "zero2", "--json")
    each, once, pure = (
        json.loads(said(*words, *more)) for more in ([], ["--no-sync"], ["--precision", "pure-bf16"])
    )  # fmt: skip
    assert once["peak_bytes"] - each["peak_bytes"] == pytest.approx(2 * 7 / 8 * each["num_params"], rel=1e-3)
    assert once["seconds"] < each["seconds"]
    assert each["rest_bytes"] == pytest.approx((2 + 14 / 8) * each["num_params"], rel=1e-3)
    assert pure["rest_bytes"] == pytest.approx((2 + 6 / 8) * each["num_params"], rel=1e-3)
    assert each["mfu"] * each["seconds"] == pytest.approx(once["mfu"] * once["seconds"])
    assert each["tokens_per_day"] == pytest.approx(86400 * 32 * 8192 / each["seconds"])
    assert each["fits"].startswith("it hardly fits")


def test_what_was_not_calibrated_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(ODD)
    lines = dict.fromkeys(("forward", "input", "weight"), COSTS.products["forward"])
    costs = COSTS.__class__(**{**vars(COSTS), "products": lines})
    Machine("here", {}, 2, {"2": costs, "single": costs}).write(tmp_path / "machine.json")
    words = ("--workload", "odd.py:workload", "--ranks", "2", "--strategies", "ddp", "--calibration", "machine.json")
    assert "Of convolutions and recurrent layers nothing was calibrated" in " ".join(said("plan", *words).split())


@pytest.mark.parametrize(
    ("gigabytes", "words"),
    [(45, "it fits"), (60, "it fits, unless the allocator reserves more than 1.33 times that"),
     (75, "it hardly fits, with less than 10% left"), (80, "it does not fit")],
)  # fmt: skip
def test_what_fits_is_said_as_a_search_counts(gigabytes, words):
    assert verdict(gigabytes * 1e9, 80e9).startswith(words)


def test_a_workload_gets_times_and_peaks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CliRunner().invoke(app, ["template"]).output)
    lines = dict.fromkeys(("forward", "input", "weight"), COSTS.products["forward"])
    costs = COSTS.__class__(**{**vars(COSTS), "products": lines})
    Machine("here", {}, 2, {"2": costs, "single": costs}, is_quick=True).write(tmp_path / "machine.json")
    words = ("--workload", "train.py:workload", "--ranks", "2", "--strategies", "single,fsdp", "--calibration")
    rows = json.loads(said("plan", *words, "machine.json", "--json"))["strategies"]
    assert all(row["step_ms"] > 0 and row["peak_bytes"] > row["rest_bytes"] for row in rows)
    text = " ".join(said("plan", *words, "machine.json").split())
    assert "Times are those of here: how far they miss is not known" in text  # COSTS end with small operations
    assert "It was calibrated on here with 2 cores: times of this machine may be others." in text
    assert "It was calibrated quickly, with few sizes and readings." in text
    assert "Outside of what was calibrated, with larger operations or messages: single, fsdp." in text


def test_a_peak_needs_no_calibration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CliRunner().invoke(app, ["template"]).output)
    words = ("--workload", "train.py:workload", "--ranks", "2", "--strategies", "ddp,fsdp", "--peak", "--json")
    ddp, fsdp = json.loads(said("plan", *words))["strategies"]
    assert ddp["peak_bytes"] > fsdp["peak_bytes"] > fsdp["rest_bytes"]


PUBLISHED = cache(published.validate_published)


def test_the_published_half_of_validate_needs_no_calibration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published, "validate_published", PUBLISHED)
    text = " ".join(said("validate").split())
    for words in (
        "Misses of 72 published steps, %", "Misses of 198 published steps that were held out", "MPT 30B",
        "steps of small work, whose device waits for its host", "10 published steps with so little memory free",
        "nanotron tp", "this one, not warned of", "186/186",
    ):  # fmt: skip
        assert words in text
    assert "Of this machine nothing is said: machine.json is not there; shardlab calibrate, then this again." in text
    found = json.loads(said("validate", "--json"))
    assert found["held_out"]["error"]["median"] == pytest.approx(0.025, abs=0.001)
    assert found["held_out_not_warned"]["worst"] < 0.13 < found["warned"]["worst"]
    assert "here" not in found


def test_what_was_run_here_stands_beside_it_and_in_the_calibration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published, "validate_published", PUBLISHED)
    Machine("here", {}, 2, {"2": COSTS, "single": COSTS}).write(tmp_path / "machine.json")
    rows = [("ddp", 2, 4, None, 0.011, 0.010, 1e6), ("fsdp", 2, 4, None, 0.012, 0.020, 2e6)]
    columns = ["strategy", "ranks", "rows", "link", "predicted", "measured", "sent_bytes"]
    here = validated_here.with_errors(pd.DataFrame(rows, columns=columns))
    monkeypatch.setattr(validated_here, "validate_here", lambda *_: here)
    text = " ".join(said("validate").split())
    assert "Misses of 2 steps run here, %" in text
    assert "It was calibrated on here with 2 cores: forecasts of now may miss by more; calibrate again." in text
    assert "Choosing the strategy that is forecast to be fastest costs 0.0% on average." in text
    assert [row[0] for row in Machine.load("machine.json").validated] == ["ddp", "fsdp"]
    found = json.loads(said("validate", "--json"))
    assert found["here"]["error"]["worst"] == pytest.approx(0.4)
    assert len(found["rows"]) == 2
    assert found["differs"] == "on here with 2 cores"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibration", "nowhere.json"], "calibration: nowhere.json cannot be read"),
        (["--calibration", "machine.json", "--ranks", "3"], "ranks: 3 is given; here was calibrated for 2, single"),
        (["--out", "machine.json"], "out: machine.json cannot be made"),
        (["--gpu", "abacus"], "gpu: 'abacus' is not understood"),
    ],
)  # fmt: skip
def test_what_can_be_known_is_found_before_a_model_is_built(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("raise SystemExit('the model was built')")
    Machine("here", {}, 2, {"2": COSTS, "single": COSTS}).write(tmp_path / "machine.json")
    done = CliRunner().invoke(app, ["plan", "--workload", "model.py:workload", "--ranks", "2", *options])
    assert (done.exit_code, message in " ".join(done.output.split())) == (2, True), done.output


def test_bad_input_is_refused(config):
    of_it = ["--config", config, "--ranks"]
    for words, message in (
        (["plan", "--workload", "train.py:workload", "--params", "7B"], "params, workload: give one of them"),
        (["calibrate", "--ranks", "2,9999"], "ranks: '2,9999' is given; give numbers from 2 to 1024, such as 2,4"),
        (["calibrate", "--ranks", ""], "ranks: '' is given; give numbers from 2 to 1024, such as 2,4"),
        (["forecast", *of_it, "8", "--network", "3 per host"], "network: 3 per host do not divide 8 ranks"),
        (["forecast", *of_it, "64", "--gpu", "abacus"], "gpu: 'abacus' is not understood; write a card"),
        (["forecast", *of_it, "6", "--tp", "4"], "tp: 4 is given; it must divide 6 ranks"),
        (["forecast", *of_it, "12", "--tp", "3"], "tp: 3 is given; it must divide 32 heads and the MLP's width, 14336"),
        (["forecast", *of_it, "64", "--batch", "65"], "batch: 65 sequences is given; 64 data ranks"),
        (["search", *of_it, "8", "--precision", "bf16"], "precision: 'bf16' is not one of mixed, fp32"),
        (["forecast", *of_it, "8", "--precision", "bf16"], "precision: 'bf16' is not one of mixed, fp32"),
        (["forecast", *of_it, "8", "--gpu", "24GB,32GB/s,10us"], "gpu: 24GB,32GB/s,10us has a link"),
        (["forecast", *of_it, "8", "--strategy", "zero9"], "strategy: 'zero9' is not one of"),
        (["forecast", *of_it, "8", "--params", "13B"], "config, params: give one of them: --config config.json, or"),
        (["search", "--ranks", "8"], "config, params: give one of them: --config config.json, or --params 13B"),
        (["forecast", "--params", "13X", "--ranks", "8"], "params: '13X' is given; it must be a number above 0"),
        (["forecast", "--params", "0B", "--ranks", "8"], "params: '0B' is given; it must be a number above 0"),
        (["forecast", "--params", "nan", "--ranks", "8"], "params: 'nan' is given; it must be a number above 0"),
        (["plan", "--params", "infB", "--ranks", "8"], "params: 'infB' is given; it must be a number above 0"),
        (["forecast", "--params", "300T", "--ranks", "8"], "params: 3e+14 is given; at most 2e+14 are allowed"),
        (["forecast", "--params", "1M", "--ranks", "8"], "params: 1e+06 is given; the smallest like Llama has"),
        (["forecast", *of_it, "8", "--async-tp"], "async-tp: is given, and no layer is divided; give --tp 2, for"),
        (["search", *of_it, "1", "--async-tp"], "async-tp: is given, and no way divides layers; leave it out"),
        (["forecast", *of_it, "8", "--no-sync"], "no-sync: is given, and a step has one micro-batch; give more"),
        (["forecast", *of_it, "1", "--no-sync", "--batch", "2"], "no-sync: is given, and a step has one data rank"),
        (["forecast", *of_it, "8", "--gpu", "a100", "--fp8"], "fp8: is given; a100 has bf16, fp16, tf32"),
        (["search", *of_it, "64", "--batch", "7"], "batch: 7 sequences a step cannot be divided over 64 ranks"),
        (["forecast", *of_it, "8", "--gpu", "0GB"], "memory: '0GB' is not understood; write a number above 0 and kB"),
        (["validate", "--calibration", "nowhere.json"], "calibration: nowhere.json cannot be read"),
    ):
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert (done.exit_code, message in " ".join(done.output.split())) == (2, True), done.output
    for words in (["--micro-batch", "0"], ["--batch", "-8"], ["--wrap", "root"]):
        assert CliRunner().invoke(app, ["forecast", *of_it, "64", *words]).exit_code == 2
    done = CliRunner().invoke(app, ["calibrate", "--out", "."])
    assert (done.exit_code, "out: . cannot be written; name a file" in done.output) == (2, True)
    for words in (["--ranks", "1"], ["--limit", "0"], ["--out", "nowhere/machine.json"]):
        assert CliRunner().invoke(app, ["calibrate", *words]).exit_code == 2
