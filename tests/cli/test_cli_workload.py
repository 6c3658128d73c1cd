"""A workload from the terminal: template, plan and compare, and what is said of a place that holds none."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.experiment.named_workload import workload_at

PLACE = "train.py:workload"


def said(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def template(tmp_path, monkeypatch):
    """A folder that holds the template as train.py, and what it imports later is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, text = said("template")
    assert code == 0
    (tmp_path / "train.py").write_text(text)
    yield tmp_path
    sys.modules.pop("train", None)


def test_the_template_runs_unchanged(template):
    chosen = (
        "--workload",
        PLACE,
        "--ranks",
        2,
        "--steps",
        3,
        "--strategies",
        "single,fsdp,torch_ddp",
        "--out",
        "runs/x",
    )
    code, text = said("compare", *chosen)
    assert code == 0, text
    assert "Losses are equal" in text.replace("\n", " ")
    rows = json.loads((template / "runs/x/summary.json").read_text())
    assert [row["as_planned"] for row in rows] == [True, True, None]
    assert said("report", "runs/x")[0] == 0
    assert "Classifier on 2 ranks" in (template / "runs/x/report.html").read_text()
    assert said("diff", "runs/x", "runs/x")[0] == 0


def test_the_plan_of_a_workload_is_what_compare_measures(template):
    code, text = said("plan", "--workload", PLACE, "--ranks", 2, "--strategies", "single,fsdp", "--json")
    assert code == 0, text
    planned = json.loads(text)
    said("compare", "--workload", PLACE, "--ranks", 2, "--steps", 2, "--strategies", "single,fsdp", "--out", "runs/x")
    measured = json.loads((template / "runs/x/summary.json").read_text())
    for one, other in zip(planned, measured, strict=True):
        for name in ("strategy", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "rest_bytes"):
            assert one[name] == other[name]
        assert one["wire_bytes_per_step"] == other["wire_bytes_per_step"]


def test_a_plan_for_more_ranks_than_this_machine_has(template):
    code, text = said("plan", "--workload", PLACE, "--ranks", 64)
    assert code == 0
    assert all(name in text for name in ("single", "bucketed", "zero3", "fsdp", "messages"))
    assert " 0.00 " not in text  # of a small model's shards


def test_a_plan_says_how_large_buckets_are(template):
    text = said("plan", "--workload", PLACE, "--ranks", 2)[1]
    assert "Buckets of 25 MiB." in text.replace("\n", " ")
    code, text = said("plan", "--workload", PLACE, "--ranks", 2, "--bucket-mib", 0.001, "--strategies", "bucketed")
    assert code == 0
    assert "Buckets of 0.001 MiB." in text.replace("\n", " ")
    code, text = said("plan", "--workload", PLACE, "--ranks", 2, "--strategies", "single,fsdp")
    assert code == 0
    assert "Buckets" not in text


def test_an_edited_file_is_read_again(template):
    assert str(workload_at(PLACE)) == "Classifier"
    text = (template / "train.py").read_text()
    (template / "train.py").write_text(text.replace("    loss=loss,", '    loss=loss,\n    name="edited",'))
    assert str(workload_at(PLACE)) == "edited"


def test_a_file_may_be_called_like_a_module(template):
    (template / "json.py").write_text((template / "train.py").read_text())
    assert str(workload_at("json.py:workload")) == "Classifier"
    assert sys.modules["json"] is json
    sys.modules.pop("workload_json")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("train.py", "'train.py' is not FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("train.py:", "is not FILE.py:NAME"),
        ("nowhere.py:workload", "there is no file"),
        ("train.py:model", "train.py has no 'model'; its workloads are: workload"),
        ("train.py:loss", "train.py has a function, not a Workload, as 'loss'"),
        ("train.py:CLASSES", "train.py has an int, not a Workload, as 'CLASSES'"),
        ("broken.py:workload", "broken.py cannot be imported: ZeroDivisionError"),
        ("no.such.module:workload", "module 'no.such.module' cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_place_without_a_workload_is_named(template, place, expected):
    (template / "broken.py").write_text("1 / 0\n")
    for command in ("compare", "plan"):
        code, text = said(command, "--workload", place, "--ranks", 2)
        assert code == 2
        assert expected in " ".join(text.split()), text
    assert not (template / "runs").exists()
    assert "broken" not in sys.modules


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "give one of them"),
        (("--params", "7B", "--workload", PLACE), "give one of them"),
        (("--params", "7B", "--tp", 2), "error: tp: only for --workload; with --params leave it out"),
        (("--params", "7B", "--tp", 2, "--wrap", "4"), "tp, wrap: only for --workload; with --params leave them out"),
        (("--workload", "nowhere.py:x", "--tp", 2, "--gpu", "h900"), "gpu: 'h900' is not understood; write a card"),
        (("--workload", PLACE, "--tp", 1, "--ranks", 0), "ranks: 0 was given"),
        (("--workload", PLACE, "--precision", "int8"), "precision:"),
        (("--workload", PLACE, "--strategies", "torch_ddp"), "'torch_ddp' cannot be planned"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(template, options, expected):
    code, text = said("plan", "--ranks", 2, *options)
    assert code == 2
    assert expected in " ".join(text.split()), text


def test_a_plan_of_layers_is_tried_without_ranks(template):
    code, text = said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1", "--json")
    assert code == 0, text
    found = json.loads(text)
    styles = {row["module"]: row["style"] for row in found["modules"]}
    assert (styles["blocks.*.1"], styles["blocks.*.3"], styles["enter"]) == ("Column()", "Row()", "whole")
    single, divided = found["strategies"]
    assert divided["parameter_bytes"] < 0.6 * single["parameter_bytes"]
    assert divided["messages_per_step"] == 8  # four blocks, forward and backward
    code, text = said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1")
    assert code == 0
    assert "layers over 2 ranks" in text
    text = (template / "train.py").read_text()
    (template / "train.py").write_text(text.replace(", nn.GELU(), nn.Linear(2 * width, width)", ", nn.GLU()"))
    code, text = said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1")
    assert code == 2
    assert "tp: nothing of Classifier can be divided over 2 ranks (enter: all of its output is needed" in " ".join(
        text.split()
    )


def test_the_plan_of_layers_in_the_template_is_one_of_its_model(template):
    text = (template / "train.py").read_text()
    (template / "train.py").write_text(re.sub("# (from shardlab.tensor|scheduler=|tp_plan=)", r"\1", text))
    code, text = said("plan", "--workload", PLACE, "--tp", 2, "--strategies", "single,zero1", "--json")
    assert code == 0, text
    styles = {row["module"]: row["style"] for row in json.loads(text)["modules"]}
    assert (styles["blocks.*.1"], styles["blocks.*.3"]) == ("Column()", "Row()")
    given = ("--workload", PLACE, "--ranks", 2, "--tp", 2, "--steps", 2, "--strategies", "single,zero1")
    code, text = said("compare", *given, "--out", "runs/x")
    assert code == 0, text
    assert "Losses are equal" in " ".join(text.split())
