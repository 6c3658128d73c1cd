"""What ``shardlab plan`` says of time: of a transformer on GPUs, of a workload here, and how far it misses."""

import json as json_text
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardlab.cli.console import answer_table, count, names_in, progress_bar, table_of

if TYPE_CHECKING:
    import pandas as pd

    from shardlab.experiment.planned import Plan
    from shardlab.planner.job import Job

CALIBRATION = Path("machine.json")
SHOWN = 12  # ways of a search
SETS = {"published": "published steps", "held_out": "published steps that were held out", "here": "steps run here"}


def of_config(
    config: Path, ranks: int, hardware: str, network: str, options: Mapping[str, Any], *, searches: bool, json: bool
) -> None:
    """Print the forecast of a transformer of a ``config.json``, or all ways to train it.

    Args:
        config: the file.
        ranks: GPUs.
        hardware: name of a preset.
        network: text of a network; empty where it is not known.
        options: ``batch`` (sequences of a step), ``seq_len``, ``micro_batch``, ``strategy``, ``tensor``, ``recompute``,
            ``measured`` (files of steps); 0 or empty for those that are not given.
        searches: whether all ways are gone through.
        json: whether it is printed as JSON.
    """
    from shardlab.planner.model_config import sizes_of
    from shardlab.planner.search import search

    sizes = sizes_of(config)
    if options["seq_len"]:
        sizes["seq_len"] = options["seq_len"]
    if "seq_len" not in sizes:
        raise ValueError(f"seq-len: {config} does not say it; give --seq-len 4096, for example")
    on, pairs = {"hardware": hardware, "network": network or None}, [_step_in(file) for file in options["measured"]]
    if searches:
        return _tell_search(search(sizes, ranks, options["batch"] or ranks, calibration=pairs, **on), json=json)
    return _tell_forecast(sizes, ranks, on, options, pairs, json=json)


def _step_in(file: Path) -> tuple[dict[str, Any], float]:
    """Arguments and measured seconds of a step, from what a plan prints as JSON."""
    try:
        step = json_text.loads(file.read_text())
        return step["arguments"], float(step["seconds"])
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"measured: {file} is no step; write one with shardlab plan --config ... --json > {file}, and put its "
            "measured seconds in"
        ) from error


def _tell_search(found: Sequence[Any], *, json: bool) -> None:
    import pandas as pd

    from shardlab.planner.forecast import USABLE

    rows = pd.DataFrame([
        {
            "way": one.name, "seconds": one.forecast.seconds, "peak_bytes": one.forecast.peak_bytes,
            "tokens_per_second": one.job.tokens_per_step / one.forecast.seconds, "why_not": one.why_not,
        }
        for one in found
    ])  # fmt: skip
    if json:
        typer.echo(json_text.dumps(rows.to_dict("records"), indent=2))
        return
    console = Console(highlight=False)
    fits = [one for one in found if not one.why_not.startswith("needs")]
    best = fits[0] if fits else None
    said = (
        f"{best.name}: {best.forecast.seconds:.3g} s a step, {best.forecast.peak_bytes / 1e9:.3g} GB at the peak"
        if best else f"none of {count(len(found), 'way')} fits; the smallest {found[0].why_not}"
    )  # fmt: skip
    tried = f"{count(len(found), 'way')}, {len(fits)} fit in {USABLE:.0%} of the card's memory"
    tried += f"; of the others the smallest {found[len(fits)].why_not}" if 0 < len(fits) < len(found) else ""
    console.print(answer_table([("FASTEST THAT FITS", said), ("TRIED", tried)]))
    shown = rows.head(SHOWN).assign(
        seconds=rows["seconds"].map("{:.3g}".format), peak_bytes=(rows["peak_bytes"] / 1e9).map("{:.3g}".format),
        tokens_per_second=rows["tokens_per_second"].map("{:,.0f}".format),
    )  # fmt: skip
    names = {"seconds": "step (s)", "peak_bytes": "peak (GB)", "tokens_per_second": "tokens/s", "why_not": "why not"}
    console.print(table_of(shown.rename(columns=names), "", 2, right=["step (s)", "peak (GB)", "tokens/s"]))


