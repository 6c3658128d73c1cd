"""A multilayer perceptron: a model so small that every strategy can be followed by hand.

Legend of shape suffixes: b batch, s sequence, f features, v vocabulary; ``...`` stands for any leading dims.
"""

from dataclasses import dataclass

import torch
from torch import nn


class MLP(nn.Module):
    """``num_layers`` linear layers with GELU between them, named ``layers.0``, ``layers.1``, ...

    Args:
        in_features: size of the last dim of the input.
        hidden: size of every inner activation.
        num_layers: linear layers, 1 or more.
        out_features: size of the last dim of the output.

    Raises:
        ValueError: a size is below 1; the message names it.
    """

    def __init__(self, in_features: int, hidden: int, num_layers: int, out_features: int) -> None:
        require_positive(in_features=in_features, hidden=hidden, num_layers=num_layers, out_features=out_features)
        super().__init__()
        sizes = [in_features, *[hidden] * (num_layers - 1), out_features]
        self.layers = nn.ModuleList(nn.Linear(sizes[index], sizes[index + 1]) for index in range(num_layers))

    def forward(self, x_f: torch.Tensor) -> torch.Tensor:
        """Output of shape (..., out_features) for an input of shape (..., in_features)."""
        for index, layer in enumerate(self.layers):
            x_f = layer(nn.functional.gelu(x_f) if index else x_f)
        return x_f


@dataclass(frozen=True)
class ByteMLPConfig:
    """Sizes of a :class:`ByteMLP`; ``seq_len`` has no effect, and makes all models be built alike."""

    vocab_size: int = 256
    seq_len: int = 128
    num_layers: int = 4
    hidden: int = 512

    def __post_init__(self) -> None:
        """All sizes must be 1 or more."""
        require_positive(**vars(self))


class ByteMLP(nn.Module):
    """The next byte from the current byte alone: embedding, MLP, logits, each position on its own.

    It learns only which byte follows which, from the same data as the GPT.
    """

    def __init__(self, config: ByteMLPConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.mlp = MLP(config.hidden, config.hidden, config.num_layers, config.vocab_size)

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """Logits of shape (B, S, V) for int64 tokens of shape (B, S)."""
        logits_bsv: torch.Tensor = self.mlp(self.token_embedding(tokens_bs))
        return logits_bsv


def require_positive(**sizes: int) -> None:
    """Raise ValueError, naming the first field, unless every size is 1 or more."""
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{field}: {size} is below 1")
