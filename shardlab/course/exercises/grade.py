"""Marks for a class: every student's functions, each run on fresh ranks, so that no submission can disturb another.

A submission is a ``.py`` file or a notebook, or a folder of them, in which functions have the exercises' names:
``zero1_owners`` for ``zero1.owners``. Files are read in ranks only (``submission.py``). A function that raises, hangs
or ends its process gets a mark with its reason, and the others are marked all the same.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from shardlab.course.exercises.exercise import Exercise
from shardlab.course.exercises.judge import LIMIT_S, TIMEOUT_S, Verdict, examine, pool_for, why_not_ready
from shardlab.course.exercises.ladder import LADDER
from shardlab.course.exercises.submission import SUFFIXES, module_name, read_submission
from shardlab.launch import RankDied, RankError, RankHang, RankPool

CLOSE = 0.85  # as near is what a name may have been meant to be
UNKNOWN = re.compile(r"NameError: name '(\w+)' is not defined")
STANDS = re.compile(r"^\s+at (.+):(\d+) in ", re.MULTILINE)  # in what a hang says of a rank that computes


@dataclass(frozen=True)
class Mark:
    """One exercise of one student; the numbers are those of ``judge.Score``.

    Attributes:
        points: the exercise's where it passed, else 0.
        handed_in: whether there is something of it, be it under a name that is nearly right; if not, the verdict is
            'failed', and the reason ends with that.
    """

    student: str
    exercise: str
    verdict: Verdict
    reason: str
    points: int = 0
    messages: int = 0
    num_bytes: int = 0
    peak_bytes: int = 0
    time_us: int = 0
    handed_in: bool = True


@dataclass(frozen=True)
class FromFile:
    """A function of a submission, which is read where this is unpickled: in a rank."""

    path: str
    name: str

    def __setstate__(self, state: dict[str, str]) -> None:
        """Read it in the rank, before the time in a collective counts."""
        self.__dict__.update(state)
        if module_name(self.path) not in sys.modules:
            read_submission(self.path)

    def __call__(self, *inputs: object) -> object:
        """Call it."""
        return getattr(sys.modules[module_name(self.path)], self.name)(*inputs)


def grade(
    folder: Path | str, exercises: Sequence[Exercise], *, timeout_s: float = TIMEOUT_S, limit_s: float = LIMIT_S
) -> Iterator[Mark]:
    """A mark for every student and exercise, student by student.

    Args:
        folder: holds a ``.py`` file, a notebook or a folder for each student.
        exercises: what is marked.
        timeout_s: seconds that a rank may wait in one collective.
        limit_s: seconds for a case, and for reading a file.

    Raises:
        ValueError: there is no such folder, or it is empty.
    """
    students = submissions(Path(folder))
    cases = [case for exercise in exercises for case in exercise.cases()]
    with pool_for(cases, timeout_s, limit_s) as pool:
        for student, files in students.items():
            pool.restart()  # what one submission has changed in the ranks is gone
            yield from _marks(student, files, exercises, pool)


def submissions(folder: Path) -> dict[str, list[Path]]:
    """Files by student, in the order of their names: whatever lies there counts, so that nobody is left out unsaid.

    Raises:
        ValueError: there is no such folder, or it is empty.
    """
    if not folder.is_dir():
        raise ValueError(
            f"grade: {folder} is no folder; name one with a .py file, a notebook or a folder for each student"
        )
    found: dict[str, list[Path]] = {}
    for path in sorted(path for path in folder.iterdir() if path.name[0] not in "._"):
        files = [each for each in path.rglob("*") if _is_read(each) and "/." not in f"/{each.relative_to(path)}"]
        found.setdefault(path.stem if path.is_file() else path.name, []).extend(sorted(files) or [path])
    if not found:
        raise ValueError(
            f"grade: {folder} holds no submission; put a .py file, a notebook or a folder there for each student"
        )
    return dict(sorted(found.items()))


def _is_read(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _read(rank: int, path: str) -> tuple[list[str], dict[str, str]]:
    """What a file defines, and its troubles; on one rank."""
    if rank > 0:
        return [], {}
    found = read_submission(path)
    return [name for name, value in vars(found.module).items() if callable(value)], found.troubles


def _marks(student: str, files: list[Path], exercises: Sequence[Exercise], pool: RankPool) -> Iterator[Mark]:
    defined, troubles, again = dict[str, str](), dict[str, str](), dict[str, str]()
    unread = []
    for file in files:
        if why := why_not_ready(pool):
            yield from (Mark(student, exercise.name, Verdict.BLOCKED, why) for exercise in exercises)
            return
        if not _is_read(file):
            unread.append(f"{file.name} holds neither a .py file nor a notebook")
            continue
        try:
            names, of_file = pool.run(_read, str(file.resolve()))[0]
        except RankDied:
            unread.append(f"{file.name} cannot be read: it ends the process")
        except (RankError, RankHang) as error:
            first, _, rest = str(error).partition("\n")
            unread.append(f"{file.name} cannot be read: {first}{_place(rest)}")
        else:
            for name in names:
                if defined.setdefault(name, str(file.resolve())) != str(file.resolve()):
                    again.setdefault(name, f"{Path(defined[name]).name} counts, and {file.name} has a {name}, too")
            troubles |= of_file
    unread += [troubles[""]] if "" in troubles else []
    taken = {exercise.function_name for exercise in (*LADDER, *exercises)}
    for exercise in exercises:
        name = exercise.function_name
        if name in defined:
            yield _judged(student, exercise, defined[name], pool, troubles, again.get(name, ""))
        elif name in troubles:
            yield Mark(student, exercise.name, Verdict.FAILED, troubles[name])
        else:
            meant = _meant(name, [one for one in (*defined, *troubles) if one not in taken])
            advice = [f"did you mean {meant}? Then rename it"] if meant else []
            reason = "; ".join([*unread, *advice, f"there is no function {name}"])
            yield Mark(student, exercise.name, Verdict.FAILED, reason, handed_in=bool(meant))


def _judged(student: str, exercise: Exercise, path: str, pool: RankPool, troubles: dict[str, str], again: str) -> Mark:
    """The mark of a function in a file; of one that fails also what in the file had trouble, and where another is."""
    report = examine(exercise, FromFile(path, exercise.function_name), pool)
    told = f"{report.reason}{_place(report.detail)}".replace(f"{Path(path).parent}/", "")
    because = [troubles[one] for one in UNKNOWN.findall(told) if one in troubles]
    passed = report.verdict is Verdict.PASSED
    reason = ". ".join(filter(None, (told, *because, report.mistake.rstrip("."), "" if passed else again)))
    score = asdict(report.score) | {"points": exercise.points} if passed else {}
    return Mark(student, exercise.name, report.verdict, reason, **score)


def _meant(name: str, others: Sequence[str]) -> str:
    """Which of these is the function of that name, misspelt; empty if none is."""
    digits = re.sub(r"\D", "", name)  # whole_zero2 is not meant by whole_zero1b
    own = [other for other in others if re.sub(r"\D", "", other) in ("", digits)]
    by_letters = {other.lower().replace("_", ""): other for other in own}
    close = get_close_matches(name.replace("_", ""), by_letters, 1, CLOSE)
    words = _words(name)  # most of them, in another order, are meant too
    most = [one for one in own if _words(one) <= words and len(_words(one)) > len(words) / 2]
    return by_letters[close[0]] if close else "".join(most[:1])


def _words(name: str) -> set[str]:
    return {*re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).lower().split("_")}


def _place(detail: str) -> str:
    """Where a rank computes without an end."""
    found = STANDS.search(detail)
    return f", at line {found[2]} of {Path(found[1]).name}" if found else ""


def exercises_in(path: Path | str) -> list[Exercise]:
    """The exercises that a teacher's file holds under names of its own.

    Raises:
        ValueError: there is no such file, it is no Python, or there is no exercise in it.
    """
    if not Path(path).is_file() or Path(path).suffix != ".py":
        raise ValueError(f"with: there is no file {path} of Python; name a .py file that holds exercises")
    read = read_submission(str(Path(path).resolve()))
    for trouble in read.troubles.values():
        raise ValueError(f"with: {trouble}")
    found = [value for value in vars(read.module).values() if isinstance(value, Exercise)]
    if not found:
        raise ValueError(f"with: {path} holds no exercise; give one a name in it, as MINE = Exercise(...)")
    return found
