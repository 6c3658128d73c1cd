"""Plain torch modules to train: they know nothing of parallelism."""

from shardlab.models.gpt import GPT, Block, GPTConfig, next_token, next_token_loss
from shardlab.models.mlp import MLP, ByteMLP, ByteMLPConfig
from shardlab.models.presets import MODELS, build_model

__all__ = [
    "GPT", "MLP", "MODELS", "Block", "ByteMLP", "ByteMLPConfig", "GPTConfig", "build_model", "next_token",
    "next_token_loss",
]  # fmt: skip
