"""Whether ``same`` names what is wrong: a matrix of broken scripts, and of right ones that look suspicious."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlab.course.same_scripts import BROKEN, RIGHT, TEMPLATES, Story
from shardlab.same.answer import DIFFERENT, SAME
from shardlab.same.process import Job
from shardlab.same.ranks import judged

LIMIT_S = 120.0


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
    every = {**BROKEN, **RIGHT}
    return [
        (name, story, kind)
        for name, story in every.items()
        for kind in kinds or TEMPLATES
        if (not stories or name in stories) and ranks in story.ranks and story.script(kind)
    ]


def same_matrix(ranks: int = 2, stories: Sequence[str] = (), kinds: Sequence[str] = ()) -> Iterator[SameRow]:
    """Each story in each kind of script that it fits, or these; a row when its cell is done.

    Raises:
        ValueError: fewer than two ranks.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "train.py"
        for name, story, kind in cells(ranks, stories, kinds):
            path.write_text(story.script(kind))
            said = judged(Job(path, ranks=ranks), LIMIT_S)
            is_broken = name in BROKEN
            is_right = story.said in str(said) and said.word != SAME if is_broken else said.word == story.said
            yield SameRow(name, kind, ranks, is_broken, str(said), said.word, is_right)


def verdict(rows: Sequence[SameRow]) -> str:
    """How often the cause was named, and what was called what it is not."""
    broken, right = [row for row in rows if row.is_broken], [row for row in rows if not row.is_broken]
    named = sum(row.is_right for row in broken)
    said = f"the cause is named in {named} of {len(broken)} broken scripts"
    said += f"; {sum(row.word == SAME for row in broken)} of them are called the same"
    return f"{said}; {sum(row.word == DIFFERENT for row in right)} of {len(right)} right ones are called different"
