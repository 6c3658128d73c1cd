"""Mixed precision: compute in 16 bits, step in 32.

The shard stays in the model's own dtype (float32): it is the master weight. What is gathered is its 16-bit copy, so a
gather moves half the bytes and the gathered parameters take half the memory. Gradients are 16-bit, are summed over the
ranks in ``reduce``, and become the master's dtype before the mean is taken, so that the optimizer sees float32.

bfloat16 has float32's range and needs nothing more. float16 underflows: use ``GradScaler``.
Source: Micikevicius et al., arXiv 1710.03740, section 3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardlab.engines.trees import map_tensors


@dataclass(frozen=True)
class Precision:
    """Dtypes of a sharded engine; None leaves a dtype as it is.

    Attributes:
        compute: of gathered parameters, and of the floating-point inputs of the module and of each unit.
        reduce: in which gradients are summed over ranks; None for ``compute``.
        output: of the module's floating-point outputs.
        buffers: of the module's floating-point buffers, from construction on.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Only floating-point dtypes can be any of these."""
        for field in ("compute", "reduce", "output", "buffers"):
            dtype = getattr(self, field)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"precision: {field}={dtype} is not a floating-point dtype")

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype gradients are summed in."""
        return self.reduce or self.compute


_DTYPE_ERROR = re.compile("dtype|scalar type")
PRECISIONS: Mapping[str, Precision] = {
    "full": Precision(),
    "bf16": Precision(torch.bfloat16, torch.float32, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, torch.float32),
}


def parse_precision(precision: Precision | str) -> Precision:
    """A ``Precision``, or one of the named ones.

    Raises:
        ValueError: an unknown name; the message lists the allowed ones.
    """
    if isinstance(precision, Precision):
        return precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with every floating-point tensor in it as ``dtype``, see ``map_tensors``."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def advise(error: BaseException, precision: Precision, module: nn.Module) -> None:
    """Add to an error about dtypes what may have caused it: float32 buffers beside 16-bit parameters.

    A float32 buffer added to a 16-bit activation gives a float32 one, which no 16-bit layer takes, nor does a batch
    norm of 16-bit parameters take float32 statistics.
    """
    if precision.compute is None or not isinstance(error, RuntimeError) or not _DTYPE_ERROR.search(str(error)):
        return
    others = [
        f"{name!r} ({buffer.dtype})"
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != precision.compute
    ]
    if others:
        error.add_note(
            f"precision: parameters and inputs of units are {precision.compute}, but not these buffers: "
            f"{', '.join(others)}. Precision(compute={precision.compute}, ..., buffers={precision.compute}) casts them "
            "too; or cast in forward, x = x.to(weight.dtype)"
        )
