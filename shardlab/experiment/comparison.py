"""The main job: train one model with several strategies on the same ranks and data, and record each of them.

    comparison = compare(workload, "runs/mine", strategies=("single", "bucketed", "fsdp"), ranks=4, steps=20)
    comparison.summary                      # one row per strategy
    collective_timeline(comparison.records.collectives, comparison.records.spans, run="bucketed", step=5)

Under torchrun every process calls ``compare``, with a directory that all of them see. Every rank writes its records;
only rank 0 writes the rest.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pandas as pd
from torch import nn

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.directory import claim, new_directory, reserve, run_directory
from shardlab.experiment.planned.plan import plans_or_why
from shardlab.experiment.run.manifest import found_by, manifest_of
from shardlab.experiment.run.rank_run import Progress, agree, meet, run_strategy
from shardlab.experiment.told.saved_runs import Comparison, against_plan
from shardlab.experiment.told.summary import summarise
from shardlab.experiment.trained.batches import check_enough
from shardlab.experiment.trained.workload import Workload
from shardlab.launch import RankError, RankHang, RankPool, place
from shardlab.launch.cell_bar import cell_bar
from shardlab.launch.placement import torchrun_env
from shardlab.launch.pool import check_pool
from shardlab.records.store import load_runs, write_manifest
from shardlab.trace.clock import origins_of

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
    return run_prepared(config, directory, pool, on_progress)


def run_prepared(
    config: CompareConfig, directory: Path, pool: RankPool | None = None, on_progress: OnProgress | None = None
) -> Comparison:
    """What ``compare`` does in a directory that ``prepare`` has made."""
    with contextlib.ExitStack() as stack:
        if on_progress is None:
            advance = stack.enter_context(cell_bar("compare", len(config.strategies) * config.steps))
            on_progress = lambda done: advance(f"{done.strategy}, step {done.step}, loss {done.loss:.4f}")  # noqa: E731
        if pool is None:
            started = RankPool(config.ranks, device=config.device, timeout_s=config.timeout_s, preload=PRELOAD)
            pool = stack.enter_context(started)
        return _compare(config, directory, pool, on_progress)


def prepare(config: CompareConfig, directory: Path, *, overwrite: bool = False) -> None:
    """Make the directory, and begin the comparison in it.

    Raises:
        ValueError: see ``directory.claim`` and ``reserve``; or the data are too few, see ``batches.check_enough``.
    """
    if config.workload is not None:
        num_batches = config.steps * config.accumulation
        check_enough(config.workload, config.data_ranks, config.micro_batch_rows, num_batches)
    # One process alone: a second could find, or remove, what the first has begun to write.
    if is_reporter():
        claim(directory, overwrite=overwrite, resume=config.resume)
        reserve(directory)


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
    with _naming_the_field(config):
        pool.run(meet, config)
    directory, failed = run_strategies(config, directory, pool, on_progress)
    if len(failed) == len(config.strategies):
        raise next(iter(failed.values()))
    pool.run(meet)  # under torchrun the others may read only what rank 0 has finished writing
    records = load_runs(run_directory(directory, strategy) for strategy in config.strategies if strategy not in failed)
    # After the runs, not before: planning reads data, which may change what a data loader yields next.
    plans = plans_or_why(config)
    summary = [
        row | against_plan(row["strategy"], records, plans[row["strategy"]]) for row in summarise(records, config.dtype)
    ]
    why_failed = {strategy: _first_line(error).removeprefix(f"{strategy}: ") for strategy, error in failed.items()}
    told = [{"strategy": strategy, "failed": said} for strategy, said in why_failed.items()]
    # The last file: a directory that has it counts as a finished comparison.
    if is_reporter():
        (directory / "summary.json").write_text(json.dumps(summary + told, indent=2, allow_nan=False) + "\n")
    return Comparison(pd.DataFrame(summary), records, directory, why_failed)


def run_strategies(
    config: CompareConfig, directory: Path, pool: RankPool, on_progress: OnProgress
) -> tuple[Path, dict[str, RankError]]:
    """Run each strategy, without a plan or a summary; where their records are, and what one raised on a rank."""

    def on_message(_: int, message: object) -> None:
        if isinstance(message, Progress):
            on_progress(message)

    failed: dict[str, RankError] = {}
    for strategy in config.strategies:
        # Under torchrun the processes choose a directory each; that of rank 0 is used.
        agreed = pool.run(agree, directory)
        directory, origins = agreed[0][0], origins_of(reading for _, reading in agreed)
        where, manifest = run_directory(directory, strategy), manifest_of(config, strategy, pool)
        _write_manifest(where, manifest)
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
        _write_manifest(where, {**manifest, **found_by(present, manifest["mesh"], config)})
    return directory, failed


def _first_line(error: RankError) -> str:
    """What a rank raised, and what was noted to it: the advice of an engine."""
    return "; ".join([str(error).partition("\n")[0], *getattr(error.__cause__, "__notes__", ())])


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


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    if is_reporter():
        write_manifest(directory, manifest)
