"""A plain model on a part of each sequence: its attention is computed with the ranks that have the other parts.

    with Mesh({"data": 2, "context": 2}) as mesh:
        over = ContextParallel(mesh["context"], "ring", zigzag=True)
        engine = build_engine("fsdp", model, AdamW, mesh)     # over the product of data and context
        with over:
            logits = engine(over.part(inputs), over.positions(inputs.shape[1]))
            engine.backward(loss_fn(logits, over.part(targets)))

All else in a transformer works on one token at a time. So targets are shifted before they are cut, and each rank's
loss, a mean over its tokens, is a part of the mean over all: parts are equal. Engines average gradients over the axis
``context`` as over ``data``.
"""

from collections.abc import Callable, Sequence
from traceback import walk_stack
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from shardlab.comm.communicator import Communicator
from shardlab.comm.modes_in_backward import BACKWARDS, backward_in
from shardlab.context.attention import attention
from shardlab.context.parts import positions_of, require_way

_NO_ATTENTION = (
    "attention: inside ContextParallel only torch.nn.functional.scaled_dot_product_attention is computed among ranks; "
    "nn.MultiheadAttention, and attention written by hand, would see this rank's part alone; let the model call it"
)


def _is_in_reentrant_checkpoint() -> bool:
    """Whether one runs forward without gradients, which shows nowhere but in who calls."""
    return any(frame.f_code is CheckpointFunction.forward.__code__ for frame, _ in walk_stack(None))


class ContextParallel(TorchFunctionMode):
    """Inside, torch's ``scaled_dot_product_attention`` is computed among the ranks of an axis.

    Args:
        comm: of the axis ``context``.
        way: 'ulysses', 'gathered' or 'ring'; see ``parts.py`` for what each sends.
        zigzag: parts that are equal work, for 'gathered' and 'ring'.

    Raises:
        ValueError: an unknown way, a zigzag of Ulysses; inside, attention that is not causal, has a mask or drops out,
            or that the way cannot compute; at the end, a block in which none was computed, or from which backward is
            still to come, which computes it again.
    """

    def __init__(self, comm: Communicator, way: str = "ulysses", *, zigzag: bool = False) -> None:
        super().__init__()
        require_way(way, zigzag=zigzag)
        self._comm, self._way, self._zigzag, self._num_computed = comm, way, zigzag, 0
        self._seq_lens: set[int] = set()  # that were divided
        self._is_recomputed = False  # attention, in a backward that is still to come

    def __enter__(self) -> Self:
        self._num_computed, self._is_recomputed = 0, False  # of this block: one object serves many steps
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, exc_type: object, exc: object, trace: object) -> None:
        super().__exit__(exc_type, exc, trace)  # type: ignore[no-untyped-call]
        if exc_type is None and not self._num_computed and self._comm.num_ranks > 1:
            raise ValueError(_NO_ATTENTION)
        if exc_type is None and self._is_recomputed:
            raise ValueError(
                "backward: a checkpoint with use_reentrant=True computes attention again in it, and outside of this "
                "block it would see this rank's part alone; call backward inside"
            )

    def positions(self, seq_len: int) -> Tensor:
        """Where this rank's tokens are in a sequence of ``seq_len``, int64."""
        self._seq_lens.add(seq_len)
        return positions_of(seq_len, self._comm.num_ranks, self._comm.rank, zigzag=self._zigzag)

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of what belongs to the tokens of a sequence, such as inputs or targets."""
        return whole.index_select(dim, self.positions(whole.shape[dim]).to(whole.device))

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """As it is, but for attention."""
        if func is functional.multi_head_attention_forward:
            raise ValueError(_NO_ATTENTION)
        if func in BACKWARDS:
            self._is_recomputed = False
            return backward_in(self, *args, **(kwargs or {}))
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attention(*args, **(kwargs or {}))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None or dropout_p or scale is not None or not is_causal:
            raise ValueError(
                f"attention: with a mask {attn_mask is not None}, dropout_p={dropout_p}, scale={scale}, "
                f"is_causal={is_causal}; over ranks it is causal, without a mask, dropout and a scale of its own"
            )
        if self._seq_lens and (found := query.shape[-2] * self._comm.num_ranks) not in self._seq_lens:
            raise ValueError(
                f"attention: of {found} tokens on all ranks, and part() has divided {sorted(self._seq_lens)}; over "
                "ranks it is of whole sequences, without windows, and without tokens that the model adds"
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ValueError(
                f"attention: {query.shape[1]} heads and {key.shape[1]} key-value heads need enable_gqa=True"
            )
        self._num_computed += 1
        self._is_recomputed |= not torch.is_grad_enabled() and _is_in_reentrant_checkpoint()
        return attention(self._way, query, key, value, self._comm, zigzag=self._zigzag)
