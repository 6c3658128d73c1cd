"""Models that nobody has written for tensor parallelism, and a few that it cannot divide."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 24, 16, 4, 2, 6, 20


def heads_of(x, head_dim=HEAD_DIM):
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attended(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """Fewer key and value heads than query heads, and a norm of each head."""

    def __init__(self):
        super().__init__()
        self.head_dim = HEAD_DIM
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN)  # registered before what it follows
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.q_norm = nn.LayerNorm(HEAD_DIM)

    def forward(self, x):
        return self.o(attended(self.q_norm(heads_of(self.q(x))), heads_of(self.k(x)), heads_of(self.v(x))))


class Fused(nn.Module):
    """Query, key and value one after another."""

    sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, sum(self.sizes))
        self.out = nn.Sequential(nn.Linear(HEADS * HEAD_DIM, HIDDEN), nn.Dropout(0.0))

    def forward(self, x):
        fused = self.qkv(x)
        share = fused.shape[-1] // (HEADS + 2 * KV_HEADS)
        return self.out(attended(*map(heads_of, fused.split([HEADS * share, KV_HEADS * share, KV_HEADS * share], -1))))


class ByHead(nn.Module):
    """Query, key and value of a head beside each other, as GPT-NeoX has them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x):
        return self.out(attended(*heads_of(self.qkv(x), 3 * HEAD_DIM).chunk(3, -1)))


class FixedHeads(nn.Module):
    """Reshapes by a number of heads that it knows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HEADS * HEAD_DIM) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(attended(q, k, v))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class FusedGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


def plain():
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))


class Mixing(nn.Module):
    """Every feature depends on all others between the two layers, though all shapes fit."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


class Stranger(nn.Module):
    """A transformer of two blocks of the given parts; the head is tied to the embedding or not."""

    def __init__(self, attention=Separate, mlp=Gated, tied=False, dtype=torch.float64):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(8, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"n": nn.LayerNorm(HIDDEN), "a": attention(), "m": mlp()}) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = x + block["a"](block["n"](x))
            x = x + block["m"](x)
        return self.head(x)


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (4, 9), generator=generator) for _ in range(3)]


def next_word(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
