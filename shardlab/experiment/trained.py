"""What a run trained, for its manifest: which code, which data, how many parameters, and what ranks do differently."""

import inspect
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shardlab.experiment.config import CompareConfig
from shardlab.vocabulary import dtype_name


def description(config: CompareConfig) -> dict[str, Any]:
    """The fields ``workload`` of a manifest.

    ``differs_by_rank`` has a sentence for each thing that makes ranks that train on parts of a batch differ from one
    process that trains on all of it, even if everything is right. ``commit`` is that of the current folder.
    """
    workload = config.trained
    module = workload.on_meta()
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


def differences_by_rank(module: nn.Module) -> list[str]:
    """Why ranks that share a batch compute something else than one process, for example BatchNorm's statistics."""
    found = []
    modules = list(module.modules())
    if any(isinstance(one, _BatchNorm) and one.training and not isinstance(one, nn.SyncBatchNorm) for one in modules):
        found.append("BatchNorm uses the statistics of a rank's own rows")
    if any(isinstance(one, _DropoutNd) and one.training and one.p > 0 for one in modules):
        found.append("dropout draws another mask on each rank")
    return found


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
