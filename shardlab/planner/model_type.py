"""The architecture that a ``config.json`` is of: a row of ``architectures``, or a refusal that names what it is of."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from shardlab.planner.architectures import KEYS, architectures

OTHER_PARTS = re.compile(r"expert|text_config|(^|_)(moe|vision|audio|mamba|ssm)(_|$)")  # in a key's name
# A file without model_type is of one of these if it has nothing but their sizes and such an activation.
BY_HAND = {
    "llama": ("hidden_act", ("silu", "swish")), "gpt2": ("activation_function", ("gelu_new", "gelu", "relu")),
}  # fmt: skip
MODULE = "plan its module instead: shardlab plan --workload FILE.py:NAME"


def model_type_of(found: Mapping[str, Any]) -> str:
    """The row that a file is of.

    Args:
        found: what it holds.

    Raises:
        ValueError: there is none, or it is of a class without a language model's head, or of a model with other parts;
            the message goes on from the file's name.
    """
    table, classes = architectures(), found.get("architectures")
    named = [str(name) for name in classes] if isinstance(classes, list) else []
    kind = str(found.get("model_type") or "") or next(_guesses(found, named), "")
    if not (kind or named):
        raise ValueError('lacks model_type, such as "llama", and nobody can know how its layers are built')
    other = next(_other_parts(found), "")
    has = f" with {other}" if other else ""
    if kind not in table:
        text = found.get("text_config")
        inner = str(text.get("model_type")) if isinstance(text, Mapping) else ""
        alone = f", or its text_config, of {inner}, in a file of its own" if inner in table else ""
        raise ValueError(
            f"is of {' '.join([kind, *named]).strip()}{has}, whose parameters are not counted (those of "
            f"{', '.join(table)} are); {MODULE}{alone}"
        )
    if other:
        raise ValueError(f"is of {kind}{has}, which is not counted; {MODULE}")
    for name in named:
        # Names of another form than a class has say nothing.
        if name.lower() != table[kind].causal_lm.lower() and re.search("For|Model", name):
            raise ValueError(
                f"is of {name}, and of {kind} the parameters of {table[kind].causal_lm} are counted; write that into "
                f"architectures if it is meant, or {MODULE}"
            )
    return kind


def _guesses(found: Mapping[str, Any], named: list[str]) -> Iterator[str]:
    """Rows that a file without model_type is of: of the classes that it names, or plainly by its keys."""
    yield from (kind for kind, row in architectures().items() if row.causal_lm.lower() in map(str.lower, named))
    for kind, (activation, allowed) in BY_HAND.items():
        names = {size: set(architectures()[kind].keys_of(size)) for size in KEYS}
        has_all = all(names[size] & set(found) for size in ("hidden", "layers", "heads", "vocab"))
        if has_all and set(found) <= {activation, *chain(*names.values())} and found.get(activation) in allowed:
            yield kind


def _other_parts(found: Any, above: str = "") -> Iterator[str]:
    """Keys that speak of what no decoder of the table has, at any depth, and are not null, false, 0 or empty."""
    if isinstance(found, list):
        found = dict(enumerate(found))
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if value and OTHER_PARTS.search(str(key)):
            yield f"{above}{key}"
        yield from _other_parts(value, f"{above}{key}.")
