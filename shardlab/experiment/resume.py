"""Checkpoints of a comparison: ``save_every`` writes them, and a later comparison goes on from them by ``resume``.

    compare(workload, "runs/first", steps=20, save_every=5)         # interrupted after step 13, say
    compare(workload, "runs/second", steps=20, resume="runs/first") # steps 10 to 19, as they would have been

Each strategy goes on from its own checkpoint, which may be of another number of ranks. Data are read from the start and
what was trained on is passed over, so the batches are those of one long run.
"""

from pathlib import Path
from typing import Any

from shardlab.engines import STRATEGIES
from shardlab.engines.checkpoint.directory import reading
from shardlab.engines.checkpoint.manifest import read_manifest
from shardlab.experiment.options import CompareOptions

SAME = ("seed", "accumulation", "rows")  # what decides which rows a step trains on


def checkpoint_directory(directory: Path, strategy: str) -> Path:
    """Where ``compare`` writes the checkpoints of one strategy."""
    return directory / "checkpoints" / strategy


def said_of(options: CompareOptions, rows: int | None) -> dict[str, Any]:
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
    if options.save_every is not None or options.resume is not None:
        field = "resume" if options.save_every is None else "save_every"
        for name in options.strategies:
            if why := getattr(STRATEGIES.get(name), "no_checkpoints", ""):
                raise ValueError(f"{field}: strategy {name!r} {why}; leave it out")
    if options.resume is not None:
        for name in options.strategies:
            _check_one(options, checkpoint_directory(Path(options.resume), name), name, said_of(options, rows))


def _check_one(options: CompareOptions, directory: Path, strategy: str, wanted: dict[str, Any]) -> None:
    saved = sorted(path.name for path in directory.parent.iterdir()) if directory.parent.is_dir() else []
    if strategy not in saved:
        raise ValueError(
            f"resume: {options.resume} has no checkpoint of {strategy}; it has those of {', '.join(saved) or 'none'}. "
            "A comparison writes them with save_every"
        )
    with reading(directory) as folder:
        manifest = read_manifest(folder)
    for field in SAME:
        given = manifest.extra[field]
        if wanted[field] is not None and given != wanted[field]:
            what = "batch" if field == "rows" else field
            raise ValueError(
                f"{what}: {wanted[field]}, but {strategy} in {options.resume} was trained with {given}; set {what} to "
                "that, so that the steps go on"
            )
    if manifest.num_steps >= options.steps:
        raise ValueError(
            f"steps: {options.steps}, but {strategy} in {options.resume} has taken {manifest.num_steps} already; steps "
            "counts from the beginning, so give more"
        )
