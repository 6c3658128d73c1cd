"""Where a comparison is written: in a directory of its own, since runs are never mixed."""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from shardlab.tables import TABLES

REPORT = ("report.html", "report.html.part")  # the second while it is written
OURS = {"records", "checkpoints", "summary.json", *REPORT}
"""What a comparison leaves in its directory."""

OF_A_RANK = re.compile(rf"(?:(?:{'|'.join(TABLES)})\.)?rank(\d+)\.(?:journal|parquet)")
"""The names of a rank's files in the directory of a run."""

OF_FIRST = {"manifest.json", "manifest.json.part", *REPORT}
"""Those of the first rank."""

_OF_A_CHECKPOINT = re.compile(r"latest|version-\d+(\.partial)?/(manifest\.json|rank-\d+\.safetensors|replaces|latest)")


def new_directory() -> Path:
    """Where a comparison goes that names no directory."""
    return Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")


def run_directory(directory: Path, strategy: str) -> Path:
    """Where ``compare`` writes the records of one strategy."""
    return directory / "records" / strategy


def claim(directory: Path, *, overwrite: bool = False, resume: str | None = None) -> None:
    """Make the directory of a new comparison.

    Args:
        directory: of the comparison.
        overwrite: remove the comparison that is in it.
        resume: the comparison from whose checkpoints the new one goes on.

    Raises:
        ValueError: it is not empty and ``overwrite`` does not allow that, it is a file, or it cannot be made. Then
            nothing was removed.
    """
    names = made(directory)
    if names and not overwrite:
        raise ValueError(f"out: {directory} holds {another(directory)}")
    if names and "records" not in names:  # of the other names somebody else's folder may have any
        raise ValueError(f"overwrite: {directory} holds no comparison, as it has no folder records; name another one")
    if foreign := sorted(names - OURS):
        raise ValueError(
            f"overwrite: {directory} also holds {', '.join(foreign[:3])}, which no comparison writes; name another one"
        )
    if (path := next(_foreign(directory), None)) is not None:
        raise ValueError(f"overwrite: {path} is no file of a comparison; move it away, or name another directory")
    if names and resume is not None and Path(resume).resolve() == directory.resolve():
        raise ValueError(f"overwrite: {directory} holds the checkpoints to resume from; name another directory")
    # Remove only after every check. Remove the records last: by them the next call knows that this is a comparison.
    for name in sorted(names, key=lambda name: name == "records"):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _foreign(directory: Path) -> Iterator[Path]:
    """Files, and links to anything, in the folders of a comparison that it has not written."""
    for folder in (directory / "records", directory / "checkpoints"):
        for path in (folder, *folder.rglob("*")):
            name = "/".join(path.relative_to(folder).parts[1:])  # below the folder of a strategy
            ours = name in OF_FIRST or OF_A_RANK.fullmatch(name) or _OF_A_CHECKPOINT.fullmatch(name)
            if path.is_symlink() or (path.is_file() and not ours):
                yield path


def made(directory: Path) -> set[str]:
    """Make a directory if it is not there.

    Returns:
        The names in it.

    Raises:
        ValueError: it is a file, or cannot be made.
    """
    if directory.is_file():
        raise ValueError(f"out: {directory} is a file; name a new or an empty directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ValueError(f"out: {directory} cannot be made: {error.strerror}; name another directory") from error


def write_page(path: Path, page: str) -> Path:
    """Write a report and return its path; a link of this name is replaced, and not followed.

    Raises:
        ValueError: it cannot be written; then the one before is still there.
    """
    part = path.with_name(REPORT[1])
    try:
        part.unlink(missing_ok=True)
        with part.open("x") as file:  # which follows no link
            file.write(page)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise ValueError(f"report: {path} cannot be written: {error.strerror}; make room, or copy the run") from error
    return path


def another(directory: Path) -> str:
    """What is in a directory that is not empty, and what to do about it."""
    is_cut_off = (directory / "records").is_dir() and not (directory / "summary.json").is_file()
    what = "another run, which did not finish" if is_cut_off or any(directory.glob("rank*.journal")) else "another run"
    return f"{what}; name a new or an empty directory, or overwrite it (--overwrite, overwrite=True)"
