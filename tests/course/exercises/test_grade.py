"""A class is marked: good and bad submissions, none of which disturbs another."""

import csv
import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.cli.exercises import _print_marks
from shardlab.course import LADDER, Verdict, find
from shardlab.course.exercises.grade import Mark, grade
from shardlab.course.exercises.submission import read_submission
from tests.course.exercises.right import right_buckets

PRINTS = "\ndef buckets_assign(*given):\n    print('I print while I work')\n    return right_buckets(*given)\n"
RIGHT = inspect.getsource(right_buckets) + PRINTS
SUBMISSIONS = {
    "ada.py": (RIGHT, "passed", ""),
    "ben.py": ("def buckets_assign(:", "failed", "ben.py, line 1: SyntaxError: "),
    "cy.py": ("import time\ntime.sleep(99)", "failed", "read: the run took longer than limit_s=3 s, at line 2"),
    "dora.py": ("import os\nos._exit(0)", "failed", "dora.py cannot be read: it ends the process"),
    "eve.py": ("def buckets_assign(sizes, capacity):\n    return 1 / 0", "failed", "raised ZeroDivisionError"),
    "fay.py": (
        "def buckets_assign(sizes, capacity):\n    while True: pass", "failed",
        "took longer than limit_s=3 s, at line 2 of fay.py",
    ),
    "gus.py": ("other = 1", "failed", "there is no function buckets_assign"),
    "hal.py": (  # he changes the library for those who come after him
        "import shardlab.course.exercises.values\nshardlab.course.exercises.values.plain = lambda value: 0\n" + RIGHT,
        "failed",
        "",
    ),
    "ida/part.py": ("from helper import buckets_assign", "passed", ""),
    "ida/helper.py": (RIGHT, "", ""),
    "joe.py": ("def buckets_assign(sizes, capacity):\n    return []", "failed", "2 items are wanted, 0 were found"),
    "jon.py": (  # a known mistake, in other words
        "def buckets_assign(sizes, capacity):\n    return [[3, 2]]", "failed", "found. You get this when a bucket",
    ),
    "kim.py": (RIGHT, "passed", ""),
    # A typo costs what it stands in.
    "lou.py": ("import torc\n@staticmethod\ndef other(:\n    pass\n\n" + RIGHT, "passed", ""),
    "mia.ipynb": (  # of a notebook definitions count, and what a cell runs does not: here it would never end
        [f"%matplotlib inline\n{RIGHT}", "N = 2\nwhile True:\n    pass", "def broken(:"], "passed", "",
    ),
    "ned.ipynb": (["import time", "def buckets_assign(*given):\n    time.sleep(99)"], "failed", "ned.ipynb, cell 1"),
    "oda.txt": ("I did it on paper.", "failed", "oda.txt holds neither a .py file nor a notebook"),
    "pia.ipynb": ("{", "failed", "pia.ipynb cannot be read: rank 0 raised ValueError: it is no notebook of format 4"),
    "quin.ipynb": (["def bucketAssign(*given):\n    return []"], "failed", "did you mean bucketAssign? Then rename it"),
    "rae.py": ("def bucket_asign(sizes:", "failed", "did you mean bucket_asign?"),  # and a typo
    "sam.py": ("def assignBuckets(sizes, capacity):\n    return []", "failed", "did you mean assignBuckets?"),
    "sia.py": (  # what is missing is named where its absence is found
        "import json\nfrom einops import rearrange as turn\ndef buckets_assign(*given):\n    return turn(given)",
        "failed", "'turn' is not defined. sia.py, line 2: ModuleNotFoundError: No module named 'einops'",
    ),
    "sol.ipynb": (  # a value for which Python's own functions are called is one
        ['LEAST = float("0")', RIGHT.replace("filled = 0", "filled = LEAST")], "passed", "",
    ),
    "sui.ipynb": (
        ["NONE = print()", "def buckets_assign(*given):\n    return NONE"], "failed",
        "'NONE' is not defined. sui.ipynb, cell 0, line 1: RuntimeError: what calls something is not run in a notebook",
    ),
    "sue.py": ("if True:\n    buckets = assign = 1", "failed", "there is no function buckets_assign"),
    "tom.ipynb": ("{}", "failed", "it is no notebook of format 4; open it in Jupyter, and save it"),
    "uma.py": ("", "failed", "there is no function buckets_assign"),
    "vic.zip": ("PK", "failed", "vic.zip holds neither"),
}  # fmt: skip


