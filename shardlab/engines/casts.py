"""What a precision casts beside parameters: inputs, outputs, buffers; and what of a module does not go with it."""

import re
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.comm.trees import map_tensors
from shardlab.engines.precision import Precision

_DTYPE_ERROR = re.compile("dtype|scalar type")


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``, see ``map_tensors``."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def advise(error: BaseException, precision: Precision, module: nn.Module) -> None:
    """Add to an error about dtypes what may have caused it: float32 buffers with 16-bit parameters.

    A float32 buffer added to a 16-bit activation gives a float32 one, which no 16-bit layer takes.
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
            f"precision: parameters and inputs are {precision.compute}, but not these buffers: "
            f"{', '.join(others)}. Precision(compute={precision.compute}, ..., buffers={precision.compute}) casts them "
            "too; or cast in forward, x = x.to(weight.dtype)"
        )


def check_batch_norms(module: nn.Module, precision: Precision) -> None:
    """Check that weights and statistics of each batch norm have one dtype: torch computes with no others.

    Raises:
        ValueError: they would not.
    """
    for name, norm in module.named_modules():
        if not isinstance(norm, _BatchNorm) or norm.weight is None or norm.running_mean is None:
            continue
        weights, statistics = precision.compute_dtype_of(norm.weight), precision.buffers or norm.running_mean.dtype
        if weights != statistics:
            raise ValueError(
                f"precision: {type(norm).__name__} {name!r} keeps statistics in {statistics}, and torch does not "
                f"compute with these and weights in {weights}; leave precision out and write 'with torch.autocast("
                f"device, {weights}):' around engine(x), which leaves the norm's weights and statistics alone; or use "
                f"GroupNorm; or write Precision({weights}, ..., buffers={weights}), which rounds the statistics too"
            )


def cast_buffers(module: nn.Module, precision: Precision) -> None:
    """Cast the floating-point buffers of a module to ``precision.buffers``."""
    if precision.buffers is not None:
        # By ``.data``, since two modules that share a buffer must go on sharing it.
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(precision.buffers)
