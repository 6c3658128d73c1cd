"""As torch's tutorial 'Getting Started with Fully Sharded Data Parallel (FSDP2)' has it, with a transformer."""
# ruff: noqa: T201

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (w(x).view(batch, length, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        output = F.scaled_dot_product_attention(q, k, v)
        return self.wo(output.transpose(1, 2).reshape(batch, length, dim))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, vocab=64, dim=32, n_heads=2, n_layers=3, max_len=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randint(0, 64, (4, 16))
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item().hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
