"""What the front page and the guide show works: each page's Python is run as it stands, and its commands exist."""

import re
import runpy
import shlex
from contextlib import nullcontext
from inspect import getsource
from math import nan
from pathlib import Path

import pandas as pd
import pytest
import typer
from torch.distributed import run
from typer.testing import CliRunner

from shardlab import CompareConfig, answer, compare
from shardlab.analysis.held_bytes import at_rest
from shardlab.cli import app
from shardlab.experiment import Comparison
from shardlab.experiment.told import verdicts
from shardlab.experiment.told.answer import ROLES, fastest, side_by_side
from shardlab.experiment.told.step_reasons import Reasons, why
from shardlab.vocabulary import Role
from shardlab.why import slow_messages, slow_work
from shardlab.why.judged_steps import BALANCED, Cause
from tests import front_page
from tests.front_page import BLOCKS, README, blocks, shortened
from tests.launch.helpers import as_under_torchrun, start_forked

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "notebooks" / "guide"
PAGES = {path.stem: path.read_text() for path in sorted(GUIDE.glob("*.md"))}
INDEX = PAGES.pop("README")
PAGES["front page"] = README
PYTHON = {page: [block for block in blocks(text, "python") if block[:2] != "# "] for page, text in PAGES.items()}
(SCRIPT,) = (block for text in PAGES.values() for block in blocks(text, "python") if block.startswith("# train.py\n"))
PROSE = BLOCKS.sub("", "\n".join([INDEX, *PAGES.values()]))
PRINTED = {
    "front page": "[520384, 520384]",
    "launch": "[0.5, 0.5]",
    "loop": f"{[({'epoch': 1}, 1)] * 3}\n{[(1, 1)] * 2}\n"
    f"{[{'weight': (0, 28), 'bias': (0, 8)}, {'weight': (28, 64)}]}\n",
    "pipeline": "['2.bias', '2.weight', '3.bias', '3.weight']",
    "same": "DIFFERENT SINCE step 0: gradient of all 2 parameters; ratio 2, cosine 1.000\n"
    "CAUSE times 2: added over 2 ranks and not divided\n",
    "tensor_parallel": "((32, 16), (64, 16))",
}


def test_pages_have_the_form_that_is_tested_and_the_front_page_is_short():
    for page, text in PAGES.items():
        assert {kind for kind, _ in BLOCKS.findall(text)} <= {"python", "sh", "text"}
        assert text.count("```") == 2 * len(BLOCKS.findall(text)), page
        assert not [line for line in text.splitlines() if len(line) > 120 and line[0] not in "|!"], page
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert ((ROOT if text is README else GUIDE) / target).is_file(), (page, target)
    assert README.count("\n") <= 150
    notebooks = re.findall(r"^\| `(\d\d_\w+)` \|", README, re.MULTILINE)
    assert notebooks == sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    listed = re.findall(r"^\| \[(.+)\]\((\w+)\.md\) \| (.+) \|$", INDEX, re.MULTILINE)
    assert {name for _, name, _ in listed} == {*PAGES} - {"front page"}
    assert all(PAGES[name].startswith(f"# {title}\n\n{question}\n\n") for title, name, question in listed)


