"""``same`` on scripts: right ones are the same, of broken ones the cause is named; ``bench --same`` has them all."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.course.same_matrix import same_matrix, verdict
from shardlab.same.answer import answer
from shardlab.same.process import Job
from shardlab.same.ranks import compared
from tests.launch.helpers import start_python

SCRIPTS = Path(__file__).parents[1] / "recording" / "scripts"


@pytest.mark.parametrize(
    ("script", "ranks", "word"),
    [("ddp", 2, "SAME"), ("fsdp2", 3, "SAME"), ("tensor_parallel", 2, "SAME"), ("zero", 2, "LOST")],
)
def test_scripts_of_torchs_tutorials_are_the_same(script, ranks, word):
    """That of ZeroRedundancyOptimizer gives all ranks the same rows."""
    said = answer(*compared(Job(SCRIPTS / f"{script}.py", ranks=ranks, float64=True), 60))
    assert said.word == word, str(said)
    assert "float64" in str(said)
    assert said.table["relative"].max() < 1e-12


@pytest.mark.parametrize(
    ("ranks", "stories"),
    [
        (2, ("a mean of means", "cleared in each micro-batch", "a rank skips a step", "not given to the optimizer")),
        (3, ("not divided by ranks", "reduced in every micro-batch", "nobody sends stepped weights")),
        (2, ("as it is", "uneven rows, counted over ranks", "unused", "bf16")),
    ],
)
def test_the_cause_of_a_broken_script_is_named_and_no_right_one_is_called_different(ranks, stories):
    rows = list(same_matrix(ranks, stories))
    assert {row.story for row in rows} == {*stories}
    assert not [(row.story, row.kind, row.said) for row in rows if not row.is_right]
    assert "0 of them are called the same" in verdict(rows)


LOOP = """
import torch, torch.distributed as dist
from pathlib import Path
{begin}
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dist.init_process_group("gloo")
for step in range(100):
    model(torch.randn(3, 4)).square().mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    {step}
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
"""
NO_STEP = LOOP.format(begin="", step="break")
RAISES = LOOP.format(begin="", step="assert dist.get_world_size() == 2, 'two, please'; optimizer.step()")
OTHERS = LOOP.format(begin="", step="").replace("model.parameters(), lr", "[torch.zeros(3, requires_grad=True)], lr")
OTHERS = OTHERS.replace("    optimizer.zero_grad()", "    optimizer.step()")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NO_STEP, "no step of an optimizer was seen"),
        (RAISES, "in one process: rank 0 ends after 0 steps: AssertionError: two, please"),
        (OTHERS, "no module has that was called"),
        ("raise ValueError('mine')", "ValueError: mine"),
    ],
)
def test_what_cannot_be_judged_is_said(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    told = answer(*compared(Job(tmp_path / "train.py"), 60))
    assert told.word == "CANNOT BE SAID"
    assert said in str(told)


def test_the_command_prints_the_answer_and_leaves_the_scripts_files_to_the_ranks(tmp_path):
    begin = "torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)"
    (tmp_path / "train.py").write_text(LOOP.format(begin=begin, step="optimizer.step()"))
    under = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardlab", "same", "--json", "train.py")
    done = start_python(*under, cwd=tmp_path)
    printed, errors = done.communicate(timeout=120)
    assert done.returncode == 1, errors
    told = json.loads(printed)
    assert told["answer"][0][0] == "DIFFERENT SINCE" or "same rows" in str(told["answer"])
    assert {row["what"] for row in told["rows"]} >= {"gradient", "weights after"}
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "model.pt"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.py",), "script: none.py is not a file"),
        (("--ranks", "1", __file__), "ranks: 1 is given; one rank is one process already"),
        (("--steps", "0", __file__), "steps: 0 is given"),
    ],
)
def test_bad_input_is_said_in_a_line(words, said):
    done = CliRunner().invoke(app, ["same", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
