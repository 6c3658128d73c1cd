"""The small GPT as the exercises know a model: a row of layers, or the three of ``data_parallel.hooks``."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.models import GPT


class Embeddings(nn.Module):
    """The first layer of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token_embedding, model.position_embedding

    @override
    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Of shape (B, S, H) for tokens of shape (B, S)."""
        embedded: Tensor = self.token(tokens_bs) + self.position(torch.arange(tokens_bs.shape[1]))
        return embedded


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model as a row of layers, each of which takes what the one before it returns."""
    assert isinstance(model, GPT)
    return [Embeddings(model), *model.blocks, nn.Sequential(model.final_norm, model.head)]


class InThreeLayers(nn.Module):
    """The same parameters under the names that the exercise gives its layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trunk, *blocks, self.right = layers_of(model)
        self.left = nn.Sequential(*blocks)

    @override
    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Logits of shape (B, S, V)."""
        logits: Tensor = self.right(self.left(self.trunk(tokens_bs)))
        return logits
