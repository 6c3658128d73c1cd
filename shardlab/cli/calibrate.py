"""``shardlab calibrate``: what this machine's ranks, or its card, take, for forecasts of time.

``shardlab validate``: how far these miss, of published steps and of steps that are run here.
"""

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Annotated, Any

import pandas as pd
import typer

from shardlab.cli import console
from shardlab.cli.console import answer_table, names_in, progress_bar, refuse_others, say, say_json, table_of
from shardlab.forecast.machine import Machine
from shardlab.forecast.published import summary, validate_published
from shardlab.forecast.region import by_laboratory
from shardlab.forecast.search import published_regrets

CALIBRATION, CARD, LIMIT_S = Path("machine.json"), Path("card.json"), 600.0
FORECASTS = {
    "this one": "{median:.1f}, {p90:.1f}, {worst:.1f}", "raw": "{raw_median:.1f}, {raw_worst:.1f}",
    "constant (rate)": "{constant_rate_median:.0f}, {constant_rate_worst:.0f}",
    "roofline": "{roofline_median:.0f}, {roofline_worst:.0f}",
}  # fmt: skip
BY_LABORATORY = (
    "Median, 90th percentile (of this one), and worst. This one and the toys know a measured step of the machine where "
    "there is one, raw knows none. Known: how many steps are missed by no more than those of all other laboratories "
    "say, of how many they say it. Within: how many took what the range that is said of them has in it."
)
APART = {
    "host_bound": "published steps of small work, whose device waits for its host",
    "warned": "published steps with so little memory free that their forecasts warn of the allocator, and are a range "
    "to 1.5 times as long, since three of these jobs were 17 % faster with torch 2 (llm-foundry, torch2.md)",
}
SETS = {"published": "published steps", "held_out": "published steps that were held out", "here": "steps run here"}


