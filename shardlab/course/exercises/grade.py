"""Marks for a class: every student's functions, each run on fresh ranks, so that no submission can disturb another.

A submission is a ``.py`` file, or a folder of them, in which functions have the exercises' names: ``zero1_owners`` for
``zero1.owners``. Files are imported in ranks only. One that raises, hangs, ends its process or does not import gets a
mark with its reason, and the others are marked all the same.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from shardlab.course.exercises.exercise import Exercise
from shardlab.course.exercises.judge import LIMIT_S, TIMEOUT_S, Verdict, examine, pool_for, why_not_ready
from shardlab.launch import RankDied, RankError, RankHang, RankPool


@dataclass(frozen=True)
class Mark:
    """One exercise of one student; the numbers are those of ``judge.Score``.

    Attributes:
        handed_in: whether there is a function for it; if not, the verdict is 'failed', and the reason ends with that.
    """

    student: str
    exercise: str
    verdict: Verdict
    reason: str
    messages: int = 0
    num_bytes: int = 0
    peak_bytes: int = 0
    time_us: int = 0
    handed_in: bool = True


@dataclass(frozen=True)
class FromFile:
    """A function of a file, imported where it is unpickled: in a rank."""

    path: str
    name: str

    def __setstate__(self, state: dict[str, str]) -> None:
        """Import it in the rank, before the time in a collective counts."""
        self.__dict__.update(state)
        import_file(self.path)

    def __call__(self, *inputs: object) -> object:
        """Call it."""
        return getattr(import_file(self.path), self.name)(*inputs)


def import_file(path: str) -> ModuleType:
    """The module of a file; the same one at the next call."""
    name = f"submission_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    # A student's own files beside it may be imported by name.
    sys.path.insert(0, str(Path(path).parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def functions_of(rank: int, path: str) -> list[str]:
    """The names of what can be called in a file; on one rank."""
    return [name for name, value in vars(import_file(path)).items() if callable(value)] if rank == 0 else []


def grade(
    folder: Path | str, exercises: Sequence[Exercise], *, timeout_s: float = TIMEOUT_S, limit_s: float = LIMIT_S
) -> Iterator[Mark]:
    """A mark for every student and exercise, student by student.

    Args:
        folder: holds a ``.py`` file or a folder for each student.
        exercises: what is marked.
        timeout_s: seconds that a rank may wait in one collective.
        limit_s: seconds for a case, and for the import of a file.

    Raises:
        ValueError: there is no such folder, or there is no submission in it.
    """
    submissions = _submissions(Path(folder))
    cases = [case for exercise in exercises for case in exercise.cases()]
    with pool_for(cases, timeout_s, limit_s) as pool:
        for student, files in submissions.items():
            pool.restart()  # what one submission has changed in the ranks is gone
            yield from _marks(student, files, exercises, pool)


def _submissions(folder: Path) -> dict[str, list[str]]:
    """Files by student; a folder's in the order of their names."""
    if not folder.is_dir():
        raise ValueError(f"grade: {folder} is no folder; name one with a .py file or a folder for each student")
    files = {path.stem: [path] for path in folder.glob("*.py")}
    folders = {path.name: sorted(path.rglob("*.py")) for path in folder.iterdir() if path.is_dir()}
    found = {student: paths for student, paths in {**files, **folders}.items() if student[0] not in "._"}
    if not found:
        raise ValueError(f"grade: {folder} holds no submission; put a .py file or a folder there for each student")
    if both := sorted(files.keys() & folders.keys()):
        raise ValueError(f"grade: {both[0]} has a file and a folder; keep one of them")
    return {student: [str(path.resolve()) for path in found[student]] for student in sorted(found)}


def _marks(student: str, files: list[str], exercises: Sequence[Exercise], pool: RankPool) -> Iterator[Mark]:
    defined: dict[str, str] = {}
    troubles = []
    for file in files:
        if why := why_not_ready(pool):
            yield from (Mark(student, exercise.name, Verdict.BLOCKED, why) for exercise in exercises)
            return
        try:
            names = pool.run(functions_of, file)[0]
        except RankDied:
            troubles.append(f"{Path(file).name} does not import: it ends the process")
        except (RankError, RankHang) as error:
            troubles.append(f"{Path(file).name} does not import: {str(error).partition(chr(10))[0]}")
        else:
            defined |= {name: file for name in names if name not in defined}
    for exercise in exercises:
        if exercise.function_name not in defined:
            missing = f"there is no function {exercise.function_name}"
            yield Mark(student, exercise.name, Verdict.FAILED, "; ".join([*troubles, missing]), handed_in=False)
            continue
        report = examine(exercise, FromFile(defined[exercise.function_name], exercise.function_name), pool)
        score = asdict(report.score) if report.verdict is Verdict.PASSED else {}
        yield Mark(student, exercise.name, report.verdict, report.reason, **score)


def exercises_in(path: Path | str) -> list[Exercise]:
    """The exercises that a teacher's file holds under names of its own.

    Raises:
        ValueError: there is no such file, it is no Python, or there is no exercise in it.
    """
    if not Path(path).is_file() or Path(path).suffix != ".py":
        raise ValueError(f"with: there is no file {path} of Python; name a .py file that holds exercises")
    try:
        module = import_file(str(Path(path).resolve()))
    except (Exception, SystemExit) as error:
        raise ValueError(f"with: {path} cannot be imported: {type(error).__name__}: {error}") from error
    found = [value for value in vars(module).values() if isinstance(value, Exercise)]
    if not found:
        raise ValueError(f"with: {path} holds no exercise; give one a name in it, as MINE = Exercise(...)")
    return found
