"""The sizes of a transformer from the ``config.json`` that stands beside its weights (format of Hugging Face)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
NEEDED = ("hidden", "layers", "heads", "vocab")
GATED = ("silu", "swish", "swiglu", "geglu")  # activations that come with a third matrix
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def sizes_of(path: Path | str) -> dict[str, Any]:
    """Arguments of ``predict_step``: hidden, layers, heads, kv_heads, ffn, vocab, seq_len, gated.

    ``seq_len`` is the longest that the model was made for. Where the file has no heads of keys and values, or no width
    of the MLP, they are those of GPT: as many as heads, four times the hidden size.

    Raises:
        ValueError: the file cannot be read, lacks a size, or is of a model with experts.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config: {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config: {path} holds no object; the config.json of a transformer is needed")
    found = {**found, **found.get("text_config", {})}
    if experts := [name for name in EXPERTS if found.get(name)]:
        raise ValueError(f"config: {path} is of a model with experts ({experts[0]}), which is not forecast")
    sizes = {name: next((found[key] for key in keys if found.get(key)), None) for name, keys in NAMES.items()}
    if missing := [name for name in NEEDED if sizes[name] is None]:
        known = "; ".join(f"{name}: {' or '.join(NAMES[name])}" for name in missing)
        raise ValueError(f"config: {path} lacks {', '.join(missing)} ({known})")
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    sizes["ffn"] = sizes["ffn"] or 4 * int(sizes["hidden"] or 0)
    activation = str(found.get("hidden_act", found.get("activation_function", ""))).lower()
    return {**{name: value for name, value in sizes.items() if value is not None}, "gated": activation in GATED}
