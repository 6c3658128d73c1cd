"""A workload from the terminal: template, plan and compare, and what is said of a place that holds none."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from shardlab import answer, load_comparison
from shardlab.cli import app
from shardlab.experiment.trained.named_workload import workload_at
from shardlab.planner.formulas import PRECISIONS
from tests.front_page import README, blocks, shortened

PLACE = "train.py:workload"


def said(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def template(tmp_path, monkeypatch):
    """A folder that holds the template as train.py, and what it imports later is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text(said("template"))
    yield tmp_path
    sys.modules.pop("train", None)


def test_the_template_runs_unchanged_and_as_planned(template):
    chosen = ("--workload", PLACE, "--ranks", 2, "--strategies")
    text = said("compare", *chosen, "single,fsdp,ddp,bucketed,zero1,torch_ddp", "--steps", 3, "--out", "runs/x")
    assert "losses equal to" in text
    measured = json.loads((template / "runs/x/summary.json").read_text())
    assert [row["as_planned"] for row in measured] == [True] * 5 + [None]
    _, block = blocks(README, "text")
    fits = " ".join(said("plan", "--workload", PLACE, "--ranks", 8, "--gpu", "24GB").split()[2:])
    said_of_it = [(name, text.replace(", without a plan those of torch_ddp", "")) for name, text in
                  answer(load_comparison("runs/x"))]  # fmt: skip
    assert shortened(block.splitlines(), [("WHAT FITS", fits), *said_of_it]) == []
    said("report", "runs/x")
    assert "Classifier on 2 ranks" in (template / "runs/x/report.html").read_text()
    planned = json.loads(said("plan", *chosen, "single,fsdp", "--json"))["strategies"]
    for one, other in zip(planned, measured, strict=False):
        for name in ("strategy", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "rest_bytes",
                     "wire_bytes_per_step"):  # fmt: skip
            assert one[name] == other[name]


def test_stages_of_the_template_are_planned_and_compared(template):
    given = ("--workload", PLACE, "--ranks", 2, "--pipe", 2, "--schedule", "1f1b,zb-h1", "--strategies", "single,zero1")
    planned = json.loads(said("plan", *given, "--micro-batches", 4, "--json"))
    assert [(one["strategy"], one["stages"], one["messages"]) for one in planned["stages"]] == [
        (f"zero1+{name}", stage, 4) for name in ("1f1b", "zb-h1") for stage in "01"
    ]
    peaks = json.loads(said("plan", *given, "--micro-batches", 4, "--peak", "--json"))
    text = " ".join(said("compare", *given, "--micro-batches", 4, "--steps", 4, "--out", "runs/x").split())
    assert "BUBBLE ranks wait for other stages: zero1+1f1b " in text
    assert re.search(r"NEXT (shardlab compare|with nothing|.*--pipe 2)", text)
    for rows in ((json.loads((template / "runs/x/summary.json").read_text())),
                 json.loads(said("report", "runs/x", "--json"))["strategies"]):  # fmt: skip
        single, *staged = rows
        assert single.get("bubble") is None
        assert [row["as_planned"] for row in staged] == [True, True]
        assert [row["peak_bytes"] for row in rows] == [row["peak_bytes"] for row in peaks["strategies"]]
        assert [row["peak_bytes"] for row in staged] == [
            max(one["peak_bytes"] for one in peaks["stages"] if one["strategy"] == row["strategy"]) for row in staged
        ]
        assert all(0 <= row["bubble"] < 1 and 0 <= row["foretold_bubble"] < 1 for row in staged)
        assert [(row["in_flight"], row["bubble_unknown"]) for row in staged] == [(2, None)] * 2
    assert "would become" in said("what-if", "runs/x", "--strategy", "zero1+1f1b", "--schedule", "zb-h1")  # knows where
    for option in (("--gpu", "h100"), ("--calibration", "x.json")):
        words = f"{option[0][2:]}: not with --pipe, whose time is not planned: shardlab compare measures it"
        assert words in " ".join(said("plan", *given, *option, code=2).split())


def test_a_plan_for_more_ranks_than_this_machine_has(template):
    text = said("plan", "--workload", PLACE, "--ranks", 64, "--bucket-mib", 0.001)
    assert all(name in text for name in ("single", "bucketed", "zero3", "fsdp", "messages"))
    assert " 0.00 " not in text  # of a small model's shards
    assert "Buckets of 0.001 MiB." in text.replace("\n", " ")


