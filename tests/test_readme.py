"""What the README shows works: its Python is run as it stands, in order; its commands are those the package has."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from shardlab import compare
from shardlab.analysis.held_bytes import at_rest
from shardlab.cli import app
from shardlab.experiment.config import CompareConfig
from shardlab.vocabulary import Role
from tests import front_page
from tests.launch.helpers import script_env

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SCRIPTS = {block.split()[1]: block for block in PYTHON if block.startswith("# ")}  # the first line is the file's name
CELLS = [block for block in PYTHON if not block.startswith("# ")]


def test_every_block_is_of_a_kind_that_is_tested():
    assert README.count("```") == 2 * (len(PYTHON) + len(SHELL))
    assert (len(CELLS), list(SCRIPTS)) == (8, ["train.py"])


def test_the_cells_run_one_after_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"README.md, Python block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert namespace["comparison"].losses_equal
    assert namespace["comparison"].summary["as_planned"].dropna().all()
    owned = eval(next(line for line in printed.splitlines() if line.startswith("[")))
    numel = sum(param.numel() for param in namespace["build_model"]("gpt-1m").parameters())
    assert (len(owned), sum(owned)) == (2, numel)
    assert str([({"epoch": 1}, 1)] * 3) in printed
    assert str([{"weight": (0, 28), "bias": (0, 8)}, {"weight": (28, 64)}]) in printed
    assert "((32, 16), (64, 16))" in printed
    assert "True" in printed
    assert namespace["again"].losses_equal
    assert (tmp_path / "runs" / "first" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("start", ["python", "torchrun"])
def test_the_script_runs_alone_and_under_torchrun(tmp_path, start):
    (tmp_path / "train.py").write_text(SCRIPTS["train.py"])
    lines = [line.partition("#")[0] for block in SHELL for line in block.splitlines()]
    # The one with --nnodes needs several machines (tests/launch/test_two_hosts.py).
    (command,) = (line for line in lines if line.startswith(f"{start} ") and "--nnodes" not in line)
    module = ["-m", "torch.distributed.run"] if start == "torchrun" else []
    words = [sys.executable, *module, *shlex.split(command)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=script_env(), timeout=200)
    assert done.returncode == 0, done.stderr
    assert "[1, 1]" in done.stdout


COMMANDS = {
    "compare", "template", "plan", "record", "report", "modules", "trace", "diff", "bench", "exercises", "doctor",
}  # fmt: skip


def test_commands_are_those_that_exist(tmp_path, monkeypatch):
    """The two commands install, which a test cannot; what they start is there, with every option the text names."""
    assert ".venv/bin/shardlab compare" in SHELL[0]
    assert ".venv/bin/pytest" in SHELL[1]
    wide = {"COLUMNS": "200", "TERM": "dumb"}
    helped = "".join(CliRunner().invoke(app, [command, "--help"], env=wide).output for command in COMMANDS)
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)", prose))
    assert named
    assert {option for option in named if option not in helped} == set()
    assert set(re.findall(r"`shardlab (\w+)", prose)) == COMMANDS
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CliRunner().invoke(app, ["template"]).stdout)
    for command in re.findall(r"`shardlab ((?:plan|doctor)[^`]*)`", prose):
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, (command, done.output)


def test_every_notebook_is_in_the_table():
    listed = re.findall(r"^\| `(\d\d_\w+)` \|", README, re.MULTILINE)
    assert listed == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_a_picture_shows_the_recorded_run():
    for name, figure in front_page.figures().items():
        assert front_page.digest_in(front_page.FOLDER / f"{name}.png") == front_page.digest(figure)
        assert f"(data/front_page/{name}.png)" in README


def test_the_recorded_bytes_are_those_of_a_run_today(tmp_path):
    saved = pd.read_parquet(front_page.FOLDER / "memory.parquet")
    now = compare(CompareConfig(ranks=front_page.RANKS, steps=2, strategies=front_page.STRATEGIES), tmp_path / "run")
    of_strategies = [table[table["role"] != Role.UNATTRIBUTED] for table in (saved, now.records.memory)]
    held = [at_rest(table).set_index(["run", "role"])["bytes"] for table in of_strategies]
    pd.testing.assert_series_equal(*held)
