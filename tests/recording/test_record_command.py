"""``shardlab record SCRIPT``: what Python would have done with the script, and a record of it."""

import sys
import time

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.records.store import load_run
from tests.launch.helpers import start_forked, start_python

TRAIN = """
import os, sys, helper
os.chdir("/")
if "shardlab" in sys.modules:  # without a recorder it is here for what it prints
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
"""
SAY = """
import atexit, pickle
class Own: pass
atexit.register(lambda: print(pickle.loads(pickle.dumps(Own)) is Own))
print(__file__, __spec__, type(__loader__), sys.modules["__main__"].__file__)
print(__name__, sys.argv, sys.path[0], helper.WORD, sys.modules["__main__"].Own is Own)
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script beside a module of its own; a function of its last lines."""

    def write(ending):
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "helper.py").write_text("WORD = 'helped'\n")
        (tmp_path / "code" / "mine.py").write_text(TRAIN + ending)
        return tmp_path / "code" / "mine.py"

    return write


def test_the_script_sees_what_python_would_show_it(script, tmp_path):
    words = ["code/mine.py", "--help", "x", "--out", "y"]
    script(SAY)
    plain, recorded = (
        start_python(*begin, *words, cwd=tmp_path).communicate(timeout=120)
        for begin in ((), ("-m", "shardlab", "record", "--out", "run"))
    )
    assert plain[1] == ""
    assert "--out" in plain[0]
    assert recorded == plain
    assert len(load_run(tmp_path / "run").steps) == 3


def start_recorded(path, folder):
    return start_forked("-m", "shardlab", "record", "--out", "run", path, cwd=folder, output=folder / "printed.txt")


def test_errors_and_exit_codes_are_the_scripts_own(script, tmp_path):
    """An error of ours would be said in a line, with code 2."""
    done = start_recorded(script("raise ValueError('mine')"), tmp_path)
    done.join(60)
    assert done.exitcode == 1
    error = (tmp_path / "printed.txt").read_text()
    assert "Traceback" in error
    assert "ValueError: mine" in error
    assert len(load_run(tmp_path / "run").steps) == 3


def test_a_killed_script_leaves_its_finished_steps(script, tmp_path):
    path = script(f"open({str(tmp_path / 'said')!r}, 'w')\nimport time\ntime.sleep(100)\n")
    running, deadline = start_recorded(path, tmp_path), time.monotonic() + 60
    while not (tmp_path / "said").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.1)
    running.kill()
    running.join(20)
    # The third step is written when it is known that no further optimizer belongs to it.
    assert load_run(tmp_path / "run").steps["step"].tolist() == [0, 1]
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "Recording is the time that rank 0 spent in the recorder's own code, by its own clock, in percent" in said
    assert "after a few short steps the number may be above 100" in said
    assert "its causes, the primary one first" in (tmp_path / "run" / "report.html").read_text()
    assert "watched steps: the first 16, then one in 16" in said
    assert "<h1>mine.py on 1 rank</h1>" in (tmp_path / "run" / "report.html").read_text()


def test_a_directory_that_nobody_named_is_said(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    done = CliRunner().invoke(app, ["record", str(script(""))])
    (directory,) = (tmp_path / "runs").iterdir()
    assert done.stderr == f"records go to runs/{directory.name}; then: shardlab report runs/{directory.name}\n"


def test_bad_input_is_said_in_a_line(script, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").touch()
    for words, said in (
        ([tmp_path / "none.py"], "none.py is not a file"),
        (["--out", full, script("")], "holds another run"),
    ):
        done = CliRunner().invoke(app, ["record", *map(str, words)])
        assert done.exit_code == 2
        assert said in done.stderr
