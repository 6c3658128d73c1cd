"""What the terminal says of time here: a workload's forecast, calibration, what if, and how far forecasts miss."""

import json as json_text
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardlab.cli.console import answer_table, names_in, progress_bar, table_of

if TYPE_CHECKING:
    import pandas as pd

    from shardlab.experiment.planned.plan import Plan
    from shardlab.forecast.machine import Machine

CALIBRATION, LIMIT_S = Path("machine.json"), 600.0
SETS = {"published": "published steps", "held_out": "published steps that were held out", "here": "steps run here"}


def with_forecasts(
    rows: "pd.DataFrame", place: str, ranks: int, plans: Mapping[str, "Plan"], options: Mapping[str, Any],
    machine: "Machine | None",
) -> tuple["pd.DataFrame", str]:  # fmt: skip
    """The rows of a plan with bytes at the peak, those of a calibrated machine with times; and how to take them."""
    import pandas as pd

    from shardlab.analysis.held_bytes import peaks_of_steps
    from shardlab.bench.calibrate import differs_here
    from shardlab.experiment.config import CompareConfig
    from shardlab.experiment.planned.forecast import forecast_step
    from shardlab.experiment.planned.plan import to_plan
    from shardlab.experiment.trained.named_workload import workload_at

    found = {}
    with progress_bar(len(plans), first="steps without values") as advance:
        for name, plan in plans.items():
            config = to_plan(workload_at(place), ranks, (name,), device="cpu", steps=CompareConfig.steps, **options)
            with suppress(RuntimeError):  # it needs values
                found[name] = forecast_step(config, name, machine, rank=plan.heaviest_rank)
            advance(name)
    peaks = {name: peaks_of_steps(one.records.steps) for name, one in found.items()}
    for column in ("peak_bytes", "peak_step", "least_peak_bytes"):
        values = [peaks.get(name, {}).get(column) for name in rows["strategy"]]
        rows = rows.assign(**{column: pd.array(values, "Int64")})
    unknown = ", ".join(name for name in plans if name not in found)
    note = unknown and f" Of {unknown} more is not known: a step needs values."
    if machine is None or not found:
        return rows, note
    first = min(found, key=lambda name: found[name].seconds)
    is_known = not (found[first].is_outside or found[first].unmeasured)
    miss = machine.misses(first, ranks, found[first].seconds) if is_known else "how far they miss is not known"
    note += f" Times are those of {machine.name}: {miss}."
    if other := differs_here(machine):
        note += f" It was calibrated {other}: times of this machine may be others."
    if machine.is_quick:
        note += " It was calibrated quickly, with few sizes and readings."
    if unmeasured := sorted({kind for one in found.values() for kind in one.unmeasured}):
        note += f" Of {' and '.join(unmeasured)} nothing was calibrated: times with them may be far off."
    if outside := [name for name, one in found.items() if one.is_outside]:
        note += f" Outside of what was calibrated, with larger operations or messages: {', '.join(outside)}."
    times = [round(1e3 * found[name].seconds, 1) if name in found else None for name in rows["strategy"]]
    return rows.assign(step_ms=pd.array(times, "Float64")), note


def machine_for(calibration: Path | None, ranks: int, strategies: Collection[str]) -> "Machine | None":
    """A calibration that has what forecasts of these strategies need; None where none is given.

    Raises:
        ValueError: it cannot be read, or was not made for so many ranks.
    """
    from shardlab.forecast.machine import Machine

    if calibration is None:
        return None
    machine = Machine.load(calibration)
    for name in strategies:
        machine.costs(ranks, single=name == "single")
    return machine


