"""GPUs by name: ``data/cards.csv``, a line each, with the source of its numbers.

All have their memory and the link to the other cards of a host, in one direction: NVLink where the card has it, else
PCIe. Those that steps can be forecast for also have the maker's peaks, and what of them a training step reaches.
"""

import csv
import re
from functools import cache

from shardlab.installed import data_path

POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
MEMORY = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgtKMGT])(i?)B")  # a small b would be bits


@cache
def cards() -> dict[str, dict[str, str]]:
    """The lines by name; what is not known is left out."""
    with data_path("cards.csv").open(newline="") as file:
        rows = [{column: text for column, text in row.items() if text} for row in csv.DictReader(file)]
    return {row["name"]: row for row in rows}


def card_named(name: str) -> dict[str, str] | None:
    """A card; case does not matter, nor whether its parts are joined by ``-``, ``_`` or a space."""
    plain = re.sub(r"[\s_-]+", "-", name.strip().lower())
    return next((row for row in cards().values() if plain in (row["name"], *row.get("other_names", "").split())), None)


def memory_bytes(text: str) -> float:
    """Bytes of a text such as '24GB' (powers of ten) or '24GiB' (powers of 1024).

    Raises:
        ValueError: the text is no positive number with a unit.
    """
    found = MEMORY.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"memory: {text!r} is not understood; write a number and kB, MB, GB or TB, or KiB, MiB, GiB or TiB, such "
            "as 24GB"
        )
    return float(found[1]) * float((1024 if found[3] else 1000) ** POWERS[found[2].lower()])
