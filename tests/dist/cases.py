"""Models of the nasty kinds, and the reference: the same training in one process on the concatenated batch.

Legend: B rows of the global batch, R ranks. Everything is float64, so a lost tail or bias cannot hide in tolerance.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardlab.models import GPT, GPTConfig
from shardlab.testing.nasty_models import MLP, MODELS  # noqa: F401

ROWS_PER_RANK = 2


class WideGPT(GPT):
    """Twelve heads, which 2, 3 and 4 tensor ranks divide."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocab_size=11, seq_len=6, num_layers=2, num_heads=12, hidden=24))


OTHER_MODELS = {"WideGPT": WideGPT}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda tensors: torch.optim.AdamW(tensors, lr=1e-2, weight_decay=0.1),
    # Adam forgives a gradient that is off by a factor; these two do not.
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=1e-2, momentum=0.9),
    "adam_large_eps": lambda tensors: torch.optim.Adam(tensors, lr=1e-2, eps=0.1),
}


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What it makes; the random numbers of the caller are left as they are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def build(kind: str, seed: int = 0) -> nn.Module:
    return seeded((MODELS | OTHER_MODELS)[kind], seed).double()


def rows(kind: str, step: int, micro_batch: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The global batch, [R * ROWS_PER_RANK, ...]; the first feature's sign differs by row, so also by rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    num_rows = num_ranks * ROWS_PER_RANK
    if kind.endswith("GPT"):
        tokens = torch.randint(0, 11, (num_rows, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(num_rows, 7, generator=generator, dtype=torch.float64)
    # Only the last rank's rows choose 'sometimes', and only in odd steps: used by some ranks, by none, in turns.
    x[:, 0] = -x[:, 0].abs()
    if step % 2:
        x[-1, 0] = 1.0
    return x, torch.randn(num_rows, 5, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.dtype == torch.int64:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return nn.functional.mse_loss(output, target)


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def reference(
    kind: str,
    optimizer: str,
    num_ranks: int,
    steps: int = 5,
    micro_batches: int = 1,
    clip: float | None = None,
    norm_type: float = 2.0,
) -> Result:
    """Plain torch on the concatenated batch."""
    model = build(kind)
    optim = OPTIMIZERS[optimizer](list(model.parameters()))
    result = Result()
    for step in range(steps):
        total = 0.0
        for micro_batch in range(micro_batches):
            x, y = rows(kind, step, micro_batch, num_ranks)
            loss = loss_of(model(x), y) / micro_batches
            loss.backward()
            total += float(loss.detach())
        result.losses.append(total)
        if clip is not None:
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type)))
        optim.step()
        optim.zero_grad()
    result.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


def own_rows(x: Tensor, rank: int) -> Tensor:
    return x[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK]
