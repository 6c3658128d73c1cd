"""Runs something and prints in the cell how it ended: a broken program on ranks, or a command of the terminal.

    told(pool, program, rank=1, collective="all_reduce", line=7)
    terminal("shardlab plan --params 7.5B --ranks 64")

Of a program it prints what the pool reports, without what differs between machines: times, folders, the order in which
ranks fail; and beside it the reader's prediction. A line is that of the program's own file; of a cell it is the number
that JupyterLab shows beside it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.launch import RankDied, RankError, RankHang, RankPool

ALL = "all"
SIZE = {"COLUMNS": "80", "LINES": "24", "TERM": "dumb"}  # all three, or a program asks elsewhere
_PLACE = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?:: (?P<code>.*))?")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+), in .*\n    (?P<code>.*)')
_DIFFER = re.compile(r"(?P<what>Collective \d+ of axis '\w+' differs between ranks): (?P<places>.*)")
_WIDTH = 44  # of what is shown of a line: a row must fit into a cell
_SHOWN = ("rank", "process", "seq", "collective", "tag", "state", "elements", "source line")


@dataclass(frozen=True)
class Told:
    """What came of a program.

    Attributes:
        text: what is printed.
        rank: the rank that does not do what the others do; 'all' if all do the same, None if nothing was said.
        collective: what the others wait in.
        lines: of the program, where ranks wait or fail.
    """

    text: str
    rank: int | str | None = None
    collective: str = ""
    lines: tuple[int, ...] = ()

    @property
    def is_error(self) -> bool:
        """Whether an exception was raised."""
        return self.rank is not None


def told(
    pool: RankPool, program: Callable[..., Any], *args: Any, rank: object = ..., collective: object = ..., line: object
    = ...,
) -> Told:  # fmt: skip
    """Run ``program(rank, *args)`` on the pool, print what is told, and beside it the answer of the reader.

    Args:
        pool: its ``timeout_s`` is how long a hang takes.
        program: a function of the rank.
        args: its other arguments.
        rank: the answer: the rank that does not do what the others do, or 'all'. The dots stand for no answer.
        collective: the answer: the verb that is never completed.
        line: the answer: where ranks wait in it; the line's number in the cell.
    """
    found = outcome(pool, program, *args)
    sys.stdout.write(found.text + "\n")
    wanted = ("rank", rank, [found.rank]), ("collective", collective, [found.collective]), ("line", line, found.lines)
    words = [_marked(*answer) for answer in wanted if answer[1] is not ...]
    if words and found.is_error:
        sys.stdout.write(f"Your answer: {'; '.join(words)}.\n")
    return found


def outcome(pool: RankPool, program: Callable[..., Any], *args: Any) -> Told:
    """Run ``program(rank, *args)`` and say what came of it."""
    try:
        results = pool.run(program, *args)
    except RankHang as error:
        return _of_table("Ranks wait in a collective that is never completed.", error.table, error.waiting)
    except RankDied as error:
        return _of_table(f"Rank {error.rank} died.", error.table, (), error.rank)
    except RankError as error:
        return _of_error(error, program.__code__.co_filename)
    same = all(str(result) == str(results[0]) for result in results)
    returned = f"All ranks return {results[0]!r}." if same else f"All ranks return; in their order: {results!r}."
    return Told("No error. " + ("All ranks return." if results[0] is None else returned))


def _of_table(first: str, table: str, waiting: Sequence[int], dead: int | None = None) -> Told:
    rows = _rows(table)
    collectives = [row["collective"].partition(" ")[0] for row in rows if row["state"] == "waiting"]
    found = [_PLACE.fullmatch(row["source line"]) for row in rows if row["state"] == "waiting"]
    absent = [number for number in range(len(rows)) if number not in waiting]
    # The only rank that does not wait, or the only one that does.
    odd = next((ranks[0] for ranks in (absent, waiting) if len(ranks) == 1), ALL)
    return Told(
        f"{first}\n{_drawn(rows)}",
        odd if dead is None else dead,
        collectives[0] if collectives else "",
        tuple(sorted({int(place["line"]) for place in found if place})),
    )


def _of_error(error: RankError, file: str) -> Told:
    frames = [frame for frame in _FRAME.finditer(error.traceback_text) if frame["file"] == file]
    first_line = str(error).partition("\n")[0]
    lines = tuple(int(frame["line"]) for frame in frames[-1:])
    where = "".join(f"\n  line {frame['line']}: {frame['code'].strip()}" for frame in frames[-1:])
    if differ := _DIFFER.search(first_line):
        # Which rank sees it first is chance.
        calls = _calls(differ["places"])
        alone = [rank for rank, call in calls.items() if list(calls.values()).count(call) == 1]
        odd = alone[0] if len(alone) == 1 else ALL
        verb = next(call for rank, call in calls.items() if rank != odd).partition(" ")[0]
        places = "".join(f"\n  rank {rank} in {call}" for rank, call in calls.items())
        return Told(f"{differ['what']}:{places}{where}", odd, verb, lines)
    return Told(first_line + where, error.rank, "", lines)


def _calls(places: str) -> dict[int, str]:
    """By rank, of ``rank 0 in all_reduce 'loss' of 4 float32, rank 1 in ...``."""
    _, *parts = re.split(r"(?:^|, )rank (\d+) in ", places)
    return {int(rank): call for rank, call in zip(parts[::2], parts[1::2], strict=True)}


def _rows(table: str) -> list[dict[str, str]]:
    """The rows of a report, by column: its columns are aligned, with two spaces between."""
    header, *lines = table.splitlines()
    names = re.split(r" {2,}", header.strip())
    starts = [header.index(name) for name in names]
    return [
        {name: line[start:end].strip() for name, start, end in zip(names, starts, [*starts[1:], None], strict=True)}
        for line in lines
    ]


def _drawn(rows: Sequence[dict[str, str]]) -> str:
    """The rows again, without times and folders."""
    places = (_PLACE.fullmatch(row["source line"]) for row in rows)
    short = [f"line {place['line']}: {place['code'] or ''}"[:_WIDTH] if place else "-" for place in places]
    shown = [[row[name].partition(";")[0] for name in _SHOWN[:-1]] for row in rows]
    lines = [list(_SHOWN), *([*row, place] for row, place in zip(shown, short, strict=True))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _marked(name: str, answer: object, wanted: Sequence[object]) -> str:
    if answer in wanted:
        return f"{name} {answer} is right"
    return f"{name} {answer} is not what is told, which is {' or '.join(map(str, wanted)) or 'none'}"


def terminal(command: str) -> None:
    """Print a shell command after a dollar sign, run it, and print what it prints.

    The package's own commands are those of the notebook's Python.

    Args:
        command: one line, for example 'shardlab plan --params 7.5B --ranks 64'.

    Raises:
        subprocess.CalledProcessError: the command failed; the error's ``output`` is what it printed.
    """
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    plain = SIZE | {"PATH": own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, shell=True, env=os.environ | plain, **output)
    lines = (line.rstrip() for line in done.stdout.splitlines())
    sys.stdout.write("\n".join([f"$ {command}", *lines, ""]))
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
