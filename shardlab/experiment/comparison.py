"""The main job: train one model with several strategies on the same ranks and data, and record each of them.

    comparison = compare(workload, "runs/mine", strategies=("single", "bucketed", "fsdp"), ranks=4, steps=20)
    comparison.summary                      # one row per strategy
    collective_timeline(comparison.records.collectives, comparison.records.spans, run="bucketed", step=5)

Under torchrun every process calls ``compare``, with a directory that all of them see. Every rank writes its records;
only rank 0 writes the rest.
"""

import contextlib
import inspect
import json
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from math import isfinite, isnan, prod
from pathlib import Path
from typing import Any

import cloudpickle
import pandas as pd
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.comm.signed_messages import all_gather_bytes
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.directory import claim, new_directory, reserve, run_directory
from shardlab.experiment.planned.plan import plans_or_why
from shardlab.experiment.run.rank_checks import DATA, GRADIENTS, LOSS, broadcast_said, first_that_differ
from shardlab.experiment.run.rank_run import Progress, RankReport, run_strategy
from shardlab.experiment.run.watched_loss import FirstLoss
from shardlab.experiment.told.as_planned import against_plan
from shardlab.experiment.told.saved_runs import Comparison
from shardlab.experiment.told.summary import summarise
from shardlab.experiment.trained.batches import check_enough, of_all_ranks
from shardlab.experiment.trained.workload import Workload
from shardlab.installed import __version__
from shardlab.launch import RankError, RankHang, RankPool, place
from shardlab.launch.cell_bar import cell_bar
from shardlab.launch.placement import torchrun_env
from shardlab.launch.pool import check_pool
from shardlab.records.store import load_runs, write_manifest
from shardlab.testing.agreement_check import disagreement
from shardlab.trace.clock import Reading, origins_of
from shardlab.vocabulary import MeshAxis, dtype_name

# Every rank imports these, so they are imported once before the ranks are forked.
PRELOAD = ("shardlab.experiment.run.rank_run", "torch._dynamo")

OnProgress = Callable[[Progress], None]


def compare(
    what: CompareConfig | Workload | Callable[[], nn.Module], *rest: Any, directory: Path | str | None = None, pool:
    RankPool | None = None, on_progress: OnProgress | None = None, overwrite: bool = False, **options: Any,
) -> Comparison:  # fmt: skip
    """Run every strategy, and write records and a summary.

        compare(make_model, data, loss)                               # the rest has defaults
        compare(workload, "runs/mine", strategies="fsdp", ranks=2)    # options are the fields of CompareConfig
        compare(CompareConfig(model="gpt-3m"), "runs/builtin")        # a built-in model

    Args:
        what: a workload, a function that makes the model (data and loss follow), or a whole configuration.
        rest: data and loss, if ``what`` makes the model; then the directory.
        directory: a new or an empty directory; by default runs/DATE.
        overwrite: remove the comparison that is in ``directory``, finished or not.
        pool: warm ranks; None starts ranks and ends them.
        on_progress: called in this process after every step of rank 0; None shows a bar in a notebook's cell.
        options: fields of ``CompareConfig``; none beside a configuration.

    Raises:
        ValueError: ``directory`` is not empty (see ``directory.claim``), ``pool`` has another number of ranks or
            another device than asked for, or an option has an invalid value.
        TypeError: an unknown option, or an argument of the wrong type.
        RankError: a rank failed in every strategy, or under torchrun; see ``launch``. Else the strategy is among
            ``Comparison.failed``, and the others go on. The records so far stay on disk.
        RankHang: ranks waited for longer than ``timeout_s``.
    """
    config, directory = configured(what, rest, directory, options, pool=pool)
    directory = directory or new_directory()
    # Before ranks start, which would be for nothing if it refuses.
    prepare(config, directory, overwrite=overwrite)
    if is_reporter():
        reserve(directory)
    with contextlib.ExitStack() as stack:
        if on_progress is None:
            advance = stack.enter_context(cell_bar("compare", len(config.strategies) * config.steps))
            on_progress = lambda done: advance(f"{done.strategy}, step {done.step}, loss {done.loss:.4f}")  # noqa: E731
        if pool is None:
            started = RankPool(config.ranks, device=config.device, timeout_s=config.timeout_s, preload=PRELOAD)
            pool = stack.enter_context(started)
        return _compare(config, directory, pool, on_progress)