OWNERS = """def zero1_owners(sizes, num_ranks, rank):
    chunk, owned, offset = -(-sum(sizes.values()) // num_ranks), {}, START
    for name, size in sizes.items():
        start, stop = max(rank * chunk - offset, 0), min(rank * chunk + chunk - offset, size)
        if start < stop:
            owned[name] = (start, stop)
        offset += size
    return owned
"""
ELSE = "try:\n    from nowhere import START\nexcept ImportError:\n    START = 0\n"
READ: dict[str, str | list[str]] = {  # what Python or Jupyter reads
    "annotations.py": f"from __future__ import annotations\nSTART: Later = 0\n{OWNERS}",
    "else.py": f"{ELSE}{OWNERS}\ndef other(:\n    pass\n",
    "else_in_a_cell.ipynb": [ELSE, OWNERS],
    "file.py": f"from pathlib import Path\nSTART = len(Path(__file__).suffix) - 3\n{OWNERS}",
    "lambda.ipynb": ["START = 1\nSTART -= 1", OWNERS.replace("zero1_", ""), "zero1_owners = lambda *of: owners(*of)"],
    "mark.py": f"START = 0\n{OWNERS}",
    "mark.ipynb": ["START = 0", OWNERS],
}
MARKED: dict[str, tuple[str | list[str], str]] = {  # by file, and the reason if it fails
    "dtype.py": (f"import torch\ntorch.set_default_dtype(torch.float64)\nSTART = 0\n{OWNERS}", ""),
    "loop.ipynb": (["for START in range(1):\n    pass", OWNERS], "line 1: RuntimeError: what calls something is"),
    "same/1/other.py": ("from helper import other", ""),
    "same/1/helper.py": ("def other():\n    return 1\n", ""),
    "same/2/owners.py": (f"from helper import START\n{OWNERS}", ""),
    "same/2/helper.py": ("START = 0\n", ""),
    "SHOUTS.PY": (f"START = 0\n{OWNERS}", ""),
    "two/06-Copy1.py": (f"START = 1\n{OWNERS}", "06-Copy1.py counts, and 06.py has a zero1_owners, too"),
    "two/06.py": (f"START = 0\n{OWNERS}", "06-Copy1.py counts, and 06.py has a zero1_owners, too"),
}


def write(path: Path, source: str | list[str]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    cells = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in source]) if isinstance(source, list) else None
    path.write_text(str(source) if cells is None else nbformat.writes(cells))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (source, *_) in SUBMISSIONS.items():
        write(tmp_path / name, source)
    return tmp_path


def test_every_submission_gets_its_mark(folder: Path) -> None:
    marks = {mark.student: mark for mark in grade(folder, [find("buckets.assign")], limit_s=3)}
    wanted = {Path(name).parts[0].partition(".")[0]: mark for name, (_, *mark) in SUBMISSIONS.items() if mark[0]}
    assert list(marks) == sorted(wanted)
    assert all(mark.reason for mark in marks.values() if not mark.points), "no zero is silent"
    for student, (verdict, words) in wanted.items():
        if student != "hal":  # what is done to his own verdict is his; the next student's is untouched
            assert marks[student].verdict == verdict, marks[student]
        assert words in marks[student].reason, marks[student]


@pytest.mark.parametrize("name", READ)
def test_what_python_and_jupyter_read_is_read(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path / name, READ[name])
    if "mark" in name:  # that of an editor on Windows, before the first character
        (tmp_path / name).write_text((tmp_path / name).read_text(), encoding="utf-8-sig")
    assert read_submission(str(tmp_path / name)).module.zero1_owners({"weight": 3}, 2, 0) == {"weight": (0, 2)}


def test_what_is_marked_does_not_depend_on_a_name_or_a_default(tmp_path: Path) -> None:
    for name, (source, _) in MARKED.items():
        write(tmp_path / name, source)
    marks = {mark.student: mark for mark in grade(tmp_path, [find("zero1.owners")])}
    for name, (_, reason) in MARKED.items():
        mark = marks[Path(name).parts[0].partition(".")[0]]
        assert bool(mark.points) != bool(reason), mark
        assert reason in mark.reason, mark


def test_marks_are_printed_as_json_whatever_submissions_print(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "ada.py").write_text(RIGHT + "\ndef class_five():\n    return 5\n")
    (tmp_path / "own.py").write_text(
        "from shardlab.course import Case, Exercise, call_without_ranks\n"
        "FIVE = Exercise('class.five', '', '', lambda: [Case('five', ((),), (5,))], attempt=call_without_ranks)\n"
    )
    options = ["--grade", str(tmp_path / "class"), "--with", str(tmp_path / "own.py"), "--json"]
    done = CliRunner().invoke(app, ["exercises", *options])
    assert done.exit_code == 0, done.output
    marks = {mark["exercise"]: mark for mark in json.loads(done.stdout)}
    assert set(marks) == {*(exercise.name for exercise in LADDER), "class.five"}
    assert "I print while I work" not in done.output
    assert marks["class.five"]["verdict"] == marks["buckets.assign"]["verdict"] == "passed"
    assert marks["collectives.ring_all_reduce"]["reason"] == "there is no function collectives_ring_all_reduce"