def test_parameters_in_16_bits_are_counted_as_they_are_and_that_is_said(template):
    text = (template / "train.py").read_text()
    assert "MODEL" not in said("plan", "--workload", PLACE, "--ranks", 2)
    code = "\nimport dataclasses\nhalf = dataclasses.replace(workload, model=lambda: nn.Linear(4, 4).bfloat16())\n"
    (template / "train.py").write_text(text + code)
    found = json.loads(said("plan", "--workload", "train.py:half", "--ranks", 2, "--strategies", "single", "--json"))
    (row,) = found["strategies"]
    each = PRECISIONS["pure-bf16"]
    assert row["parameter_bytes"] == 20 * each.parameter
    assert row["gradient_bytes"] == 20 * each.gradient
    assert row["optimizer_bytes"] == 20 * (each.master + each.momentum + each.variance)
    assert found["answer"]["MODEL"].startswith("its parameters are bfloat16, ")
    assert "as shardlab forecast counts with --precision pure-bf16" in found["answer"]["MODEL"]


def test_an_edited_file_is_read_again_and_may_be_called_like_a_module(template):
    assert str(workload_at(PLACE)) == "Classifier"
    text = (template / "train.py").read_text()
    (template / "json.py").write_text(text)
    (template / "train.py").write_text(text.replace("    loss=loss,", '    loss=loss,\n    name="edited",'))
    assert str(workload_at(PLACE)) == "edited"
    assert str(workload_at("json.py:workload")) == "Classifier"
    assert sys.modules["json"] is json
    sys.modules.pop("workload_json")


PLACES = {
    "train.py": "'train.py' is not FILE.py:NAME or PACKAGE.MODULE:NAME",
    "nowhere.py:workload": "there is no file",
    "train.py:model": "train.py has no 'model'; its workloads are: workload",
    "train.py:loss": "train.py has a function, not a Workload, as 'loss'",
    "broken.py:workload": "broken.py cannot be imported: ZeroDivisionError",
    "no.such.module:workload": "module 'no.such.module' cannot be imported: ModuleNotFoundError",
}
PLANS = (
    ((), "give one of them"),
    (("--params", "7B", "--workload", PLACE), "give one of them"),
    (("--params", "7B", "--tp", 2, "--wrap", "4"), "tp, wrap: not of --params; leave them out"),
    (("--workload", "nowhere.py:x", "--tp", 2, "--gpu", "h900"), "gpu: 'h900' is not understood; write a card"),
    (("--workload", PLACE, "--tp", 1, "--ranks", 0), "ranks: 0 was given"),
    (("--workload", PLACE, "--precision", "int8"), "precision:"),
    (("--workload", PLACE, "--strategies", "torch_ddp"), "'torch_ddp' cannot be planned"),
    (("--params", "7B", "--out", "train.py"), "out: train.py cannot be made: File exists; name a directory"),
)


def test_what_is_wrong_is_named(template):
    (template / "broken.py").write_text("1 / 0\n")
    wrong = [((name, "--workload", place), words) for place, words in PLACES.items() for name in ("compare", "plan")]
    for options, words in (*wrong, *((("plan", *options), words) for options, words in PLANS)):
        assert words in " ".join(said(options[0], "--ranks", 2, *options[1:], code=2).split())
    assert not (template / "runs").exists()
    assert "broken" not in sys.modules


def test_a_plan_of_layers_is_tried_without_ranks(template):
    found = json.loads(said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1", "--json"))
    styles = {row["module"]: row["style"] for row in found["modules"]}
    assert (styles["blocks.*.1"], styles["blocks.*.3"], styles["enter"]) == ("Column()", "Row()", "whole")
    single, divided = found["strategies"]
    assert divided["parameter_bytes"] < 0.6 * single["parameter_bytes"]
    assert divided["messages_per_step"] == 8  # four blocks, forward and backward
    assert "How layers are divided" in said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1")
    text = (template / "train.py").read_text()
    (template / "train.py").write_text(text.replace(", nn.GELU(), nn.Linear(2 * width, width)", ", nn.GLU()"))
    text = " ".join(said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1", code=2).split())
    assert "tp: nothing of Classifier can be divided over 2 ranks (enter: all of its output is needed" in text


def test_the_plan_of_layers_in_the_template_is_one_of_its_model(template):
    text = (template / "train.py").read_text()
    (template / "train.py").write_text(re.sub("# (from shardlab.tensor|scheduler=|tp_plan=)", r"\1", text))
    text = said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1", "--json")
    styles = {row["module"]: row["style"] for row in json.loads(text)["modules"]}
    assert (styles["blocks.*.1"], styles["blocks.*.3"]) == ("Column()", "Row()")
    given = ("--workload", PLACE, "--ranks", 2, "--tp", 2, "--steps", 2, "--strategies", "single,zero1")
    assert "losses equal to" in said("compare", *given, "--out", "runs/x")