@pytest.mark.parametrize("page", [page for page, cells in PYTHON.items() if cells])
def test_the_cells_of_a_page_run_one_after_another(tmp_path, monkeypatch, capsys, pools, page):
    monkeypatch.chdir(tmp_path)
    # That compare and check_strategy start ranks of their own, the tests of the command line and of both show.
    for module in ("experiment.comparison", "testing.check"):
        monkeypatch.setattr(f"shardlab.{module}.RankPool", lambda ranks, **_: nullcontext(pools(ranks)))
    namespace = {"__name__": "page"}
    for number, cell in enumerate(PYTHON[page]):
        exec(compile(cell, f"{page}, Python block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert PRINTED.get(page, "") in printed
    for found in namespace.values():
        if isinstance(found, Comparison):
            assert found.losses_equal
            assert found.summary["as_planned"].dropna().all()
    if page == "records":
        assert Path("runs/first/report.html").stat().st_size > 10_000
        monkeypatch.setattr(verdicts, "busy_verdict", lambda *_: "")
        answer_and_table_are_those_of(namespace["comparison"])


def answer_and_table_are_those_of(comparison):
    """The front page's first block, but for times, peaks and rounding; this run took fewer steps."""
    lines = blocks(README, "text")[0].splitlines()
    said, by_times = lines[:6], (lines[1], lines[3])
    assert [line[:16].rstrip() for line in said] == [title for title, _ in answer(comparison)]
    assert shortened([line for line in said if line not in by_times], answer(comparison)) == []
    first, cause = (line[16:].rstrip(" …") for line in by_times)
    rows = side_by_side(comparison.summary)
    assert any(one.startswith(shape(first, rows)) for one in fastest_sentences(rows)), first
    assert why(causes_in(cause, [*rows.index])).startswith(cause)
    assert all(name in dict(answer(comparison))["WHY"] for name in rows.index)
    table = comparison.summary.set_index("strategy")[[*ROLES, "wire_bytes_per_step"]] / 1e6
    shown = {name: [*cells[2:5], cells[-1]] for name, *cells in map(str.split, lines[8:])}
    assert shown == {name: [f"{number:.3f}" for number in row] for name, *row in table.itertuples()}


def shape(sentence, rows):
    """With NAME for each strategy and # for each number."""
    return re.sub(r"\d[\d.]*", "#", re.sub("|".join(sorted(rows.index, key=len, reverse=True)), "NAME", sentence))


def fastest_sentences(rows):
    """The shapes of what can be said of the times of enough steps on quiet cores: they lie apart, or they do not."""
    quick = pd.Series(range(1, len(rows) + 1), rows.index, dtype="float64")
    for middle, known in ((quick, rows), (quick, rows.assign(overlap=nan)), (quick * 0 + 1, rows)):
        times = pd.DataFrame({"low": middle, "middle": middle, "high": middle, "steps": 20})
        yield shape(fastest(known, times), rows)


def causes_in(line, names):
    """The causes that a line WHY names, each with its runs and shares; what is cut off is of the last one."""
    found, cause = {}, None
    for part in line.split("; "):
        known, _, runs = part.partition(" in ")
        named = BALANCED if known == f"{BALANCED}, mostly compute," else known
        assert named == BALANCED or any(f'"{named}"' in getsource(file) for file in (slow_messages, slow_work)), part
        shares = re.findall(rf"({'|'.join(names)})(?: \((\d+) %)?", runs)
        assert {bool(share) for _, share in shares} == {named != BALANCED}, part
        for name, share in shares:
            cause = Cause(named, 0.0, int(share or 100 * (named == BALANCED)) / 100, "", "", float(share or 0))
            found[name] = Reasons(1e4, (cause,))
    return found | {name: Reasons(1e4, (cause,)) for name in names if name not in found}


def test_the_script_runs_alone_and_under_torchrun(tmp_path, pools):
    pools(2).start()  # and with it the server that forks
    script = str(tmp_path / "train.py")
    Path(script).write_text(SCRIPT)
    alone = start_forked(script, cwd=tmp_path, output=tmp_path / "alone.txt")
    alone.join(60)
    assert "[1, 1]" in (tmp_path / "alone.txt").read_text()
    assert "[1, 1]" in as_under_torchrun(tmp_path / "torchrun.txt", runpy.run_path, script, None, "__main__")
    assert re.findall(r"^python (.*?) *#", PAGES["launch"], re.MULTILINE) == ["train.py"]
    # The one with --nnodes needs several machines (tests/launch/test_two_hosts.py).
    for words in re.findall(r"^torchrun (.*?) *#", PAGES["launch"], re.MULTILINE):
        given = run.parse_args(shlex.split(words))
        assert (given.training_script, given.training_script_args) == ("train.py", [])


def test_commands_are_those_that_exist(tmp_path, monkeypatch):
    """The two commands install, which a test cannot; what they start is there, with every option the text names."""
    first, second, _ = blocks(README, "sh")
    assert first.endswith(".venv/bin/shardlab compare\n")
    assert second.endswith(".venv/bin/pytest\n")
    commands = typer.main.get_command(app).commands
    wide = {"COLUMNS": "200", "TERM": "dumb"}
    helped = "".join(CliRunner().invoke(app, [command, "--help"], env=wide).output for command in commands)
    named = set(re.findall(r"`(--[a-z-]+)", PROSE))
    assert {"--ranks"} <= named <= set(re.findall(r"--[a-z-]+", helped))
    assert set(re.findall(r"`shardlab ([\w-]+)", PROSE)) == {*commands}
    assert "notebooks/guide/README.md" in CliRunner().invoke(app, ["--help"], env=wide).output
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CliRunner().invoke(app, ["template"]).stdout)
    needs_more = re.compile(r"--calibration")  # a file of minutes
    for command in set(re.findall(r"`shardlab (plan -[^`]*|doctor)`", PROSE)):
        if needs_more.search(command):
            continue
        fewer = ["--strategies", "single,zero1"] if "--workload" in command else []
        done = CliRunner().invoke(app, [*shlex.split(command), *fewer])
        assert done.exit_code == 0, (command, done.output)


def test_a_picture_shows_the_drawing_and_the_page_as_they_are():
    for name, source in front_page.sources().items():
        picture = front_page.FOLDER / f"{name}.png"
        assert front_page.digest_in(picture) == front_page.digest(source), "run python -m tests.front_page"
        assert f"(data/front_page/{name}.png)" in README


def test_the_recorded_bytes_are_those_of_a_run_today(tmp_path, pools):
    saved = pd.read_parquet(front_page.FOLDER / "memory.parquet")
    config = CompareConfig(ranks=front_page.RANKS, steps=1, batch=2, strategies=front_page.STRATEGIES)
    now = compare(config, tmp_path / "run", pool=pools(front_page.RANKS))
    of_strategies = [table[table["role"] != Role.UNATTRIBUTED] for table in (saved, now.records.memory)]
    held = [at_rest(table).set_index(["run", "role"])["bytes"] for table in of_strategies]
    pd.testing.assert_series_equal(*held)
