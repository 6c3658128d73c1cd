"""What the terminal says of a step's time on this machine: a workload's forecast, and what if."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer

from shardlab.cli.console import answer_table, progress_bar, say, say_json
from shardlab.forecast.machine import Machine
from shardlab.installed import num_cores

if TYPE_CHECKING:
    from shardlab.experiment.config import CompareConfig
    from shardlab.experiment.planned.forecast import StepForecast
    from shardlab.experiment.planned.plan import Plan


def with_forecasts(
    rows: pd.DataFrame, stages: pd.DataFrame | None, plans: Mapping[str, "Plan"], config: "CompareConfig",
    machine: Machine | None,
) -> tuple[pd.DataFrame, pd.DataFrame | None, str]:  # fmt: skip
    """The rows of a plan with bytes at the peak, those of a calibrated machine with times; and how to take them."""
    from shardlab.analysis.held_bytes import peaks_of_steps
    from shardlab.experiment.planned.forecast import StepForecast, forecast_step

    found: dict[str, list[StepForecast]] = {}  # of a rank for each place in the pipeline
    with progress_bar(len(plans), first="steps without values", works_here=True) as advance:
        for name, plan in plans.items():
            places = 1 if config.staged_of(name) is None else config.pipe
            with suppress(RuntimeError):  # it needs values
                found[name] = [forecast_step(config, name, machine, rank) for rank in plan.heaviest_ranks(places)]
            advance(name)
    peaks = {name: peaks_of_steps(pd.concat([one.records.steps for one in each])) for name, each in found.items()}
    for column in ("peak_bytes", "peak_step", "least_peak_bytes"):
        values = [peaks.get(name, {}).get(column) for name in rows["strategy"]]
        rows = rows.assign(**{column: pd.array(values, "Int64")})
    if stages is not None:
        known = {name: [one.peak_bytes for one in each] for name, each in found.items()}
        values = [size for name in stages["strategy"].unique() for size in known.get(name, [None] * config.pipe)]
        stages = stages.assign(peak_bytes=pd.array(values, "Int64"))
    unknown = ", ".join(name for name in plans if name not in found)
    note = unknown and f" Of {unknown} more is not known: a step needs values."
    if machine is None or not found:
        return rows, stages, note
    times = {name: each[0] for name, each in found.items()}
    ms = [round(1e3 * times[name].seconds, 1) if name in times else None for name in rows["strategy"]]
    return rows.assign(step_ms=pd.array(ms, "Float64")), stages, note + _about_times(times, machine, config.ranks)


def _about_times(found: Mapping[str, "StepForecast"], machine: Machine, ranks: int) -> str:
    from shardlab.bench.calibrate import differs_here

    first = min(found, key=lambda name: found[name].seconds)
    is_known = not (found[first].is_outside or found[first].unmeasured)
    miss = machine.misses(first, ranks, found[first].seconds) if is_known else "how far they miss is not known"
    note = f" Times are those of {machine.name}: {miss}."
    if other := differs_here(machine):
        note += f" It was calibrated {other}: times of this machine may be others."
    if machine.is_quick:
        note += " It was calibrated quickly, with few sizes and readings."
    if unmeasured := sorted({kind for one in found.values() for kind in one.unmeasured}):
        note += f" Of {' and '.join(unmeasured)} nothing was calibrated: times with them may be far off."
    if outside := [name for name, one in found.items() if one.is_outside]:
        note += f" Outside of what was calibrated, with larger operations or messages: {', '.join(outside)}."
    return note


def machine_for(calibration: Path | None, ranks: int, strategies: Collection[str]) -> Machine | None:
    """A calibration that has what forecasts of these strategies need; None where none is given.

    Raises:
        ValueError: it cannot be read, or was not made for so many ranks.
    """
    if calibration is None:
        return None
    machine = Machine.load(calibration)
    for name in strategies:
        machine.costs(ranks, single=name == "single")
    return machine


def what_if(
    directory: Annotated[Path, typer.Argument(help="What compare wrote.")],
    strategy: Annotated[str, typer.Option(help="Whose run.")],
    workload: Annotated[str, typer.Option(help="Of your own model, which has moved since: FILE.py:NAME.")] = "",
    link: Annotated[str | None, typer.Option(help="Another link, such as 10Gbps,50us.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Another number of ranks, as many rows on each.")] = None,
    bucket_mib: Annotated[float | None, typer.Option(help="Another capacity of buckets.")] = None,
    prefetch: Annotated[int | None, typer.Option(help="Units gathered ahead.")] = None,
    precision: Annotated[str | None, typer.Option(help="Another precision.")] = None,
    wrap: Annotated[str | None, typer.Option(help="Other units.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of a run with stages: another schedule.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Of a run with stages: as many rows in so many.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print seconds as JSON.")] = False,
) -> None:
    """Say how long a recorded step would take with one thing changed, by replaying it."""
    from shardlab.experiment.planned.what_if import what_if as replayed
    from shardlab.experiment.told.saved_runs import load_saved
    from shardlab.experiment.trained.named_workload import workload_at

    comparison, config = load_saved(directory)
    if config.workload is not None:
        place = workload or next(iter(comparison.records.manifests.values())).get("workload", {}).get("place")
        if not place:
            raise ValueError(f"workload: {directory} is of a model of your own, {config.workload}; give FILE.py:NAME")
        given = workload_at(place)
        if str(given) != str(config.workload):
            raise ValueError(f"workload: {place} trains {given}, and {directory} is of {config.workload}")
        object.__setattr__(config, "workload", given)
    asked = {
        "link": link, "ranks": ranks, "bucket_mib": bucket_mib, "prefetch": prefetch, "precision": precision,
        "wrap": wrap, "schedule": schedule, "micro_batches": micro_batches,
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if not changes:
        raise ValueError(f"{', '.join(asked).replace('_', '-')}: none is given; give what is changed")
    if ranks is not None and config.batch is not None:
        changes["batch"] = config.batch * ranks // config.ranks
    found = replayed(comparison.records, config, strategy, **changes)
    if json:
        say_json({**asdict(found), "gain": found.gain, "is_reproduced": found.is_reproduced})
        return
    said = ", ".join(f"{name} {value}" for name, value in changes.items())
    is_same = link is not None and isclose(found.changed, found.replayed, rel_tol=1e-3)
    same = "; messages over that link take no longer than recorded, or are hidden"
    cores, devices = num_cores(), comparison.records.manifests[strategy]["devices"]
    if {*devices} == {"cpu"} and (ranks or 0) > max(cores, config.ranks):
        said += f" (as if each rank had a core; here are {cores})"
    say(answer_table([("WHAT IF", f"{strategy} with {said}: {found.sentence()}{same * is_same}")]))
