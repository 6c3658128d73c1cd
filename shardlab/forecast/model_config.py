"""The sizes and the number of parameters of a decoder, from the ``config.json`` beside its weights (Hugging Face).

What the file leaves out is what its class in transformers takes. A decoder that is not in the table of
``architectures``, and whatever changes what is counted, is refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardlab.forecast.architectures import KEYS, Architecture, architectures

OTHER_PARTS = re.compile(r"expert|text_config|(^|_)(moe|vision|audio|mamba|ssm)(_|$)")  # in a key's name
MODULE = "plan its module instead: shardlab plan --workload FILE.py:NAME"
MAY_BE_NULL = ("kv_heads", "head_dim")  # and where the class does without: the MLP's width, positions
ONLY = {"is_encoder_decoder": False, "add_cross_attention": False, "use_bidirectional_attention": False}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Decoder:
    """A decoder that was counted.

    Attributes:
        name: its ``model_type``.
        sizes: arguments of ``predict_step``: hidden, layers, heads, kv_heads, head_dim, ffn, vocab, seq_len (the
            longest that it was made for, if that is known), gated, window, windowed_layers, layer_numel, root_numel.
        assumed: keys that the file leaves out, with what the class takes.
        learns_positions: whether no sequence can be longer than ``seq_len``.
    """

    name: str
    sizes: dict[str, Any]
    assumed: dict[str, int]
    learns_positions: bool

    @property
    def num_params(self) -> int:
        """Elements of all parameters; a matrix that embedding and head share counts once."""
        return int(self.sizes["layers"] * self.sizes["layer_numel"] + self.sizes["root_numel"])


def decoder_of(path: Path | str) -> Decoder:
    """The decoder of a ``config.json``.

    Raises:
        ValueError: the file cannot be read, is of another architecture, or has a value that is not counted; the message
            names the key.
    """
    found = read_config(path)
    try:
        return _Reader(found).decoder()
    except ValueError as error:
        raise ValueError(f"config: {path} {error}") from None


def read_config(path: Path | str) -> dict[str, Any]:
    """What the file holds.

    Raises:
        ValueError: it cannot be read, or holds no object.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config: {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config: {path} holds no object; the config.json of a transformer is needed")
    return found


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
    if not (kind := str(found.get("model_type") or "")):
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


def _other_parts(found: Any, above: str = "") -> Iterator[str]:
    """Keys that speak of what no decoder of the table has, at any depth, and are not null, false, 0 or empty."""
    if isinstance(found, list):
        found = dict(enumerate(found))
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if value and OTHER_PARTS.search(str(key)):
            yield f"{above}{key}"
        yield from _other_parts(value, f"{above}{key}.")


class _Reader:
    """What one file says, in the words of its architecture; a ValueError goes on from the file's name."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found
        self.name = model_type_of(found)
        self.row = architectures()[self.name]
        for key, value in {**ONLY, **self.row.only}.items():
            if (given := self.value(key)) is not None and given != value:
                raise ValueError(f"has {key} {given!r}; of {self.name} only {value!r} is counted; {MODULE}")
        if self.name == "falcon":
            self.row = self.falcon()
        self.assumed: dict[str, int] = {}

    def falcon(self) -> Architecture:
        """Its row for one of three decoders: of Falcon 7B, of 40B and later, of RW."""
        is_new = self.holds("new_decoder_architecture")
        norms = self.whole("num_ln_in_parallel_attn", 2 if is_new else 1)
        return replace(
            self.row, norms=2 if norms == 2 or not self.holds("parallel_attn=true") else 1,
            keys=self.row.keys if is_new else {**self.row.keys, "kv_heads": ()},
            one_kv_head_if=not is_new and self.holds("multi_query=true"),
        )  # fmt: skip

    def decoder(self) -> Decoder:
        """All of it."""
        row, sizes = self.row, self.sizes()
        width = self.whole(row.embedding_width) or sizes["hidden"]
        tied = self.holds(f"tie_word_embeddings={str(row.tied).lower()}")
        window, windowed_layers = self.window(sizes["layers"])
        given: dict[str, Any] = {"seq_len" if name == "positions" else name: size for name, size in sizes.items()}
        given |= {
            "gated": row.gated, "window": window, "windowed_layers": windowed_layers,
            "layer_numel": row.layer_numel(sizes, self.holds),
            "root_numel": row.root_numel(sizes, width, tied, self.holds),
        }  # fmt: skip
        return Decoder(self.name, given, self.assumed, row.position_table)

    def sizes(self) -> dict[str, int]:
        """By name; without ``positions`` where they have no limit."""
        found = {name: self.size(name) for name in KEYS}
        found["kv_heads"] = 1 if self.holds(self.row.one_kv_head_if) else found["kv_heads"] or found["heads"]
        found["ffn"] = found["ffn"] or 4 * found["hidden"]
        divided = [("heads", "kv_heads")] if found["head_dim"] else [("hidden", "heads"), ("heads", "kv_heads")]
        for whole, by in divided:
            if found[whole] % found[by]:
                raise ValueError(f"has {found[by]} {by}, which do not divide {whole}, {found[whole]}")
        found["head_dim"] = found["head_dim"] or found["hidden"] // found["heads"]
        return {name: size for name, size in found.items() if size}

    def size(self, name: str) -> int:
        """A size; 0 where neither file nor class have one."""
        default, table = self.row.defaults.get(name, 0), self.row.position_table
        given = [key for key in self.row.keys_of(name) if key in self.found]
        if size := next(filter(None, map(self.whole, given)), 0):
            return size
        if not given:
            self.assumed.update({key: default for key in self.row.keys_of(name)[:1] if default})
            return default
        if not (name in MAY_BE_NULL or (name == "ffn" and not default) or (name == "positions" and not table)):
            raise ValueError(f"has {given[0]} null; it must be a whole number from 1 on")
        return 0

    def window(self, layers: int) -> tuple[int | None, int]:
        """To how many tokens some layers attend, and how many layers; the others attend to all."""
        rule, types = self.row.window, self.found.get("layer_types") or []
        if not isinstance(types, list) or (others := [kind for kind in types if kind not in LAYER_TYPES]):
            other = others[0] if isinstance(types, list) else types
            raise ValueError(f"has layer_types with {other!r}; {' and '.join(LAYER_TYPES)} are counted; {MODULE}")
        if rule is None or not self.holds(rule.get("if", True)):
            return None, 0
        key = rule.get("key", "sliding_window")
        window = self.whole(key) if key in self.found else rule.get("default")
        if not window:
            return None, 0
        if types:
            return window, sum(kind == LAYER_TYPES[1] for kind in types)
        if "from_layer" in rule:
            return window, max(0, layers - self.whole("max_window_layers", rule["from_layer"]))
        key = rule.get("pattern", "")
        pattern = self.found.get(key)
        every = len(pattern) if isinstance(pattern, str) else self.whole(key, rule.get("full_every", 0))
        return window, layers - (layers // every if every else 0)

    def value(self, key: str) -> Any:
        """What the file has for a key, whose parts are separated by dots; None if it does not have it."""
        found: Any = self.found
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def whole(self, key: str, default: int = 0) -> int:
        """A whole number of the file; the default where it is null or not there."""
        value = self.found.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"has {key} {value!r}; it must be a whole number from 1 on")
        return value

    def holds(self, condition: bool | str) -> bool:
        """Whether a bias or a condition of the table holds."""
        if isinstance(condition, bool):
            return condition
        key, _, default = condition.partition("=")
        value = self.found.get(key, default == "true")
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"has {key} {value!r}; it must be true or false")
        return bool(value)
