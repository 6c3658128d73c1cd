"""Small training scripts, right ones and broken ones, that ``shardlab same`` judges: six kinds, one fault in each.

They stand in ``same_scripts.toml``: a script of each kind, and stories, of which each replaces parts of them. The
single process runs the same text.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
