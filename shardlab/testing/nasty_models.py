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
        return torch.as_tensor(self.last(torch.tanh(self.first(x)) * self.scale))


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
        return torch.as_tensor(self.head(self.decoder(torch.tanh(self.encoder(x)))))


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
        return torch.as_tensor(self.last(torch.tanh(self.first(x) + self.shift)))


class Weights(nn.Linear):
    """What a module around it computes with: it is never called, and so no unit, which some ranks would skip."""

    forward = nn.Module.forward


class Unused(nn.Module):
    """``spare`` is used by no rank; ``sometimes`` only by rows whose first feature says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.spare = nn.Linear(9, 9)
        self.sometimes = Weights(9, 5)
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.last(hidden)
        chosen = x[:, 0] > 0
        if bool(chosen.any()):
            other = nn.functional.linear(hidden, self.sometimes.weight, self.sometimes.bias)
            out = out + torch.where(chosen[:, None], other, torch.zeros_like(out))
        return out


class Transposed(nn.Module):
    """A layer whose weight's memory is transposed, and its bias' gradient an expanded view."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).t())
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """From [B, inputs] to [B, outputs]."""
        return x @ self.weight + self.bias


class NonContiguous(nn.Sequential):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__(Transposed(7, 6), Transposed(6, 5))


class MLP(nn.Sequential):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


class Skips(nn.Sequential):
    """Layers in a row, of which no rank calls the second, and the third only rows whose first feature says so."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        first, _, sometimes, last = self
        hidden, chosen = torch.tanh(first(x)), x[:, :1] > 0
        if bool(chosen.any()):
            hidden = torch.where(chosen, torch.tanh(sometimes(hidden)), hidden)
        return torch.as_tensor(last(hidden))


class SmallGPT(GPT):
    """The package's own model, tiny."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocab_size=11, seq_len=6, num_layers=2, num_heads=2, hidden=8))


class Affine(nn.Module):
    """Two elements, of which one is 0-d."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))
        self.b = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return x * self.a + self.b


class FewElements(nn.Module):
    """Layers with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Affine(), Affine()])

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 7] to [B, 5]."""
        for layer in self.layers:
            x = layer(x)
        return x[:, :5]


MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (MLP, SmallGPT, Uneven, Tied, Frozen, Unused, NonContiguous, FewElements)
}
"""By name."""
WITH_SKIPS = MODELS | {"Skips": Skips}
"""Also one of which ranks call other parts: strategies that gather by what forward calls, as FSDP, refuse it."""
