"""Plain torch modules to train, which know nothing of parallelism; by name, of about 1 M to 120 M parameters.

Heads are a multiple of 4, so that two or four tensor-parallel ranks divide every GPT here.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from shardlab.models.gpt import GPT, Block, GPTConfig, next_token, next_token_loss
from shardlab.models.mlp import MLP, ByteMLP, ByteMLPConfig

__all__ = [
    "GPT", "MLP", "MODELS", "Block", "ByteMLP", "ByteMLPConfig", "GPTConfig", "build_model", "next_token",
    "next_token_loss",
]  # fmt: skip

MODELS: Mapping[str, GPTConfig | ByteMLPConfig] = MappingProxyType({
    "mlp": ByteMLPConfig(num_layers=4, hidden=512),
    "gpt-1m": GPTConfig(num_layers=5, num_heads=4, hidden=128),
    "gpt-3m": GPTConfig(num_layers=4, num_heads=8, hidden=256),
    "gpt-10m": GPTConfig(num_layers=6, num_heads=8, hidden=384),
    "gpt-30m": GPTConfig(num_layers=10, num_heads=8, hidden=512),
    "gpt-60m": GPTConfig(num_layers=12, num_heads=8, hidden=640),
    "gpt-120m": GPTConfig(num_layers=12, num_heads=16, hidden=896),
})  # fmt: skip


def build_model(name: str, seq_len: int = 128, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model of :data:`MODELS`, with weights that depend only on ``seed``.

    Weights are drawn in float32 and then cast, so a seed gives the same model in every dtype. The global
    random state stays as it was. Under ``with torch.device("meta")`` the model is built without storage.

    Args:
        name: a key of :data:`MODELS`.
        seq_len: longest sequence the model takes, in bytes.
        dtype: type of all parameters.
        seed: seed of the weights.

    Returns:
        A module from int64 tokens (B, S) to logits (B, S, 256).

    Raises:
        ValueError: the model is unknown, ``seq_len`` is below 1, or ``dtype`` is not floating point.
    """
    if name not in MODELS:
        raise ValueError(f"model: {name!r} is not one of {', '.join(MODELS)}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: {dtype} is not a floating-point type")
    config = replace(MODELS[name], seq_len=seq_len)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that seeds CUDA too, which fork_rng(devices=[]) does not restore.
        torch.default_generator.manual_seed(seed)
        model = GPT(config) if isinstance(config, GPTConfig) else ByteMLP(config)
    return model.to(dtype)
