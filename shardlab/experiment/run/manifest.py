"""The manifest of a run: what was run, where, and what the ranks reported."""

import inspect
import platform
import subprocess
from functools import partial
from math import isfinite, isnan, prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.run.rank_checks import DATA, GRADIENTS, LOSS, FirstLoss, broadcast_said, first_that_differ
from shardlab.experiment.run.rank_run import RankReport
from shardlab.experiment.trained.batches import of_all_ranks
from shardlab.installed import __version__
from shardlab.launch import RankPool
from shardlab.testing.agreement_check import disagreement
from shardlab.vocabulary import MeshAxis, dtype_name


def manifest_of(config: CompareConfig, strategy: str, pool: RankPool) -> dict[str, Any]:
    """What it says before the run, so that a run that is killed can be read."""
    return {
        "run": strategy, "ranks": prod((mesh := config.mesh_axes(strategy)).values()), "mesh": mesh,
        "versions": {"shardlab": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "devices": pool.placement.devices, "backend": pool.placement.backend, "config": config.as_dict(strategy),
        "workload": description(config), "padding_bytes": 0, "recorder_share": None, "not_finite": {},
        "disagreement": "", "drew_random_numbers": False, "ranks_differ": config.ranks_differ(strategy),
        "schedule": None if (staged := config.staged_of(strategy)) is None else staged.schedule.to_csv(),
    }  # fmt: skip


def found_by(reports: list[RankReport], mesh: dict[str, int], config: CompareConfig) -> dict[str, Any]:
    """What a manifest says after the run."""
    shares, num_tensor_ranks = [report.recorder_share for report in reports], mesh.get(MeshAxis.TENSOR, 1)
    by_stage = _by_stage(len(reports), mesh)
    differ = (first_that_differ([reports[rank].buffers for rank in one], num_tensor_ranks) for one in by_stage)
    last = [report for report in reports if report.has_loss]
    return {
        "padding_bytes": max(report.padding_bytes for report in reports),
        # NaN: nothing but the first step was recorded, which does not count
        "recorder_share": None if any(map(isnan, shares)) else max(shares),
        "not_finite": {
            what: {rank: report.not_finite[what] for rank, report in enumerate(reports) if what in report.not_finite}
            for what in (DATA, LOSS, GRADIENTS)
        },
        "disagreement": next(filter(None, (_disagreement(reports, one, num_tensor_ranks) for one in by_stage)), ""),
        "drew_random_numbers": any(report.drew for report in reports),
        "autocast": max(report.autocast for report in reports),
        "batches": of_all_ranks(
            [reports[rank].batches for rank in by_stage[0][::num_tensor_ranks]], config.trained.divides_rows
        ),
        "other_batch": reports[0].other_batch,
        "own_buffers": next(filter(None, differ), "")
        or (broadcast_said(reports[0].buffers) if config.broadcast_buffers else ""),
        "first_losses": _first_losses([report.first for report in last[::num_tensor_ranks]]),
    }


def _by_stage(num_ranks: int, mesh: dict[str, int]) -> list[range]:
    """The ranks that train the same parameters."""
    size = num_ranks // mesh.get(MeshAxis.PIPE, 1)
    return [range(first, first + size) for first in range(0, num_ranks, size)]


def _first_losses(found: list[FirstLoss | None]) -> dict[str, Any]:
    """What ``mean_of_means`` takes, of the data ranks; empty where a loss is no number."""
    known = [first for first in found if first is not None and isfinite(first.loss)]
    if len(known) < len(found):
        return {}
    names = set.intersection(*(set(first.counts) for first in known))
    return {
        "losses": [first.loss for first in known], "weights": [first.weight for first in known],
        "counts": {name: [first.counts[name] for first in known] for name in known[0].counts if name in names},
    }  # fmt: skip


def _disagreement(reports: list[RankReport], ranks: range, num_tensor_ranks: int) -> str:
    """The first thing in which ranks differ that train one model; empty if they do not."""
    for step in reports[0].did:
        if words := disagreement([reports[rank].did[step] for rank in ranks], num_tensor_ranks, ranks):
            return f"after step {step}, {words.removeprefix('agreement: ')}"
    return ""


def description(config: CompareConfig) -> dict[str, Any]:
    """The fields ``workload`` of a manifest.

    ``differs_by_rank`` has a sentence for each layer that makes ranks that train on parts of a batch differ from one
    process that trains on all of it, even if everything is right; that a loss draws random numbers, only a run shows.
    ``commit`` is that of the current folder.
    """
    workload, module = config.trained, config.on_meta
    params = list(module.parameters())
    return {
        "name": str(workload), "place": config.place,
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters": sum(param.numel() for param in params),
        "trainable": sum(param.numel() for param in params if param.requires_grad),
        "dtypes": sorted({dtype_name(param.dtype) for param in params}), "data": _named(workload.data),
        "loss": _named(workload.loss), "optimizer": _named(workload.optimizer), "seed": config.seed,
        "differs_by_rank": differences_by_rank(module), "commit": _commit(),
    }  # fmt: skip


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
