"""The loss of next-byte prediction."""

import torch
from torch.nn import functional


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
