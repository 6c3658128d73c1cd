"""What a script's losses are of, and dropout that drops nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.recording.global_hooks import replaced
from shardlab.same.notes import Counted

DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
            "scaled_dot_product_attention")  # fmt: skip
LOSSES = (F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy,
          F.binary_cross_entropy_with_logits, F.kl_div, F.huber_loss)  # fmt: skip
REDUCED = {torch.sum: "sum", Tensor.sum: "sum", torch.mean: "mean", Tensor.mean: "mean"}
_ATTENDS = F.scaled_dot_product_attention


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Inside, dropout drops nothing."""
    with contextlib.ExitStack() as stack:
        for name in DROPOUTS:
            stack.enter_context(replaced(F, name, drops_nothing))
        yield


def drops_nothing(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """In place of a dropout, or of attention that has one."""
    if plain is not _ATTENDS:
        return plain(args[0] if args else kwargs["input"], training=False)
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return plain(*args, **{key: one for key, one in kwargs.items() if key != "dropout_p"})


def counted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> list[Counted]:
    """Of how many rows or tokens a loss is, and what they add up to; nothing of what is no loss, or a weighed one."""
    if not (torch.is_grad_enabled() and isinstance(made, Tensor) and made.requires_grad and made.numel() == 1):
        return []
    if function in LOSSES:
        reduction, target = kwargs.get("reduction", "mean"), args[1] if len(args) > 1 else kwargs["target"]
        number = target.numel()
        if function in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
            number = int((target != kwargs.get("ignore_index", -100)).sum())
    elif function in REDUCED and args[0].numel() > 1:
        number, reduction = args[0].numel(), REDUCED[function]
    else:
        return []
    if reduction not in ("mean", "sum") or kwargs.get("weight") is not None:
        return []
    return [Counted(number, float(made.detach()) * (number if reduction == "mean" else 1))]