def calibrate(
    context: typer.Context,
    ranks: Annotated[
        str | None, typer.Option(help="Comma-separated: how many ranks at once; by default 2,4, with --quick 2.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file: by default machine.json, of a card card.json.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and readings: sooner, and less sure.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which no further part is begun.")] = LIMIT_S,
    device: Annotated[str, typer.Option(help="cpu: ranks of this machine. cuda: its first GPU.")] = "cpu",
) -> None:
    """Measure what this machine takes for operations and messages, for forecasts of time; leave it alone meanwhile.

    Parts that are measured are kept beside the file until it is whole: after an interrupt or the limit, go on by the
    same command. With --device cuda one card is measured: shardlab forecast and search take the file as --gpu.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r} is not one of cpu, cuda")
    out = out or (CALIBRATION if device == "cpu" else CARD)
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"out: {out} cannot be written; name a file in an existing directory")
    if device == "cuda":
        refuse_others(context, ("out", "device"), "of ranks on the CPU, and not of a card")
        return _calibrate_card(out)
    from shardlab.launch.placement import MOST_RANKS

    ranks = ("2" if quick else "2,4") if ranks is None else ranks
    counts = list(dict.fromkeys(int(text) if text.isdigit() else 0 for text in names_in(ranks)))
    if not counts or min(counts) < 2 or max(counts) > MOST_RANKS:
        raise ValueError(f"ranks: {ranks!r} is given; give numbers from 2 to {MOST_RANKS}, such as 2,4")
    if not limit > 0:
        raise ValueError(f"limit: {limit:g} is given; give seconds above 0")
    return _calibrate_ranks(counts, out, limit, quick=quick)


def _calibrate_ranks(counts: list[int], out: Path, limit: float, *, quick: bool) -> None:
    from shardlab.bench.calibrate import Calibration

    parts = out.with_name(f"{out.name}.part")
    calibration = Calibration(counts, is_quick=quick, path=parts)
    total, missing = len(calibration.parts), len(calibration.missing)
    if missing < total:
        said = f"{total - missing} of {total} parts were measured before; remove {parts} to measure them again"
        say(said, soft_wrap=True)
    code = 1
    try:
        with progress_bar(missing) as advance:
            calibration.measure(advance, limit)
    except KeyboardInterrupt:
        code = console.INTERRUPTED
    if left := len(calibration.missing):
        said = f"Stopped: {total - left} of {total} parts are measured, and kept in {parts}; the same command goes on"
        typer.echo(said, err=True)
        raise typer.Exit(code)
    calibration.machine().write(out)
    parts.unlink(missing_ok=True)
    say(f"Calibration: {out}", soft_wrap=True)


def _calibrate_card(out: Path) -> None:
    from shardlab.bench.calibrate_card import CudaCard, calibrate_card, parts

    device = CudaCard()
    with progress_bar(len([*parts(device)]), first="the card") as advance:
        found = calibrate_card(device, advance)
    gpu = found.gpu
    gpu.write(out)
    reached = {f"{name} products": share for name, share in gpu.product_fractions.items()}
    reached |= {"attention": gpu.attention_fraction, "memory": gpu.memory_fraction}
    host = ", ".join(f"{1e6 * seconds:.2g} us {kind}" for kind, seconds in gpu.host_seconds.items())
    say(answer_table([
        ("CARD", f"{gpu.name}: {gpu.source}"),
        ("REACHES", ", ".join(f"{share:.0%} of the peak in {name}" for name, share in reached.items())),
        ("A KERNEL", f"costs the host {host}"),
        *(("NOT MEASURED", f"{kind} launches, for which what is usual is taken: {why}") for kind, why in
          found.failed.items()),
        ("SHAPES", f"products of single shapes are up to {found.worst_product:.0%} from what they all say"),
        ("NEXT", f"shardlab forecast --config config.json --ranks 1 --gpu {quote(str(out))}"),
    ]))  # fmt: skip


def validate(
    calibration: Annotated[
        Path | None, typer.Option(help="The file of shardlab calibrate; by default machine.json, where there is one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the misses as JSON.")] = False,
) -> None:
    """Say how far forecasts of time miss: of published steps, and, where it was calibrated, of steps run here."""
    given = calibration or CALIBRATION
    # One that is named has to be there.
    machine = Machine.load(given) if calibration or given.exists() else None
    published = validate_published()
    if not json:
        _tell_published(published)  # before steps are run for minutes
    here = None if machine is None else _validated(machine, given)
    if json:
        say_json(_misses(published, here))
    elif here is not None:
        _tell_here(here)
    else:
        said = f"Of this machine nothing is said: {given} is not there; shardlab calibrate, then this again."
        say(said, soft_wrap=True)


def _validated(machine: Machine, calibration: Path) -> pd.DataFrame:
    """Steps that are forecast and run here, and how the calibrated machine differs; the calibration keeps the steps."""
    from shardlab.bench.calibrate import differs_here
    from shardlab.bench.validated_here import configurations, validate_here

    differs = differs_here(machine)  # before it is busy
    with progress_bar(len(configurations(machine))) as advance:
        here = validate_here(machine, advance)
    columns = here[["strategy", "ranks", "predicted", "measured"]]
    replace(machine, validated=tuple(columns.itertuples(index=False, name=None))).write(calibration)
    here.attrs["differs"] = differs
    return here


def _sets(published: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {"published": published[~published["held_out"]], "held_out": published[published["held_out"]]}


def _misses(published: pd.DataFrame, here: pd.DataFrame | None) -> dict[str, Any]:
    from shardlab.bench.validated_here import regret_of

    sets = _sets(published) | ({} if here is None else {"here": here})
    found: dict[str, Any] = {name: summary(rows).to_dict("index") for name, rows in sets.items()}
    found["by_laboratory"] = by_laboratory(published).to_dict("records")
    apart = {name: published[published[name]] for name in APART}
    apart |= {f"{name}_not_warned": rows[~rows["warned"]] for name, rows in _sets(published).items()}
    found |= {name: summary(rows).loc["error"].to_dict() for name, rows in apart.items()}
    found["worst_peak"] = published["peak_error"].abs().max()
    if here is None:
        return found
    return found | {"regret": regret_of(here), "differs": here.attrs["differs"], "rows": here.to_dict("records")}


def _tell_set(name: str, rows: pd.DataFrame) -> None:
    """Print a table of misses, beside the toys."""
    table, steps = summary(rows), f"{int((~rows['calibration']).sum())} {SETS[name]}"
    lines = table.set_axis(["this one", "constant rate", "roofline"])
    if "warned" in rows:
        lines.loc["this one, not warned of"] = summary(rows[~rows["warned"]]).loc["error"]
    shown = (100 * lines.sort_index(key=lambda names: ~names.str.startswith("this"))).round(1)
    say(table_of(shown.reset_index(names="forecast"), f"Misses of {steps}, %", 2))
    ours, toys = table.iloc[0], table.iloc[1:]
    if (toys[["p90", "worst"]] < ours[["p90", "worst"]]).any().any():
        say("A toy is better than this forecast in its 90th percentile or its worst case.", style="bold")


def _tell_published(published: pd.DataFrame) -> None:
    for name, rows in _sets(published).items():
        _tell_set(name, rows)
    for name, which in APART.items():
        rows = published[published[name]]
        middle, p90, worst = summary(rows).loc["error"]
        said = f"missed by {middle:.1%} in the median, {p90:.1%} in the 90th percentile, {worst:.1%} at most"
        say(f"{int((~rows['calibration']).sum())} {which}: {said}.", soft_wrap=True)
    table = by_laboratory(published)
    shown = table[["laboratory", "steps"]].copy()
    shown["laboratory"] += table["tp"].map({True: " tp", False: ""})
    misses = (100 * table.select_dtypes("number")).to_dict("records")
    for title, form in FORECASTS.items():
        shown[title] = [form.format(**{str(name): miss for name, miss in row.items()}) for row in misses]
    for name, (some, of) in {"known": ("held", "known"), "within": ("in_range", "steps")}.items():
        shown[name] = table[some].map("{}/".format) + table[of].map(str)
    say(table_of(shown, "By laboratory, %", 0, right=FORECASTS))
    say(BY_LABORATORY, soft_wrap=True)
    regrets = sorted(published_regrets())
    say(
        f"Of {len(regrets)} published jobs with several ways the one that is ranked first is {median(regrets):.1%} "
        f"slower than the fastest in the median, {regrets[-1]:.1%} at most.",
        soft_wrap=True,
    )
    worst = published.iloc[int(published["error"].abs().argmax())]
    say(f"The worst of all is {worst['name']} ({worst['machine']}), missed by {worst['error']:+.1%}.")
    peaks = published["peak_error"].abs().dropna()
    say(f"Bytes at the peak of {len(peaks)} published steps are missed by {peaks.max():.1%} at most.")


def _tell_here(here: pd.DataFrame) -> None:
    from shardlab.bench.validated_here import regret_of

    if differs := here.attrs["differs"]:
        say(f"It was calibrated {differs}: forecasts of now may miss by more; calibrate again.", style="bold")
    _tell_set("here", here)
    say(f"Choosing the strategy that is forecast to be fastest costs {regret_of(here):.1%} on average.")
    worst = here.reindex(here["error"].abs().sort_values(ascending=False).index).head(5)
    shown = worst[["strategy", "ranks", "rows", "link"]].assign(
        predicted=(1e3 * worst["predicted"]).round(1), measured=(1e3 * worst["measured"]).round(1),
        error=(100 * worst["error"]).round(1),
    )  # fmt: skip
    names = {"predicted": "predicted (ms)", "measured": "measured (ms)", "error": "error (%)"}
    say(table_of(shown.astype({"link": str}).rename(columns=names), "The five largest here", 2))
