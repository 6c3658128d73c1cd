"""A GPT and its loss: pre-norm transformer blocks on bytes, as a plain module without any parallelism.

The projections of query, key and value are separate, and the number of heads follows from their width. So a column
slice of them is a module with fewer heads, and nothing else has to change for tensor parallelism.

Legend of shape suffixes: b batch, s sequence, h hidden, m hidden of the MLP (4 h), a heads, g key-value heads, d head
dim, v vocabulary. Parameters per block: 12 h^2 + 13 h with as many key-value heads as heads.
Source: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2); grouped-query attention:
Ainslie et al., arXiv 2305.13245.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardlab.models.mlp import require_positive


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a :class:`GPT`.

    ``num_kv_heads`` below ``num_heads`` means grouped-query attention, ``None`` as many as heads. ``tied`` makes the
    head and the token embedding one parameter. ``dropout`` is a probability.
    """

    vocab_size: int = 256
    seq_len: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden: int = 128
    num_kv_heads: int | None = None
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        """Check that sizes are positive and that heads divide what they must."""
        sizes = {"vocab_size": self.vocab_size, "seq_len": self.seq_len, "num_layers": self.num_layers}
        require_positive(**sizes, num_heads=self.num_heads, hidden=self.hidden, num_kv_heads=self.kv_heads)
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden: {self.hidden} is not a multiple of num_heads={self.num_heads}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads: {self.kv_heads} does not divide num_heads={self.num_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout} is not at least 0 and below 1")

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, ``None`` resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.num_heads


class Attention(nn.Module):
    """Causal self-attention; the block normalises the input and adds the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.num_heads
        self.q_proj = nn.Linear(config.hidden, config.hidden)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim)
        self.out_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """Attention output of shape (B, S, H) for an input of shape (B, S, H)."""
        q_basd = self._heads(self.q_proj(x_bsh))
        k_bgsd, v_bgsd = self._heads(self.k_proj(x_bsh)), self._heads(self.v_proj(x_bsh))
        out_basd = functional.scaled_dot_product_attention(
            q_basd, k_bgsd, v_bgsd, is_causal=True, enable_gqa=self.grouped
        )
        out_bsh: torch.Tensor = self.out_proj(out_basd.transpose(1, 2).flatten(2))
        return out_bsh

    def _heads(self, x_bsh: torch.Tensor) -> torch.Tensor:
        # The number of heads follows from the width of the projection: a slice has fewer.
        return x_bsh.reshape(*x_bsh.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """The block's MLP: hidden to 4 hidden, GELU, and back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, 4 * config.hidden)
        self.fc2 = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """Output of shape (B, S, H) for an input of shape (B, S, H)."""
        out_bsh: torch.Tensor = self.fc2(functional.gelu(self.fc1(x_bsh)))
        return out_bsh


class Block(nn.Module):
    """Norm, attention, residual; norm, MLP, residual. The usual unit of sharding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """Output of shape (B, S, H) for an input of shape (B, S, H)."""
        x_bsh = x_bsh + self.dropout(self.attention(self.attention_norm(x_bsh)))
        out_bsh: torch.Tensor = x_bsh + self.dropout(self.mlp(self.mlp_norm(x_bsh)))
        return out_bsh


class GPT(nn.Module):
    """Token and position embeddings, ``blocks.0`` to ``blocks.{num_layers - 1}``, final norm, head to logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.seq_len, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        for name, module in self.named_modules():
            self.init_weights(name, module)

    def forward(self, tokens_bs: torch.Tensor, positions_s: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of shape (B, S, V) for int64 tokens of shape (B, S), S at most ``config.seq_len``.

        Args:
            tokens_bs: the tokens.
            positions_s: of a part of a sequence, where its tokens are in the whole, int64 (S,); None for 0 to S - 1.

        Raises:
            ValueError: the sequence is longer than ``config.seq_len``.
        """
        x_bsh = self.embed(tokens_bs, positions_s)
        for block in self.blocks:
            x_bsh = block(x_bsh)
        return self.logits(x_bsh)

    def embed(self, tokens_bs: torch.Tensor, positions_s: torch.Tensor | None = None) -> torch.Tensor:
        """The first block's input, (B, S, H), of tokens of shape (B, S)."""
        seq_len = tokens_bs.shape[1]
        if seq_len > self.config.seq_len:
            raise ValueError(f"seq_len: {seq_len} tokens; this model takes at most {self.config.seq_len}")
        if positions_s is None:
            positions_s = torch.arange(seq_len, device=tokens_bs.device)
        embedded_bsh: torch.Tensor = self.dropout(
            self.token_embedding(tokens_bs) + self.position_embedding(positions_s)
        )
        return embedded_bsh

    def logits(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """Logits, (B, S, V), of the last block's output, (B, S, H)."""
        logits_bsv: torch.Tensor = self.head(self.final_norm(x_bsh))
        return logits_bsv

    def parts(self) -> dict[str, tuple[str, ...]]:
        """What forward runs, one after another, and the modules of each: where a pipeline may cut."""
        blocks = [f"blocks.{place}" for place in range(len(self.blocks))]
        ends = ("token_embedding", "position_embedding", "dropout"), ("final_norm", "head")
        return {"embed": ends[0], **{name: (name,) for name in blocks}, "logits": ends[1]}

    def init_weights(self, name: str, module: nn.Module) -> None:
        """Initialise the parameters that one module of this model holds itself, as in GPT-2.

        Normal with standard deviation 0.02, divided by sqrt(2 L) before a residual is added; biases 0; norms 1 and 0.

        Args:
            name: the module's name in this model.
            module: the module.
        """
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=residual_std if name.endswith(("out_proj", "fc2")) else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def next_token_loss(logits_bsv: torch.Tensor, targets_bs: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token.

    Args:
        logits_bsv: floating point, shape (B, S, V); half precision is raised to float32 for the softmax.
        targets_bs: int64, shape (B, S), the token that follows each position.

    Returns:
        A scalar of the logits' dtype, float32 for half precision.
    """
    if logits_bsv.dtype in (torch.float16, torch.bfloat16):
        logits_bsv = logits_bsv.float()
    return functional.cross_entropy(logits_bsv.flatten(0, -2), targets_bs.flatten())


def next_token(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A workload's loss: ``next_token_loss`` of what ``model`` returns for (inputs, targets), int64 (B, S) each."""
    inputs_bs, targets_bs = batch
    return next_token_loss(model(inputs_bs), targets_bs)
