"""The plan that a transformers model brings along, in our styles. Nothing of transformers is imported.

Such a model says in ``_tp_plan``, or its config in ``base_model_tp_plan``, which layers may be divided and how, by name
pattern: ``{"model.layers.*.self_attn.q_proj": "colwise"}``.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardlab.tensor_parallel.styles import Column, OnSequence, Row, Style, Vocabulary

STYLES: Mapping[str, Style] = {
    "colwise": Column(),
    "colwise_gather_output": Column(gather_output=True),
    "colwise_rep": Column(gather_output=True),
    "rowwise": Row(),
    "rowwise_split_input": Row(input_is_parallel=False),
    "rowwise_rep": Row(input_is_parallel=False),
    "embedding_rowwise": Vocabulary(),
    "replicated_with_grad_allreduce": OnSequence(),
}
_WHOLE = ("replicate",)


def own_plan(module: nn.Module) -> dict[str, str] | None:
    """Patterns and transformers' words for them; None if the module brings no plan."""
    plan = getattr(module, "_tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return dict(plan)
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not isinstance(base, Mapping) or not base:
        return None
    prefix = getattr(module, "base_model_prefix", "")
    prefix = f"{prefix}." if isinstance(prefix, str) and prefix and hasattr(module, prefix) else ""
    return {f"{prefix}{pattern}": word for pattern, word in base.items()}


def translated(word: Any, module: nn.Module) -> Style | None:
    """Our style for a word; None for a module that stays whole.

    Raises:
        ValueError: there is no such style here.
    """
    if word in _WHOLE:
        return None
    if word == "rowwise" and isinstance(module, nn.Embedding):
        return Vocabulary()
    if word == "packed_colwise" and isinstance(module, nn.Linear):
        return Column(parts=(module.out_features // 2, module.out_features - module.out_features // 2))
    if word not in STYLES:
        raise ValueError(f"its own plan says {word!r}, for which there is no style here")
    return STYLES[word]