def prepare(config: CompareConfig, directory: Path, *, overwrite: bool = False) -> None:
    """Make the directory.

    Raises:
        ValueError: see ``directory.claim``; or the data are too few, see ``batches.check_enough``.
    """
    if config.workload is not None:
        rows, num_batches = config.global_batch // config.accumulation, config.steps * config.accumulation
        check_enough(config.workload, config.data_ranks, rows, num_batches)
    # One process alone: a second could find, or remove, what the first has begun to write.
    if is_reporter():
        claim(directory, overwrite=overwrite, resume=config.resume)


def configured(
    what: Any, rest: tuple[Any, ...], directory: Path | str | None, options: dict[str, Any], caller: str = "compare",
    pool: RankPool | None = None,
) -> tuple[CompareConfig, Path | None]:  # fmt: skip
    """The configuration and the directory, None if none is named, from the arguments of ``compare``.

    Args:
        what, rest, directory, options: see ``compare``.
        caller: the function that was called, for messages.
        pool: see ``compare``.

    Raises:
        ValueError, TypeError: as ``compare``.
    """
    if isinstance(what, CompareConfig):
        if options:
            raise TypeError(f"{caller}: the configuration holds all options; set {', '.join(options)} there")
        config = what
    else:
        what, rest = _workload(what, rest, caller)
        if unknown := sorted(options.keys() - {one.name for one in fields(CompareConfig)}):
            known = ", ".join(one.name for one in fields(CompareConfig))
            raise TypeError(f"{caller}: {', '.join(unknown)} is not an option; the options are {known}")
        if pool is not None and options.get("device", "auto") == "auto" and _means_another(pool, "auto"):
            options = {**options, "device": pool.placement.device_type}
        config = CompareConfig(workload=what, **options)
    if len(rest) > 1 or (rest and directory is not None):
        raise TypeError(f"{caller}: {len(rest)} arguments follow what is trained; one may, the directory")
    found = rest[0] if rest else directory
    return _for_ranks_of(pool, config), None if found is None else Path(found)


def _for_ranks_of(pool: RankPool | None, config: CompareConfig) -> CompareConfig:
    """The configuration for ranks that run already: 'auto' is their device.

    Raises:
        ValueError: it asks for others.
    """
    if pool is None:
        return config
    check_pool(pool, config.ranks, config.device)
    if not _means_another(pool, config.device):
        return config
    given: Any = tuple(config.own_strategies.get(name, name) for name in config.strategies)
    return replace(config, device=pool.placement.device_type, strategies=given)


def _means_another(pool: RankPool, device: str) -> bool:
    """Whether ``device`` would mean another than the pool's: 'auto' is a GPU where there is one."""
    return place(pool.world_size, device).device_type != pool.placement.device_type


def _workload(what: Any, rest: tuple[Any, ...], caller: str) -> tuple[Workload, tuple[Any, ...]]:
    """The workload, and what is left of the arguments."""
    if isinstance(what, Workload):
        return what, rest
    if what is None or isinstance(what, str) or len(rest) < 2:
        raise TypeError(
            f"{caller}: {what!r:.60} and {len(rest)} more arguments were given; give a Workload, a CompareConfig, or "
            "model, data and loss"
        )
    return Workload(what, *rest[:2]), rest[2:]


def is_reporter() -> bool:
    """Whether this process prints and writes summaries: under torchrun only rank 0, otherwise always."""
    env = torchrun_env()
    return env is None or env.rank == 0