def calibrate(
    ranks: Annotated[str, typer.Option(help="Comma-separated: how many ranks at once.")] = "2,4",
    out: Annotated[Path, typer.Option(help="The file; a plan reads it with --calibration.")] = CALIBRATION,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and readings: sooner, and less sure.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which no further part is begun.")] = LIMIT_S,
) -> None:
    """Measure what this machine takes for operations and messages, for forecasts of time; leave it alone meanwhile.

    Parts that are measured are kept beside the file until it is whole: after an interrupt or the limit, go on by the
    same command.
    """
    from shardlab.bench.calibrate import Calibration

    counts = list(dict.fromkeys(int(text) if text.isdigit() else 0 for text in names_in(ranks)))
    if not counts or min(counts) < 2:
        raise ValueError(f"ranks: {ranks!r} is given; give numbers from 2 on, such as 2,4")
    if not limit > 0:
        raise ValueError(f"limit: {limit:g} is given; give seconds above 0")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"out: {out} cannot be written; name a file in an existing directory")
    parts = out.with_name(f"{out.name}.part")
    calibration, console = Calibration(counts, is_quick=quick, path=parts), Console(highlight=False)
    total, missing = len(calibration.parts), len(calibration.missing)
    if missing < total:
        said = f"{total - missing} of {total} parts were measured before; remove {parts} to measure them again"
        console.print(said, soft_wrap=True)
    with progress_bar(missing) as advance, suppress(KeyboardInterrupt):
        calibration.measure(advance, limit)
    if left := len(calibration.missing):
        said = f"Stopped: {total - left} of {total} parts are measured, and kept in {parts}; the same command goes on"
        console.print(said, soft_wrap=True)
        raise typer.Exit(1)
    calibration.machine().write(out)
    calibration.kept.drop()
    console.print(f"Calibration: {out}", soft_wrap=True)