def test_marks_are_printed_as_a_grid_with_points_and_why(tmp_path: Path) -> None:
    for name in ("ada.py", "ben.py", "gus.py", "joe.py", "quin.ipynb"):
        write(tmp_path / name, SUBMISSIONS[name][0])
    norm = "\ndef clip_global_norm(comm, shards, norm_type):\n    return 1\n"
    write(tmp_path / "ada.py", RIGHT + norm)
    two = ["buckets.assign", "clip.global_norm"]
    done = CliRunner().invoke(app, ["exercises", *two, "--grade", str(tmp_path)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "student 1 2 points"
    assert lines[2:7] == ["ada + x 1", "ben x 0", "gus 0", "joe x 0", "quin x 0"]
    assert lines[8:10] == ["1 buckets.assign", "2 clip.global_norm"]
    wrong = {tuple(line.split()[:2]) for line in lines[10:]}
    assert {
        ("ada", "clip.global_norm"),
        ("ben", "buckets.assign"),
        ("gus", "-"),
        ("joe", "buckets.assign"),
        ("quin", "buckets.assign"),
    } <= wrong
    assert "there is no function of an exercise" in done.stdout
    assert lines[-1] == "1 of 5 solutions passed."
    done = CliRunner().invoke(app, ["exercises", *two, "--grade", str(tmp_path), "--csv"])
    assert "1 of 5 solutions passed." in done.stderr
    assert list(csv.reader(done.stdout.splitlines())) == [
        ["student", *two, "points"], ["ada", "1", "0", "1"], ["ben", "0", "", "0"], ["gus", "", "", "0"],
        ["joe", "0", "", "0"], ["quin", "0", "", "0"],
    ]  # fmt: skip


def test_marks_are_printed_too_where_everybody_has_handed_everything_in(capsys) -> None:
    marks = [
        Mark("ada", "buckets.assign", Verdict.PASSED, "", 1),
        Mark("ben", "buckets.assign", Verdict.FAILED, "3 is"),
    ]
    _print_marks([asdict(mark) for mark in marks])
    assert capsys.readouterr().out.rstrip().endswith("1 of 2 solutions passed.")


def test_a_sheet_has_the_tasks_and_no_solution_and_solutions_say_why() -> None:
    sheet, solutions = (
        CliRunner().invoke(app, ["exercises", "zero1.owners", option]).stdout for option in ("--sheet", "--solutions")
    )
    owners = find("zero1.owners")
    for text in (owners.task, owners.starter.rstrip(), "## zero1.owners (1 point)"):
        assert text in sheet
    assert "owned[name]" in solutions
    assert "interval" in solutions
    assert sheet.endswith('`shardlab.course.check("zero1.owners", zero1_owners)`.\n')
    assert "owned[name]" not in sheet


def test_the_list_names_every_exercise_with_its_notebook() -> None:
    rows = json.loads(CliRunner().invoke(app, ["exercises", "--json"]).stdout)
    assert [row["name"] for row in rows] == [exercise.name for exercise in LADDER]
    notebooks = Path(__file__).parents[3] / "notebooks"
    for row in rows:
        assert [*notebooks.glob(f"{row['notebook']}.*")], "a notebook, or a page of the guide"
    lines = CliRunner().invoke(app, ["exercises"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [exercise.name for exercise in LADDER]


def test_bad_input_is_said_in_a_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name, text in (("notes.txt", "no code"), ("broken.py", "no code"), ("ends.py", "raise SystemExit(3)")):
        Path(name).write_text(text)
    for options, words in (
        (["--grade", "nowhere"], "grade: nowhere is no folder"),
        (["--grade", "empty"], "grade: empty holds no submission"),
        (["--sheet", "--solutions"], "sheet, solutions, grade: each prints something else"),
        (["--csv"], "csv with --grade FOLDER alone"),
        (["--grade", "empty", "--csv", "--json"], "give one of them"),
        (["--with", "nowhere.py"], "with: there is no file nowhere.py"),
        (["--with", "notes.txt"], "with: there is no file notes.txt of Python"),
        (["--with", "broken.py"], "with: broken.py, line 1: SyntaxError"),
        (["--with", "ends.py"], "with: ends.py, line 1: SystemExit: 3"),
    ):
        done = CliRunner().invoke(app, ["exercises", *options])
        assert done.exit_code == 2
        assert words in done.stderr
