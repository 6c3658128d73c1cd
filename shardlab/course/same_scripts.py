"""Small training scripts, right ones and broken ones, that ``shardlab same`` judges: six kinds, one fault in each.

They stand in ``same_scripts.toml``: a script of each kind, and stories, of which each replaces parts of them. The
single process runs the same text. The matrix of all says whether ``same`` names what is wrong, and lets right scripts
that look suspicious pass.

Eight of the stories are programs for a reader, who finds the line, mends it, and has ``same`` mark that on two ranks:
none of them raises an error, and the loss of each falls.
"""

import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.same.answer import DIFFERENT, SAME, Answer
from shardlab.same.process import Job
from shardlab.same.ranks import judged

_KNOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TEMPLATES: Mapping[str, str] = _KNOWN["scripts"]


@dataclass(frozen=True)
class Story:
    """A change of a script.

    Attributes:
        edits: by kind of script what is replaced, and by what; '*' for all kinds.
        said: a part of the answer that names the cause; of a right one, the word that it begins with.
        ranks: where it can be made.
    """

    edits: Mapping[str, list[tuple[str, str]]]
    said: str
    ranks: tuple[int, ...]

    def script(self, kind: str) -> str:
        """Its text; empty where it cannot be made in this kind."""
        edits = self.edits.get(kind, self.edits.get("*"))
        if edits is None:
            return ""
        text = TEMPLATES[kind]
        for old, new in edits:
            assert old in text, (kind, old)
            text = text.replace(old, new)
        return text


def _story(said: str, changes: list[dict[str, Any]], ranks: tuple[int, ...] = (2, 3), **_: str) -> Story:
    return Story({kind: one["edits"] for one in changes for kind in one["kinds"]}, said, ranks)


BROKEN = {one["name"]: _story(**one) for one in _KNOWN["broken"]}
RIGHT = {one["name"]: _story(**one) for one in _KNOWN["right"]}
LIMIT_S = 120.0


def judged_text(text: str, ranks: int = 2, limit_s: float = 60.0) -> Answer:
    """What ``same`` says of a program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(text)
        return judged(Job(path, ranks=ranks), limit_s)


@dataclass(frozen=True)
class SameRow:
    """One cell of the matrix.

    Attributes:
        story: what was changed.
        kind: of script.
        is_broken: whether that is wrong.
        said: the answer.
        word: that it begins with.
        is_right: whether a broken one is named, and not called the same; or a right one called what it should be.
    """

    story: str
    kind: str
    ranks: int
    is_broken: bool
    said: str
    word: str
    is_right: bool


def cells(ranks: int, stories: Sequence[str] = (), kinds: Sequence[str] = ()) -> list[tuple[str, Story, str]]:
    """Story and kind of every cell, or of these."""
    return [
        (name, story, kind)
        for name, story in {**BROKEN, **RIGHT}.items()
        for kind in kinds or TEMPLATES
        if (not stories or name in stories) and ranks in story.ranks and story.script(kind)
    ]


def same_matrix(ranks: int = 2, stories: Sequence[str] = (), kinds: Sequence[str] = ()) -> Iterator[SameRow]:
    """Each story in each kind of script that it fits, or these; a row when its cell is done.

    Raises:
        ValueError: fewer than two ranks.
    """
    for name, story, kind in cells(ranks, stories, kinds):
        said, is_broken = judged_text(story.script(kind), ranks, LIMIT_S), name in BROKEN
        is_right = story.said in str(said) and said.word != SAME if is_broken else said.word == story.said
        yield SameRow(name, kind, ranks, is_broken, str(said), said.word, is_right)


def verdict(rows: Sequence[SameRow]) -> str:
    """How often the cause was named, and what was called what it is not."""
    broken, right = [row for row in rows if row.is_broken], [row for row in rows if not row.is_broken]
    named = sum(row.is_right for row in broken)
    said = f"the cause is named in {named} of {len(broken)} broken scripts"
    said += f"; {sum(row.word == SAME for row in broken)} of them are called the same"
    return f"{said}; {sum(row.word == DIFFERENT for row in right)} of {len(right)} right ones are called different"


PROGRAMS = (
    ("not divided by ranks", "by hand", "dist.all_reduce"),
    ("the module inside is called", "DDP", "model.module(x)"),
    ("a mean of means", "FSDP2", "F.cross_entropy"),
    ("cleared in each micro-batch", "DDP", "            optimizer.zero_grad()"),
    ("the norm of own pieces", "FSDP2", "norm = sum"),
    ("a tied weight reduced twice", "by hand", "remove_duplicate"),
    ("clipped before reduced", "by hand", "clip_grad_norm_"),
    ("stepped weights are overwritten", "by hand", "dist.broadcast"),
)
"""Story, kind of script, and a part of the line at fault."""


def broken_program(number: int) -> str:
    """The text of one of the eight, 1 to 8.

    Raises:
        ValueError: there is none of that number.
    """
    story, kind, _ = _found(number)
    return BROKEN[story].script(kind)


def numbered(number: int) -> str:
    """The same with the numbers of its lines."""
    lines = broken_program(number).splitlines()
    return "\n".join(f"{at:3}  {line}" for at, line in enumerate(lines, 1))


def is_at_fault(number: int, line: int) -> bool:
    """Whether the line, or one beside it, is what makes the program wrong."""
    lines = broken_program(number).splitlines()
    return any(_found(number)[2] in text for text in lines[max(0, line - 2) : line + 1])


def mended(number: int, lines: Mapping[int, str]) -> Answer:
    """What ``same`` says on two ranks of the program with other lines.

    Args:
        number: of the program.
        lines: what stands in the place of a line, by its number, with its indentation; several lines, or none if empty.

    Raises:
        ValueError: there is no such program, or no such line.
    """
    text = dict(enumerate(broken_program(number).splitlines(), 1))
    if unknown := sorted(set(lines) - set(text)):
        raise ValueError(f"lines: {unknown[0]} is given; program {number} has lines 1 to {len(text)}")
    return judged_text("\n".join((text | dict(lines)).values()) + "\n")


def _found(number: int) -> tuple[str, str, str]:
    if not 1 <= number <= len(PROGRAMS):
        raise ValueError(f"number: {number} is given; there are programs 1 to {len(PROGRAMS)}")
    return PROGRAMS[number - 1]