def _compare(config: CompareConfig, directory: Path, pool: RankPool, on_progress: OnProgress) -> Comparison:
    def on_message(_: int, message: object) -> None:
        if isinstance(message, Progress):
            on_progress(message)

    with _naming_the_field(config):
        pool.run(_meet, config)
    failed: dict[str, RankError] = {}
    for strategy in config.strategies:
        # Under torchrun the processes choose a directory each; that of rank 0 is used.
        agreed = pool.run(_agree, directory)
        directory, origins = agreed[0][0], origins_of(reading for _, reading in agreed)
        where = run_directory(directory, strategy)
        manifest = _manifest(config, strategy, pool)
        _write_manifest(where, manifest)  # before the run, so that a killed run can be read
        try:
            reports = pool.run(run_strategy, config, strategy, where, origins, on_message=on_message)
        except (RankError, RankHang) as error:
            error.args = (f"{strategy}: {error}",)
            # The next strategy has fresh ranks, which torchrun has not; what hung once may hang each time.
            if isinstance(error, RankHang) or torchrun_env() is not None:
                raise
            failed[strategy] = error
            continue
        present = [report for report in reports if report is not None]
        _write_manifest(where, {**manifest, **_found(present, manifest["mesh"], config)})
    if len(failed) == len(config.strategies):
        raise next(iter(failed.values()))
    pool.run(_meet)  # under torchrun the others may read only what rank 0 has finished writing
    records = load_runs(run_directory(directory, strategy) for strategy in config.strategies if strategy not in failed)
    # After the runs, not before: planning reads data, which may change what a data loader yields next.
    plans = plans_or_why(config)
    summary = [
        row | against_plan(row["strategy"], records, plans[row["strategy"]]) for row in summarise(records, config.dtype)
    ]
    why_failed = {strategy: str(error).partition("\n")[0] for strategy, error in failed.items()}
    why_failed = {strategy: said.removeprefix(f"{strategy}: ") for strategy, said in why_failed.items()}
    told = [{"strategy": strategy, "failed": said} for strategy, said in why_failed.items()]
    # The last file: a directory that has it counts as a finished comparison.
    if is_reporter():
        (directory / "summary.json").write_text(json.dumps(summary + told, indent=2, allow_nan=False) + "\n")
    return Comparison(pd.DataFrame(summary), records, directory, why_failed)


@contextlib.contextmanager
def _naming_the_field(config: CompareConfig) -> Iterator[None]:
    """Say which field of the workload cannot be sent to the ranks, where one cannot."""
    try:
        yield
    except TypeError:
        for one in fields(config.trained):
            try:
                cloudpickle.dumps(getattr(config.trained, one.name))
            except Exception as error:
                raise TypeError(
                    f"{one.name}: it cannot be pickled, and so not be sent to the ranks ({error}); make files, "
                    "locks, connections and generators inside it, on the rank"
                ) from error
        raise


def _agree(rank: int, directory: Path) -> tuple[Path, Reading]:  # noqa: ARG001
    """This rank's directory, and its clock when all ranks have come here."""
    all_gather_bytes(b"")
    return directory, Reading.now()


def _meet(rank: int, config: CompareConfig | None = None) -> None:
    """Do nothing: ``pool.run`` returns when all ranks have, and been sent the configuration."""


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    if is_reporter():
        write_manifest(directory, manifest)


def _manifest(config: CompareConfig, strategy: str, pool: RankPool) -> dict[str, Any]:
    return {
        "run": strategy, "ranks": prod((mesh := config.mesh_axes(strategy)).values()), "mesh": mesh,
        "versions": {"shardlab": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "devices": pool.placement.devices, "backend": pool.placement.backend, "config": config.as_dict(strategy),
        "workload": description(config), "padding_bytes": 0, "recorder_share": None, "not_finite": {},
        "disagreement": "", "drew_random_numbers": False, "ranks_differ": config.ranks_differ(strategy),
        "bucket_bytes": config.bucket_bytes_of(strategy),
    }  # fmt: skip


def _found(reports: list[RankReport], mesh: dict[str, int], config: CompareConfig) -> dict[str, Any]:
    shares, num_tensor_ranks = [report.recorder_share for report in reports], mesh.get(MeshAxis.TENSOR, 1)
    return {
        "padding_bytes": max(report.padding_bytes for report in reports),
        # NaN: nothing but the first step was recorded, which does not count
        "recorder_share": None if any(map(isnan, shares)) else max(shares),
        "not_finite": {
            what: {rank: report.not_finite[what] for rank, report in enumerate(reports) if what in report.not_finite}
            for what in (DATA, LOSS, GRADIENTS)
        },
        "disagreement": _disagreement(reports, num_tensor_ranks),
        "drew_random_numbers": any(report.drew for report in reports),
        "batches": of_all_ranks([each.batches for each in reports[::num_tensor_ranks]], config.trained.divides_rows),
        "other_batch": reports[0].other_batch,
        "own_buffers": first_that_differ([report.buffers for report in reports], num_tensor_ranks)
        or (broadcast_said(reports[0].buffers) if config.broadcast_buffers else ""),
        "first_losses": _first_losses([report.first for report in reports[::num_tensor_ranks]]),
    }


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


def _disagreement(reports: list[RankReport], num_tensor_ranks: int) -> str:
    """The first thing in which ranks differ that train one model; empty if they do not."""
    for step in reports[0].did:
        if words := disagreement([report.did[step] for report in reports], num_tensor_ranks):
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
