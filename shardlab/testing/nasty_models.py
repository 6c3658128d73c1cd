"""Models of the nasty kinds, on which a strategy must still equal one process.

Everything is float64, so a lost tail or bias cannot hide in tolerance.
"""

import torch
from torch import Tensor, nn

from shardlab.models import GPT, GPTConfig


class Uneven(nn.Module):
    """Sizes no number of ranks divides, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        output: Tensor = self.last(torch.tanh(self.first(x)) * self.scale)
        return output


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(7, 7)
        self.decoder = nn.Linear(7, 7)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        output: Tensor = self.head(self.decoder(torch.tanh(self.encoder(x))))
        return output


class Frozen(nn.Module):
    """A layer that does not train, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.first.weight.requires_grad_(False)
        self.last = nn.Linear(9, 5)
        self.register_buffer("shift", torch.arange(9.0))

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        output: Tensor = self.last(torch.tanh(self.first(x) + self.shift))
        return output


class Unused(nn.Module):
    """``spare`` is used by no rank; ``sometimes`` only by rows whose first feature says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.spare = nn.Linear(9, 9)
        self.sometimes = nn.Linear(9, 5)
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.last(hidden)
        chosen = x[:, 0] > 0
        if bool(chosen.any()):
            out = out + torch.where(chosen[:, None], self.sometimes(hidden), torch.zeros_like(out))
        return out


class NonContiguous(nn.Module):
    """A parameter whose memory is transposed, and a gradient that is an expanded view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7).t())
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        output: Tensor = x @ self.weight + self.bias
        return output


class MLP(nn.Sequential):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


class SmallGPT(GPT):
    """The package's own model, tiny."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocab_size=11, seq_len=6, num_layers=2, num_heads=2, hidden=8))


class FewElements(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))
        self.b = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        return (x * self.a + self.b)[:, :5]


MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (MLP, SmallGPT, Uneven, Tied, Frozen, Unused, NonContiguous, FewElements)
}
"""By name."""