def _tell_forecast(
    sizes: Mapping[str, Any], ranks: int, on: Mapping[str, Any], options: Mapping[str, Any],
    pairs: Sequence[tuple[dict[str, Any], float]], *, json: bool,
) -> None:  # fmt: skip
    from shardlab.planner.forecast import forecast_of

    job = _job_of(sizes, ranks, on, options)
    found = forecast_of(job, pairs)
    if json:
        typer.echo(json_text.dumps({**asdict(found), "arguments": asdict(job)}, indent=2))
        return
    console = Console(highlight=False)
    console.print(answer_table([
        ("PLANNED", f"{job.way}; rows of {count(job.seq_len, 'token')}, {job.precision}, on {ranks} x {job.card.name}"),
        ("TIME", f"{found.seconds:.3g} s a step, {job.tokens_per_step / found.seconds:,.0f} tokens a second, "
                 f"{job.mfu(found.seconds):.0%} of the peak (MFU)"),
        ("MEMORY", _fits(found.peak_bytes, job.card.memory_bytes)),
        ("MISSES BY", _misses(job)),
        ("NOT IN IT", " ".join(found.not_modelled)),
    ]))  # fmt: skip
    import pandas as pd

    parts = pd.Series(found.parts)
    parts = parts[parts > 0.001 * found.seconds].sort_values(ascending=False)
    table = pd.DataFrame(
        {"part": parts.index, "s": parts.map("{:.3g}".format), "%": (100 * parts / found.seconds).map("{:.1f}".format)}
    )
    console.print(table_of(table, "What a step is spent on", 2, right=["s", "%"]))


def _fits(peak_bytes: float, room: float) -> str:
    from shardlab.planner.forecast import RESERVED, USABLE

    least, most = RESERVED
    said = f"{peak_bytes / 1e9:.3g} GB in tensors at the peak, of {room / 1e9:.3g} GB: "
    if least * peak_bytes > room:
        return f"{said}it does not fit"
    if peak_bytes > USABLE * room:
        return f"{said}it hardly fits, with less than {1 - USABLE:.0%} left for libraries and the allocator"
    if most * peak_bytes < room:
        return f"{said}it fits"
    often = f"{room / peak_bytes:.3g} times that; {least:g} to {most:g} times were seen"
    return f"{said}it fits, unless the allocator reserves more than {often}"


def _job_of(sizes: Mapping[str, Any], ranks: int, on: Mapping[str, Any], options: Mapping[str, Any]) -> "Job":
    from shardlab.planner.job import Job

    tensor, micro_batch = options["tensor"], options["micro_batch"] or 1
    if ranks % tensor:
        raise ValueError(f"tp: {tensor} is given; it must divide {count(ranks, 'rank')}")
    data = ranks // tensor
    sequences = options["batch"] or data * micro_batch
    if sequences % (data * micro_batch):
        raise ValueError(
            f"batch: {sequences} sequences is given; {data} data ranks x micro-batch {micro_batch} must divide it"
        )
    return Job(
        **sizes, micro_batch=micro_batch, data=data, tensor=tensor, accumulation=sequences // data // micro_batch,
        strategy=options["strategy"] or ("fsdp" if data > 1 else "single"), recompute=options["recompute"], **on,
    )  # fmt: skip


def _misses(job: "Job") -> str:
    """How far forecasts miss published steps, and the one that is nearest."""
    from shardlab.planner.validation import nearest, summary, validate_published

    validated = validate_published()
    found = nearest(job, validated)
    alike = validated[(validated["hardware"] == job.card.name) & ~validated["calibration"]]
    if found is None:
        return f"nobody knows: no published step of {job.strategy} on {job.card.name} is in data"
    kept = "that were held out" if alike["held_out"].any() else "that were in sight while the formulas were written"
    alike = alike[alike["held_out"]] if alike["held_out"].any() else alike
    ours, (name, error) = summary(alike).loc["error"], found
    by = f"{abs(error):.0%} too {'long' if error > 0 else 'short'}"
    return (
        f"{ours['median']:.0%} in the median and {ours['worst']:.0%} at most on {len(alike)} published steps of "
        f"{job.card.name} {kept}; the nearest, {name}, is forecast {by}"
    )


def with_forecasts(
    rows: "pd.DataFrame", place: str, ranks: int, plans: Mapping[str, "Plan"], options: Mapping[str, Any],
    calibration: Path | None,
) -> tuple["pd.DataFrame", str]:  # fmt: skip
    """The rows of a plan with bytes at the peak, those of a calibrated machine with times; and how to take them."""
    import pandas as pd

    from shardlab.experiment.forecast import forecast_step
    from shardlab.experiment.named_workload import workload_at
    from shardlab.experiment.planned import to_plan
    from shardlab.lab.calibrate import differs_here
    from shardlab.planner.machine import Machine

    machine, found = None if calibration is None else Machine.load(calibration), {}
    with progress_bar(len(rows)) as advance:
        for name, plan in plans.items():
            config = to_plan(workload_at(place), ranks, (name,), device="cpu", **options)
            with suppress(RuntimeError):  # it needs values
                found[name] = forecast_step(config, name, machine, rank=plan.heaviest_rank)
            advance(name)
    peaks = [found[name].peak_bytes if name in found else None for name in rows["strategy"]]
    rows = rows.assign(peak_bytes=pd.array(peaks, "Int64"))
    unknown = ", ".join(name for name in plans if name not in found)
    note = unknown and f" Of {unknown} more is not known: a step needs values."
    if machine is None or not found:
        return rows, note
    first = min(found, key=lambda name: found[name].seconds)
    note += f" Times are those of {machine.name}: {machine.misses(first, ranks, found[first].seconds)}."
    if other := differs_here(machine):
        note += f" It was calibrated {other}: times of this machine may be others."
    if unmeasured := sorted({kind for one in found.values() for kind in one.unmeasured}):
        note += f" Of {' and '.join(unmeasured)} nothing was calibrated: times with them may be far off."
    if outside := [name for name, one in found.items() if one.is_outside]:
        note += f" Outside of what was calibrated, with larger operations or messages: {', '.join(outside)}."
    times = [round(1e3 * found[name].seconds, 1) if name in found else None for name in rows["strategy"]]
    return rows.assign(step_ms=pd.array(times, "Float64")), note


