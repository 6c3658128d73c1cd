"""Where a comparison is written, in a directory of its own since runs are never mixed, and from where another goes on.

    compare(workload, "runs/first", steps=20, save_every=5)         # interrupted after step 13, say
    compare(workload, "runs/second", steps=20, resume="runs/first") # steps 10 to 19, as they would have been

Each strategy goes on from its own checkpoint, which may be of another number of ranks. Data are read from the start and
what was trained on is passed over, so the batches are those of one long run.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from shardlab.engines import STRATEGIES
from shardlab.engines.checkpoint.directory import reading
from shardlab.engines.checkpoint.manifest import read_manifest
from shardlab.experiment.options import CompareOptions
from shardlab.records.tables import TABLES

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
    if (path := next(_foreign(directory), None)) is not None:
        raise ValueError(f"overwrite: {path} is not of a comparison; move it away, or name another directory")
    if names and resume is not None and Path(resume).resolve() == directory.resolve():
        raise ValueError(f"overwrite: {directory} holds the checkpoints to resume from; name another directory")
    # Remove only after every check. Remove the records last: by them the next call knows that this is a comparison.
    for name in sorted(names, key=lambda name: name == "records"):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def reserve(directory: Path) -> None:
    """Begin a comparison in its directory, which one process alone can.

    Raises:
        ValueError: another has, meanwhile.
    """
    try:
        (directory / "records").mkdir()
    except FileExistsError:
        raise ValueError(f"out: {directory} holds {another(directory)}") from None


def _foreign(directory: Path) -> Iterator[Path]:
    """What is in a comparison's directory, or a file or a link in its folders, that it has not written."""
    yield from (path for path in sorted(directory.iterdir()) if path.name not in OURS)
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


def checkpoint_directory(directory: Path, strategy: str) -> Path:
    """Where ``compare`` writes the checkpoints of one strategy."""
    return directory / "checkpoints" / strategy


def same_options(options: CompareOptions, rows: int | None) -> dict[str, Any]:
    """What a checkpoint says beside the model: the options that a run that goes on must share.

    Args:
        options: of the comparison.
        rows: of a global batch; None where the options do not decide on them.
    """
    return {"seed": options.seed, "accumulation": options.accumulation, "rows": rows}


def check_resume(options: CompareOptions, rows: int | None) -> None:
    """Check that checkpoints can be written, and that those to go on from fit.

    Raises:
        ValueError: a strategy's state is torch's own, there is no checkpoint, it has all the steps already, or its run
            had other batches.
    """
    field = "save_every" if options.save_every is not None else "resume" if options.resume is not None else ""
    for name in options.strategies if field else ():
        if why := getattr(STRATEGIES.get(name), "no_checkpoints", ""):
            raise ValueError(f"{field}: strategy {name!r} {why}; leave it out")
        if options.resume is not None:
            _check_one(options, checkpoint_directory(Path(options.resume), name), name, same_options(options, rows))


def _check_one(options: CompareOptions, directory: Path, strategy: str, wanted: dict[str, Any]) -> None:
    saved = sorted(path.name for path in directory.parent.iterdir()) if directory.parent.is_dir() else []
    if strategy not in saved:
        raise ValueError(
            f"resume: {options.resume} has no checkpoint of {strategy}; it has those of {', '.join(saved) or 'none'}. "
            "A comparison writes them with save_every"
        )
    with reading(directory) as folder:
        manifest = read_manifest(folder)
    for field, needed in wanted.items():
        given = manifest.extra[field]
        if needed is not None and given != needed:
            what = "batch" if field == "rows" else field
            raise ValueError(
                f"{what}: {needed}, but {strategy} in {options.resume} was trained with {given}; set {what} to "
                "that, so that the steps go on"
            )
    if manifest.num_steps >= options.steps:
        raise ValueError(
            f"steps: {options.steps}, but {strategy} in {options.resume} has taken {manifest.num_steps} already; steps "
            "counts from the beginning, so give more"
        )
