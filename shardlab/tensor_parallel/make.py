"""Modules on the meta device, made one at a time while the plan is carried out."""

import torch
from torch import nn

from shardlab.meta import InitFn
from shardlab.tensor_parallel.places import Places


def make(name: str, module: nn.Module, places: Places, device: torch.device, init_fn: InitFn) -> None:
    """Make the parameters that ``module`` itself holds on the meta device, and fill them.

    Raises:
        ValueError: a buffer is on the meta device: nobody says what is in it.
    """
    for key, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            raise ValueError(f"model: buffer {key!r} of {name!r} is on the meta device; make buffers on the device")
    meta = [param for param in module._parameters.values() if param is not None and param.is_meta]
    for param in meta:
        made = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
        places.put(param, made)  # in all its places, so that tied weights are made once
    if meta:
        with torch.no_grad():
            init_fn(name, module)
