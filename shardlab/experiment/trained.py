"""What a run trained, for its manifest: which code, which data, how many parameters, and what ranks do differently."""

import inspect
import subprocess
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.experiment.config import CompareConfig
from shardlab.vocabulary import dtype_name


def description(config: CompareConfig) -> dict[str, Any]:
    """The fields ``workload`` of a manifest.

    ``differs_by_rank`` has a sentence for each layer that makes ranks that train on parts of a batch differ from one
    process that trains on all of it, even if everything is right; that a loss draws random numbers, only a run shows.
    ``commit`` is that of the current folder.
    """
    workload, module = config.trained, config.on_meta
    params = list(module.parameters())
    return {
        "name": str(workload),
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters": sum(param.numel() for param in params),
        "trainable": sum(param.numel() for param in params if param.requires_grad),
        "dtypes": sorted({dtype_name(param.dtype) for param in params}),
        "data": _named(workload.data),
        "loss": _named(workload.loss),
        "optimizer": _named(workload.optimizer),
        "seed": config.seed,
        "differs_by_rank": differences_by_rank(module),
        "commit": _commit(),
    }


def outline(rank: int, config: CompareConfig) -> list[str]:  # noqa: ARG001
    """What this rank's model is made of, a line for each parameter and buffer; runs on a rank."""
    module = config.on_meta
    params = [
        f"{name}: {list(param.shape)} {dtype_name(param.dtype)}{'' if param.requires_grad else ', frozen'}"
        for name, param in module.named_parameters()
    ]
    return params + [f"buffer {name}: {list(buffer.shape)}" for name, buffer in module.named_buffers()]


def check_same_model(outlines: list[list[str]]) -> None:
    """Refuse a ``model`` that makes other modules on other ranks.

    Args:
        outlines: by rank.

    Raises:
        ValueError: they differ; the message names the first place.
    """
    for rank, lines in enumerate(outlines):
        if lines != outlines[0]:
            pairs = zip_longest(outlines[0], lines, fillvalue="nothing more")
            first, other = next((one, another) for one, another in pairs if one != another)
            raise ValueError(
                f"model: it differs between ranks: rank 0 has {first!r}, and rank {rank} has {other!r}; build it from "
                "what is the same on all ranks"
            )


def differences_by_rank(module: nn.Module) -> list[str]:
    """Why ranks that share a batch compute something else than one process, for example BatchNorm's statistics."""
    modules = module.modules()
    if any(isinstance(one, _BatchNorm) and one.training and not isinstance(one, nn.SyncBatchNorm) for one in modules):
        return ["BatchNorm uses the statistics of a rank's own rows"]
    return []


def _named(value: Any) -> str:
    if isinstance(value, partial):
        return _named(value.func)
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__name__


def _commit() -> str | None:
    """The commit that is checked out in the current folder; None if it is in no repository."""
    try:
        said = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path.cwd(), capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()
