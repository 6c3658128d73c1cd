"""A class is marked: good and bad submissions, none of which disturbs another."""

import inspect
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.course import LADDER, find
from shardlab.course.exercises.grade import grade
from tests.course.exercises.right import right_buckets

PRINTS = "\ndef buckets_assign(*given):\n    print('I print while I work')\n    return right_buckets(*given)\n"
RIGHT = inspect.getsource(right_buckets) + PRINTS
SUBMISSIONS = {
    "ada.py": (RIGHT, "passed", ""),
    "ben.py": ("def buckets_assign(:", "failed", "ben.py does not import: rank 0 raised SyntaxError"),
    "cy.py": ("import time\ntime.sleep(99)", "failed", "cy.py does not import: the run took longer than limit_s=3 s"),
    "dora.py": ("import os\nos._exit(0)", "failed", "dora.py does not import: it ends the process"),
    "eve.py": ("def buckets_assign(sizes, capacity):\n    return 1 / 0", "failed", "raised ZeroDivisionError"),
    "fay.py": ("def buckets_assign(sizes, capacity):\n    while True: pass", "failed", "took longer than limit_s=3 s"),
    "gus.py": ("other = 1", "failed", "there is no function buckets_assign"),
    "hal.py": (  # he changes the library for those who come after him
        "import shardlab.course.exercises.values\nshardlab.course.exercises.values.plain = lambda value: 0\n" + RIGHT,
        "failed",
        "",
    ),
    "ida/part.py": ("from helper import buckets_assign", "passed", ""),
    "ida/helper.py": (RIGHT, "", ""),
    "joe.py": ("def buckets_assign(sizes, capacity):\n    return []", "failed", "2 items are wanted, 0 were found"),
    "kim.py": (RIGHT, "passed", ""),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (source, *_) in SUBMISSIONS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def test_every_submission_gets_its_mark(folder: Path) -> None:
    marks = {mark.student: mark for mark in grade(folder, [find("buckets.assign")], limit_s=3)}
    wanted = {Path(name).parts[0].removesuffix(".py"): mark for name, (_, *mark) in SUBMISSIONS.items() if mark[0]}
    assert list(marks) == sorted(wanted)
    for student, (verdict, words) in wanted.items():
        if student != "hal":  # what is done to his own verdict is his; the next student's is untouched
            assert marks[student].verdict == verdict, marks[student]
        assert words in marks[student].reason, marks[student]


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
    assert marks["class.five"]["verdict"] == marks["buckets.assign"]["verdict"] == "passed"
    assert marks["collectives.ring_all_reduce"]["reason"] == "there is no function collectives_ring_all_reduce"


def test_marks_are_printed_with_a_row_for_each_student_and_what_has_failed(tmp_path: Path) -> None:
    for name in ("ada.py", "ben.py", "gus.py", "joe.py"):
        (tmp_path / name).write_text(SUBMISSIONS[name][0])
    done = CliRunner().invoke(app, ["exercises", "--grade", str(tmp_path)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["student", "handed", "in", "passed", "failed"]
    assert [" ".join(line) for line in lines[2:6]] == ["ada 1 1 0", "ben 0 0 0", "gus 0 0 0", "joe 1 0 1"]
    failed = [line[:2] for line in lines[9:] if line[:1] in (["ada"], ["ben"], ["gus"], ["joe"])]
    assert failed == [["ben", "-"], ["joe", "buckets.assign"]]
    assert "there is no function" not in done.stdout
    assert done.stdout.endswith("\n1 of 2 solutions passed.\n")


def test_the_list_names_every_exercise_with_its_solutions() -> None:
    rows = json.loads(CliRunner().invoke(app, ["exercises", "--json"]).stdout)
    assert [row["name"] for row in rows] == [exercise.name for exercise in LADDER]
    notebooks = Path(__file__).parents[3] / "notebooks"
    for row in rows:
        assert (notebooks / f"{row['notebook']}.ipynb").is_file()
        assert row["references"] >= 1
        assert row["wrong_solutions"] >= 3
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
        (["--with", "nowhere.py"], "with: there is no file nowhere.py"),
        (["--with", "notes.txt"], "with: there is no file notes.txt of Python"),
        (["--with", "broken.py"], "with: broken.py cannot be imported: SyntaxError"),
        (["--with", "ends.py"], "with: ends.py cannot be imported: SystemExit: 3"),
    ):
        done = CliRunner().invoke(app, ["exercises", *options])
        assert done.exit_code == 2
        assert words in done.stderr