def what_if(
    directory: Annotated[Path, typer.Argument(help="What compare wrote.")],
    strategy: Annotated[str, typer.Option(help="Whose run.")],
    workload: Annotated[str, typer.Option(help="Of a run of your own model: FILE.py:NAME.")] = "",
    link: Annotated[str, typer.Option(help="Another link, such as 10Gbps,50us.")] = "",
    ranks: Annotated[int, typer.Option(help="Another number of ranks, as many rows on each.")] = 0,
    bucket_mib: Annotated[float, typer.Option(help="Another capacity of buckets.")] = 0.0,
    prefetch: Annotated[int, typer.Option(help="Units gathered ahead.")] = -1,
    precision: Annotated[str, typer.Option(help="Another precision.")] = "",
    wrap: Annotated[str, typer.Option(help="Other units.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print seconds as JSON.")] = False,
) -> None:
    """Say how long a recorded step would take with one thing changed, by replaying it."""
    from shardlab.experiment.planned.what_if import what_if as replayed
    from shardlab.experiment.told.saved_runs import load_saved
    from shardlab.experiment.trained.named_workload import workload_at

    comparison, config = load_saved(directory)
    if config.workload is not None:
        if not workload:
            raise ValueError(f"workload: {directory} is of a model of your own, {config.workload}; give FILE.py:NAME")
        given = workload_at(workload)
        if str(given) != str(config.workload):
            raise ValueError(f"workload: {workload} trains {given}, and {directory} is of {config.workload}")
        object.__setattr__(config, "workload", given)
    changes: dict[str, Any] = {"link": link, "bucket_mib": bucket_mib, "precision": precision, "wrap": wrap}
    changes = {name: value for name, value in changes.items() if value}
    changes |= {"prefetch": prefetch} if prefetch >= 0 else {}
    if ranks:
        changes |= {"ranks": ranks}
        changes |= {} if config.batch is None else {"batch": config.batch * ranks // config.ranks}
    if not changes:
        raise ValueError("link, ranks, bucket-mib, prefetch, precision, wrap: none is given; give what is changed")
    found = replayed(comparison.records, config, strategy, **changes)
    if json:
        typer.echo(json_text.dumps({**asdict(found), "gain": found.gain, "is_reproduced": found.is_reproduced}))
        return
    said = ", ".join(f"{name} {value}" for name, value in changes.items())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = comparison.records.manifests[strategy]["devices"]
    if {*devices} == {"cpu"} and ranks > max(cores, config.ranks):
        said += f" (as if each rank had a core; here are {cores})"
    Console(highlight=False).print(answer_table([("WHAT IF", f"{strategy} with {said}: {found.sentence()}")]))


def validate(
    calibration: Annotated[
        Path | None, typer.Option(help="The file of shardlab calibrate; by default machine.json, where there is one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the misses as JSON.")] = False,
) -> None:
    """Say how far forecasts of time miss: of published steps, and, where it was calibrated, of steps run here."""
    from shardlab.forecast.machine import Machine
    from shardlab.forecast.published import validate_published

    given = calibration or CALIBRATION
    # One that is named has to be there.
    machine = Machine.load(given) if calibration or given.exists() else None
    published, console = validate_published(), Console(highlight=False)
    if not json:
        _tell_published(console, published)  # before steps are run for minutes
    here = None if machine is None else _validated(machine, given)
    if json:
        typer.echo(json_text.dumps(_misses(published, here), indent=2))
    elif here is not None:
        _tell_here(console, here)
    else:
        said = f"Of this machine nothing is said: {given} is not there; shardlab calibrate, then this again."
        console.print(said, soft_wrap=True)


def _validated(machine: "Machine", calibration: Path) -> "pd.DataFrame":
    """Steps that are forecast and run here; the calibration keeps them."""
    from shardlab.bench.validated_here import configurations, validate_here

    with progress_bar(len(configurations(machine))) as advance:
        here = validate_here(machine, advance)
    columns = here[["strategy", "ranks", "predicted", "measured"]]
    replace(machine, validated=tuple(columns.itertuples(index=False, name=None))).write(calibration)
    return here


def _sets(published: "pd.DataFrame") -> dict[str, "pd.DataFrame"]:
    return {"published": published[~published["held_out"]], "held_out": published[published["held_out"]]}


def _misses(published: "pd.DataFrame", here: "pd.DataFrame | None") -> dict[str, Any]:
    from shardlab.bench.validated_here import regret_of
    from shardlab.forecast.published import summary
    from shardlab.forecast.region import by_laboratory

    sets = _sets(published) | ({} if here is None else {"here": here})
    found: dict[str, Any] = {name: summary(rows).to_dict("index") for name, rows in sets.items()}
    found["by_laboratory"] = by_laboratory(published).to_dict("records")
    found["worst_peak"] = published["peak_error"].abs().max()
    return found if here is None else found | {"regret": regret_of(here), "rows": here.to_dict("records")}


def _tell_set(console: Console, name: str, rows: "pd.DataFrame") -> None:
    """Print a table of misses, beside the toys."""
    from shardlab.forecast.published import summary

    table, steps = summary(rows), f"{int((~rows['calibration']).sum())} {SETS[name]}"
    shown = (100 * table).round(1).reset_index(names="forecast")
    shown["forecast"] = ["this one", "constant rate", "roofline"]
    console.print(table_of(shown, f"Misses of {steps}, %", 2))
    ours, toys = table.iloc[0], table.iloc[1:]
    if (toys[["p90", "worst"]] < ours[["p90", "worst"]]).any().any():
        console.print("A toy is better than this forecast in its 90th percentile or its worst case.", style="bold")


def _tell_published(console: Console, published: "pd.DataFrame") -> None:
    for name, rows in _sets(published).items():
        _tell_set(console, name, rows)
    from shardlab.forecast.region import by_laboratory
    from shardlab.forecast.search import published_regrets

    shown = by_laboratory(published)
    errors = ["median", "p90", "worst", "raw_median", "raw_worst"]
    shown[errors] = (100 * shown[errors]).round(1)
    console.print(
        table_of(shown, "By laboratory, %, with a measured step of its machines where there is one, and raw", 2)
    )
    console.print(
        "Known: of how many of its steps those of all others say an error; held: how many are missed by no more.",
        soft_wrap=True,
    )
    regrets = sorted(published_regrets())
    console.print(
        f"Of {len(regrets)} published jobs with several ways the one that is ranked first is {median(regrets):.1%} "
        f"slower than the fastest in the median, {regrets[-1]:.1%} at most.",
        soft_wrap=True,
    )
    most = published.iloc[published["error"].abs().argsort()[::-1][:2]][["name", "machine", "error"]]
    said = "; ".join(f"{name} ({machine}) by {error:+.1%}" for name, machine, error in most.itertuples(index=False))
    console.print(f"The two published steps that are missed by most: {said}.")
    peaks = published["peak_error"].abs().dropna()
    console.print(f"Bytes at the peak of {len(peaks)} published steps are missed by {peaks.max():.1%} at most.")


def _tell_here(console: Console, here: "pd.DataFrame") -> None:
    from shardlab.bench.validated_here import regret_of

    _tell_set(console, "here", here)
    console.print(f"Choosing the strategy that is forecast to be fastest costs {regret_of(here):.1%} on average.")
    worst = here.reindex(here["error"].abs().sort_values(ascending=False).index).head(5)
    shown = worst[["strategy", "ranks", "rows", "link"]].assign(
        predicted=(1e3 * worst["predicted"]).round(1), measured=(1e3 * worst["measured"]).round(1),
        error=(100 * worst["error"]).round(1),
    )  # fmt: skip
    names = {"predicted": "predicted (ms)", "measured": "measured (ms)", "error": "error (%)"}
    console.print(table_of(shown.astype({"link": str}).rename(columns=names), "The five largest here", 2))
