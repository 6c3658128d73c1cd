"""Mixed precision: compute in 16 bits, step in 32.

What a rank steps stays in the model's own dtype (float32): the master weight. In ``zero3`` and ``fsdp`` that is the
shard; ``zero1`` and ``zero2`` keep it beside a whole 16-bit copy. What is gathered has 16 bits, so a gather moves half
the bytes and the gathered parameters take half the memory. Gradients are 16-bit, are summed over the
ranks in ``reduce``, and are cast to the master's dtype before the mean is taken, so that the optimizer sees float32.

Bytes at rest per rank for P fp32 parameters, Adam, N ranks and 16-bit parameters, and those of the ZeRO paper, which
keeps 16-bit gradients (arXiv 1910.02054, section 5, K = 12). ``g`` is the itemsize of ``reduce``, 4 in 'bf16':

===========  ==========  ==================  =============  =====  ==============  ================
strategy     parameters  gradients           master weight  state  in all, g = 4   paper
===========  ==========  ==================  =============  =====  ==============  ================
zero1        2P          4P; g = 2: 2P+4P/N  4P/N           8P/N   6P + 12P/N      4P + 12P/N
zero2        2P          4P/N                4P/N           8P/N   2P + 16P/N      2P + 14P/N
zero3, fsdp  4P/N        4P/N                --             8P/N   16P/N           16P/N
===========  ==========  ==================  =============  =====  ==============  ================

zero3 and fsdp have no 16-bit copy at rest: their shards, counted as parameters, are the master weights. So they keep 4
bytes for parameter and master together, not 2 + 4; the 2 they save go to the gradient, which the optimizer takes in the
master's dtype.

bfloat16 has float32's range and needs nothing else. float16 underflows: use ``GradScaler``.

Inputs are cast before the module's forward and outputs after it, buffers once. Each strategy decides which tensors hold
the parameters to compute with and which the values to step.
Source: Micikevicius et al., arXiv 1710.03740, section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Dtypes of an engine; None leaves a dtype as it is.

    Attributes:
        compute: of the parameters in forward, and of the floating-point inputs of the module and of each unit.
        reduce: in which gradients are summed over ranks; None for ``compute``.
        output: of the module's floating-point outputs.
        buffers: of the module's floating-point buffers, from construction on.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check that all are floating-point dtypes."""
        for field in ("compute", "reduce", "output", "buffers"):
            dtype = getattr(self, field)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"precision: {field}={dtype} is not a floating-point dtype such as torch.bfloat16")

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype gradients are summed in."""
        return self.reduce or self.compute

    def compute_dtype_of(self, stored: Tensor) -> torch.dtype:
        """The dtype in forward of what is stored as ``stored``; anything but floating point keeps its dtype."""
        return (self.compute if stored.is_floating_point() else None) or stored.dtype

    def reduce_dtype_of(self, stored: Tensor) -> torch.dtype:
        """The dtype its gradients are summed in."""
        return (self.reduce_dtype if stored.is_floating_point() else None) or stored.dtype


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
