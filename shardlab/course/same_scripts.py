"""Small training scripts, right ones and broken ones, that ``shardlab same`` judges: six kinds, one fault in each.

They stand in ``same_scripts.toml``: a script of each kind, and stories, of which each replaces parts of them. The
single process runs the same text. The matrix of all says whether ``same`` names what is wrong, and lets right scripts
that look suspicious pass.
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
