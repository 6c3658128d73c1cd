"""One process of a script that is compared: a rank, or one alone."""

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import save  # a process alone saves nothing else

from shardlab.launch.placement import MOST_RANKS
from shardlab.launch.worker import end_with
from shardlab.recording.record import as_main
from shardlab.same.alone import Alone, in_a_group_of_one
from shardlab.same.capture import Capture
from shardlab.same.notes import Notes
from shardlab.same.rows import Rows, RowsAgain, joined
from shardlab.same.steps import Enough

RANK, ALONE, TOGETHER = "rank", "alone", "together"  # the last one with the rows of all ranks at once
LEFT = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket closed")
"""What a rank hears whose others have ended."""


@dataclass(frozen=True)
class Job:
    """A script that is compared.

    Args:
        script: a file.
        arguments: its own.
        ranks: number of them.
        limit: steps of each optimizer.
        float64: whether modules and rows are in float64.
        dropout: whether it is left on.
        alone: its arguments in one process; None if they are the same.

    Raises:
        ValueError: there is no such script; fewer than two ranks, or too many; no step.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    limit: int = 3
    float64: bool = False
    dropout: bool = False
    alone: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check before anything runs."""
        if not self.script.is_file():
            raise ValueError(f"script: {self.script} is not a file; name a Python script, then its arguments")
        try:
            compile(self.script.read_bytes(), self.script, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"script: {self.script} is no Python script that can be read: {error}") from None
        if self.ranks < 2:
            raise ValueError(f"ranks: {self.ranks} is given; one rank is one process already, so give 2 or more")
        if self.ranks > MOST_RANKS:
            raise ValueError(f"ranks: {self.ranks} is given; one machine starts at most {MOST_RANKS}")
        if self.limit < 1:
            raise ValueError(f"steps: {self.limit} is given; it must be 1 or more")


def write(notes: Notes, folder: Path, kind: str, rank: int) -> None:
    """Write the file of a process."""
    part = folder / f"{kind}{rank}.part"
    save(notes, part)
    part.rename(folder / f"{kind}{rank}.pt")


def _without_tensors(notes: Notes) -> Notes:
    """Of a rank that does not end, nothing more is said than what it did."""
    none: dict[str, Any] = {"weights": [], "gradients": [], "stepped": [], "after": []}
    return replace(notes, steps=[replace(step, **none) for step in notes.steps])


def read(folder: Path, kind: str, numbers: Iterable[int]) -> list[Notes]:
    """The notes of processes of a kind; empty ones of those that have written none."""
    paths = [folder / f"{kind}{number}.pt" for number in numbers]
    return [torch.load(one, weights_only=False, mmap=True) if one.exists() else Notes() for one in paths]


def run(job: Job, folder: Path, kind: str, number: int) -> Notes:
    """Run the script here, up to its last step, and write the notes.

    Args:
        job: what to run.
        folder: of the notes.
        kind: of process.
        number: the rank; of a process with all rows at once the dim along which these are put together.
    """
    notes = Notes()
    with contextlib.ExitStack() as stack:
        if kind == RANK:
            rows = Rows(notes, float64=job.float64)
            capture = Capture(rows, notes, rank=number, limit=job.limit, dropout=job.dropout)
            # Also in between: what a rank has done stays known, where it waits for others without end.
            capture.on_step = lambda: write(_without_tensors(notes), folder, kind, number)
        else:
            ranks, rank = read(folder, RANK, range(job.ranks)), number if kind == ALONE else 0
            of = ranks if kind == ALONE else [joined(ranks, number)]
            again = RowsAgain(notes, float64=job.float64, ranks=of, rank=rank)
            capture = Alone(again, notes, ranks, rank=rank, limit=job.limit, dropout=job.dropout)
            stack.enter_context(in_a_group_of_one())
        import torch._dynamo  # the forkserver has; a second of CPU for the process that compares

        torch._dynamo.config.disable = True  # what is compiled is not seen, and rounds otherwise
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if job.float64 else before)
        stack.callback(torch.set_default_dtype, before)
        given = job.arguments if kind == RANK or job.alone is None else job.alone
        script = as_main(job.script, given)
        try:
            with capture.listening():
                script()
        except Enough:
            notes.has_enough = True
        except SystemExit as ending:
            notes.error = "" if ending.code in (None, 0) else f"the script ended with exit code {ending.code}"
        except BaseException as error:
            notes.error = "".join(traceback.format_exception_only(error)).strip()
            notes.left_by_others = isinstance(error, RuntimeError) and any(words in notes.error for words in LEFT)
            if kind == RANK and not notes.left_by_others:
                traceback.print_exc()
        finally:
            capture.finish()
    notes.has_ended = True
    write(notes, folder, kind, number)
    return notes


def main(job: Job, folder: Path, kind: str, number: int, env: dict[str, str], cwd: str, life: Connection) -> None:
    """Run as a process of its own, and end without waiting for what the script has left.

    It ends with the process at the other end of ``life``: a script may have no end of its own.
    """
    os.setsid()
    end_with(life)
    # A loader's workers begin as they do without us: by a forkserver each would run a script that has no main guard.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if kind != RANK:  # what one process prints a rank has printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
    run(job, folder, kind, number)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a group that other ranks have left may wait for them at exit
