"""``shardlab validate``: how far forecasts of time miss, of published steps and of steps that are run here."""

import json as json_text
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from shardlab.cli.calibrate import CALIBRATION
from shardlab.cli.console import progress_bar, table_of

if TYPE_CHECKING:
    from shardlab.forecast.machine import Machine

MISSES = ("median", "p90", "worst")
FORECASTS = {
    "": ("this one", "{median:.1f}, {p90:.1f}, {worst:.1f}"), "raw_": ("raw", "{median:.1f}, {worst:.1f}"),
    "constant_rate_": ("constant (rate)", "{median:.0f}, {worst:.0f}"),
    "roofline_": ("roofline", "{median:.0f}, {worst:.0f}"),
}  # fmt: skip
BY_LABORATORY = (
    "Median, 90th percentile (of this one), and worst. This one and the toys know a measured step of the machine where "
    "there is one, raw knows none. Known: how many steps are missed by no more than those of all other laboratories "
    "say, of how many they say it. In range: how many took what the range that is said of them has in it."
)
APART = {
    "host_bound": "published steps of small work, whose device waits for its host",
    "warned": "published steps with so little memory free that their forecasts warn of the allocator, and are a range "
    "to 1.5 times as long, since three of these jobs were 17 % faster with torch 2 (llm-foundry, torch2.md)",
}
SETS = {"published": "published steps", "held_out": "published steps that were held out", "here": "steps run here"}


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


def _validated(machine: "Machine", calibration: Path) -> pd.DataFrame:
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
    from shardlab.forecast.published import summary
    from shardlab.forecast.region import by_laboratory

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


def _tell_set(console: Console, name: str, rows: pd.DataFrame) -> None:
    """Print a table of misses, beside the toys."""
    from shardlab.forecast.published import summary

    table, steps = summary(rows), f"{int((~rows['calibration']).sum())} {SETS[name]}"
    lines = table.set_axis(["this one", "constant rate", "roofline"])
    if "warned" in rows:
        lines.loc["this one, not warned of"] = summary(rows[~rows["warned"]]).loc["error"]
    shown = (100 * lines.sort_index(key=lambda names: ~names.str.startswith("this"))).round(1)
    console.print(table_of(shown.reset_index(names="forecast"), f"Misses of {steps}, %", 2))
    ours, toys = table.iloc[0], table.iloc[1:]
    if (toys[["p90", "worst"]] < ours[["p90", "worst"]]).any().any():
        console.print("A toy is better than this forecast in its 90th percentile or its worst case.", style="bold")


def _tell_published(console: Console, published: pd.DataFrame) -> None:
    for name, rows in _sets(published).items():
        _tell_set(console, name, rows)
    from shardlab.forecast.published import summary
    from shardlab.forecast.region import by_laboratory
    from shardlab.forecast.search import published_regrets

    for name, which in APART.items():
        rows = published[published[name]]
        middle, p90, worst = summary(rows).loc["error"]
        said = f"missed by {middle:.1%} in the median, {p90:.1%} in the 90th percentile, {worst:.1%} at most"
        console.print(f"{int((~rows['calibration']).sum())} {which}: {said}.", soft_wrap=True)
    table = by_laboratory(published)
    shown = table[["laboratory", "steps"]].copy()
    shown["laboratory"] += table["tp"].map({True: ", tp", False: ""})
    for front, (title, form) in FORECASTS.items():
        shares = (100 * table[[f"{front}{name}" for name in MISSES]]).to_numpy()
        shown[title] = [form.format(**dict(zip(MISSES, row, strict=True))) for row in shares]
    for name, (some, of) in {"known": ("held", "known"), "in range": ("in_range", "steps")}.items():
        shown[name] = table[some].map("{}/".format) + table[of].map(str)
    titles = [title for title, _ in FORECASTS.values()]
    console.print(table_of(shown, "By laboratory, %", 1, right=titles))
    console.print(BY_LABORATORY, soft_wrap=True)
    regrets = sorted(published_regrets())
    console.print(
        f"Of {len(regrets)} published jobs with several ways the one that is ranked first is {median(regrets):.1%} "
        f"slower than the fastest in the median, {regrets[-1]:.1%} at most.",
        soft_wrap=True,
    )
    worst = published.iloc[int(published["error"].abs().argmax())]
    console.print(f"The worst of all is {worst['name']} ({worst['machine']}), missed by {worst['error']:+.1%}.")
    peaks = published["peak_error"].abs().dropna()
    console.print(f"Bytes at the peak of {len(peaks)} published steps are missed by {peaks.max():.1%} at most.")


def _tell_here(console: Console, here: pd.DataFrame) -> None:
    from shardlab.bench.validated_here import regret_of

    if differs := here.attrs["differs"]:
        console.print(f"It was calibrated {differs}: forecasts of now may miss by more; calibrate again.", style="bold")
    _tell_set(console, "here", here)
    console.print(f"Choosing the strategy that is forecast to be fastest costs {regret_of(here):.1%} on average.")
    worst = here.reindex(here["error"].abs().sort_values(ascending=False).index).head(5)
    shown = worst[["strategy", "ranks", "rows", "link"]].assign(
        predicted=(1e3 * worst["predicted"]).round(1), measured=(1e3 * worst["measured"]).round(1),
        error=(100 * worst["error"]).round(1),
    )  # fmt: skip
    names = {"predicted": "predicted (ms)", "measured": "measured (ms)", "error": "error (%)"}
    console.print(table_of(shown.astype({"link": str}).rename(columns=names), "The five largest here", 2))
