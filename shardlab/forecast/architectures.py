"""Decoders whose parameters can be counted: how the layers of a ``model_type`` are built, from a table of those known.

    layer   h (q + 2 kv) + q h, m h f, n norms of h, norms of queries and keys, biases
    root    embedding, head unless it is tied, table of positions, norms

Legend: h hidden, q heads x head_dim, kv heads of keys and values x head_dim, f inner width of the MLP, m its matrices
(3 gated, 2 not). Source: ``data/architectures.toml``, whose head says what the fields mean.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardlab.installed import data_path

# Sizes by the argument of ``predict_step`` that they are, and their names in a file like Llama's.
KEYS: Mapping[str, Sequence[str]] = {
    "hidden": ("hidden_size",), "layers": ("num_hidden_layers",), "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",), "head_dim": ("head_dim",), "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",), "positions": ("max_position_embeddings",),
}  # fmt: skip
Holds = Callable[[bool | str], bool]


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    causal_lm: str
    defaults: Mapping[str, int]
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gated: bool = True
    norms: int = 2
    one_norm_if: bool | str = False
    root_norms: int = 1
    final_norm_if: bool | str = True
    norm_vectors: int = 1
    qk_norm: str = ""
    qk_norm_if: bool | str = True
    one_kv_head_if: bool | str = False
    bias: Mapping[str, bool | str] = field(default_factory=dict)
    tied: bool = False
    position_table: bool = False
    spare_positions: int = 0
    embedding_width: str = ""
    extra: int = 0
    window: Mapping[str, Any] | None = None
    only: Mapping[str, Any] = field(default_factory=dict)

    def keys_of(self, size: str) -> Sequence[str]:
        """Names of a size in the file."""
        return self.keys.get(size, KEYS[size])

    def layer_numel(self, sizes: Mapping[str, int], holds: Holds) -> int:
        """Parameters of a layer; ``holds`` says of a bias or condition whether the file has it."""
        hidden, ffn, dim, heads, kv = (sizes[name] for name in ("hidden", "ffn", "head_dim", "heads", "kv_heads"))
        bias = {product: holds(self.bias.get(product, False)) for product in ("qkv", "out", "mlp")}
        up = (2 if self.gated else 1) * ffn
        attention = dim * (heads + 2 * kv) * (hidden + bias["qkv"]) + hidden * (dim * heads + bias["out"])
        mlp = up * (hidden + bias["mlp"]) + hidden * (ffn + bias["mlp"])
        norms = (1 if holds(self.one_norm_if) else self.norms) * self.norm_vectors * hidden
        of_qk = {"": 0, "head": 2 * self.norm_vectors * dim, "heads": (heads + kv) * dim}[self.qk_norm]
        return attention + mlp + norms + self.extra + of_qk * holds(self.qk_norm_if)

    def root_numel(self, sizes: Mapping[str, int], width: int, tied: bool, holds: Holds) -> int:
        """Parameters of everything else, with embeddings of this width."""
        hidden, vocab = sizes["hidden"], sizes["vocab"]
        table = hidden * (sizes["positions"] + self.spare_positions) if self.position_table else 0
        head = vocab * holds(self.bias.get("head", False)) + (0 if tied else vocab * width)
        projected = 2 * hidden * width if width != hidden else 0
        norms = (self.root_norms - (not holds(self.final_norm_if))) * self.norm_vectors * hidden
        return vocab * width + head + table + projected + norms


@cache
def architectures() -> dict[str, Architecture]:
    """The rows by ``model_type``."""
    rows: dict[str, dict[str, Any]] = tomllib.loads(data_path("architectures.toml").read_text())

    def whole(row: dict[str, Any]) -> dict[str, Any]:
        like = row.pop("like", None)
        return {**(whole(dict(rows[like])) if like else {}), **row}

    return {name: Architecture(**whole(dict(row))) for name, row in rows.items()}