def calibrate(
    ranks: Annotated[str, typer.Option(help="Comma-separated: how many ranks at once.")] = "2,4",
    out: Annotated[Path, typer.Option(help="The file; a plan reads it with --calibration.")] = CALIBRATION,
) -> None:
    """Measure what this machine takes for operations and messages, for forecasts of time; leave it alone meanwhile."""
    from shardlab.lab.calibrate import calibrate as measure

    counts = [int(text) if text.isdigit() else 0 for text in names_in(ranks)]
    if not counts or min(counts) < 2:
        raise ValueError(f"ranks: {ranks!r} is given; give numbers from 2 on, such as 2,4")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"out: {out} cannot be written; name a file in an existing directory")
    with progress_bar(len(counts) + 1) as advance:
        machine = measure(counts, advance)
    machine.write(out)
    Console(highlight=False).print(f"Calibration: {out}", soft_wrap=True)


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
    from shardlab.experiment.named_workload import workload_at
    from shardlab.experiment.saved_runs import load_saved
    from shardlab.experiment.what_if import what_if as replayed

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


def validate(*, json: bool, calibration: Path) -> None:
    """Print how far forecasts miss: of published steps of GPUs, and of steps that are run here."""
    from shardlab.lab.validated_here import configurations, regret_of, validate_here
    from shardlab.planner.machine import Machine
    from shardlab.planner.validation import summary, validate_published

    published, machine = validate_published(), Machine.load(calibration)
    with progress_bar(len(configurations(machine))) as advance:
        here = validate_here(machine, advance)
    columns = here[["strategy", "ranks", "predicted", "measured"]]
    replace(machine, validated=tuple(columns.itertuples(index=False, name=None))).write(calibration)
    held_out, peaks = published["held_out"], published["peak_error"].abs().dropna()
    sets = {"published": published[~held_out], "held_out": published[held_out], "here": here}
    if json:
        found = {name: summary(rows).to_dict("index") for name, rows in sets.items()}
        more = {"worst_peak": peaks.max(), "regret": regret_of(here), "rows": here.to_dict("records")}
        typer.echo(json_text.dumps(found | more, indent=2))
        return
    console = Console(highlight=False)
    for name, rows in sets.items():
        table, steps = summary(rows), f"{int((~rows['calibration']).sum())} {SETS[name]}"
        shown = (100 * table).round(1).reset_index(names="forecast")
        shown["forecast"] = ["this one", "constant rate", "roofline"]
        console.print(table_of(shown, f"Misses of {steps}, %", 2))
        ours, toys = table.iloc[0], table.iloc[1:]
        if (toys[["p90", "worst"]] < ours[["p90", "worst"]]).any().any():
            console.print("A toy is better than this forecast in its 90th percentile or its worst case.", style="bold")
    most = published.iloc[published["error"].abs().argsort()[::-1][:2]][["name", "machine", "error"]]
    said = "; ".join(f"{name} ({machine}) by {error:+.1%}" for name, machine, error in most.itertuples(index=False))
    console.print(f"The two published steps that are missed by most: {said}.")
    console.print(f"Bytes at the peak of {len(peaks)} published steps are missed by {peaks.max():.1%} at most.")
    console.print(f"Choosing the strategy that is forecast to be fastest costs {regret_of(here):.1%} on average.")
    worst = here.reindex(here["error"].abs().sort_values(ascending=False).index).head(5)
    shown = worst[["strategy", "ranks", "rows", "link"]].assign(
        predicted=(1e3 * worst["predicted"]).round(1), measured=(1e3 * worst["measured"]).round(1),
        error=(100 * worst["error"]).round(1),
    )  # fmt: skip
    names = {"predicted": "predicted (ms)", "measured": "measured (ms)", "error": "error (%)"}
    console.print(table_of(shown.astype({"link": str}).rename(columns=names), "The five largest here", 2))
