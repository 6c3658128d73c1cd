"""``wrap`` as it is typed in a terminal, and as a record says it."""

import re

from shardlab.units.policy import WORDS, WrapPolicy


def parse_wrap(text: str) -> str | int | tuple[str, ...]:
    """What is typed in a terminal: a word, a number of parameters, or patterns: 'encoder.*,decoder.*'.

    Raises:
        ValueError: it is none of these.
    """
    if text in WORDS:
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    patterns = tuple(pattern.strip() for pattern in text.split(","))
    if all(re.fullmatch(r"[A-Za-z_*?\[][^\s.]*(\.[^\s.]+)*", pattern) for pattern in patterns):
        return patterns
    raise ValueError(
        f"wrap: {text!r} is not one of {', '.join(WORDS)}, a number of parameters above 0, or patterns of names, such "
        "as 'encoder.*,decoder.*'"
    )


def wrap_text(wrap: WrapPolicy) -> str:
    """What a record says of it: as it is typed in a terminal, and of classes and functions the name."""
    if isinstance(wrap, tuple | list):
        return ",".join(map(wrap_text, wrap))
    return str(wrap) if isinstance(wrap, str | int) else getattr(wrap, "__qualname__", type(wrap).__qualname__)
