"""``shardlab report``, ``trace`` and ``diff``: commands on existing records."""

import json as json_text
from collections.abc import Collection, Hashable, Mapping
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from shardlab.cli.console import count

if TYPE_CHECKING:
    from shardlab.experiment import CompareConfig, Comparison
    from shardlab.experiment.run_verdicts import Difference

ROOMY = 100  # columns of a terminal in which the table gets wider gaps
DISPENSABLE = ("overlap", "max_loss_difference", "exposed_comm_ms")  # left out in a narrow terminal, in this order
UNBOUNDED = 1000
NOTE = (
    "Times are medians; bytes are maxima over ranks, at rest; the peak is that of one traced step. Exposed: "
    "communication without compute at the same time; hidden: the share behind compute. Single trains on the rows of "
    "all ranks."
)
LOSSES_DIFFER = 1


class TraceFormat(StrEnum):
    """The tool that a trace is for."""

    PERFETTO = "perfetto"
    HTA = "hta"


Directory = Annotated[Path, typer.Argument(help="A comparison, or one run: DIR/records/STRATEGY.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")]


def report(directory: Directory, json: AsJson = False) -> None:
    """Write report.html again from existing records, and print its table; also for a run that was cut off."""
    from shardlab.experiment import load_saved, write_report  # torch takes 1.5 s to import
    from shardlab.recording.report import is_recorded

    if is_recorded(directory):
        _report_recorded(directory, json)
        return
    comparison, config = load_saved(directory)
    path = write_report(comparison, config)
    if json:
        print_json(comparison.summary)
    else:
        print_result(comparison, config, path)


def trace(
    directory: Directory,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write (.json, .json.gz); hta: a directory.")],
    strategy: Annotated[str | None, typer.Option(help="Which run, if there are several.")] = None,
    format: Annotated[TraceFormat, typer.Option(help="Perfetto, or Holistic Trace Analysis.")] = TraceFormat.PERFETTO,
) -> None:
    """Export a run for Perfetto (ui.perfetto.dev) or for Holistic Trace Analysis."""
    from shardlab.export import export_hta, write_perfetto
    from shardlab.trace.store import load_runs, run_directories

    records = load_runs(run_directories(directory))
    if strategy is None and len(records.manifests) > 1:
        raise ValueError(
            f"strategy: none given, and {directory} holds several; name one of {', '.join(records.manifests)}"
        )
    if format is TraceFormat.HTA:
        paths = export_hta(records, output, strategy)
        typer.echo(
            f"Wrote {count(len(paths), 'file')}: TraceAnalysis(trace_dir={str(output)!r}) reads them. "
            "They hold the steps that 'hidden' is of: neither the first nor the traced one, unless there are no others."
        )
    else:
        path = write_perfetto(records, output, strategy)
        typer.echo(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB): open it in https://ui.perfetto.dev")


def diff(
    first: Annotated[Path, typer.Argument(help="A comparison, or one run.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The other one.", show_default=False)],
    json: AsJson = False,
) -> None:
    """Compare two comparisons or runs: every number of each strategy, and whether the losses are equal."""
    from shardlab.experiment import load_saved
    from shardlab.experiment.run_verdicts import Difference
    from shardlab.recording.report import is_recorded

    if is_recorded(first) or is_recorded(second):
        _diff_recorded(first, second, json)
        return
    difference = Difference(load_saved(first), load_saved(second))
    if json:
        print_json(difference.table)
    else:
        _print_difference(difference)
    if not difference.losses_equal:
        raise typer.Exit(LOSSES_DIFFER)


def print_result(comparison: "Comparison", config: "CompareConfig", report: Path) -> None:
    """Print the table of a comparison, its verdicts, and the path of its report."""
    from shardlab.experiment.run_verdicts import peak_note, verdicts

    console = Console(highlight=False)
    table, left_out = _result_table(comparison, config, console)
    console.print(table)
    console.print(NOTE, style="dim")
    if left_out:
        console.print(f"Left out for lack of width: {', '.join(left_out)}; the report has all columns.", style="dim")
    if note := peak_note(comparison.summary):
        console.print(note, style="dim")
    console.print(*verdicts(comparison))
    console.print(f"Report: {report}", soft_wrap=True)


def _report_recorded(directory: Path, json: bool) -> None:
    """Write and print the report of a script recorded from outside."""
    from shardlab.experiment.summary import readable_summary
    from shardlab.plots.text import column_text
    from shardlab.recording.report import COLUMNS, caption, lead, load_recorded, write_report

    recorded = load_recorded(directory)
    path = write_report(recorded)
    if json:
        print_json(recorded.summary)
        return
    console = Console(highlight=False)
    shown = readable_summary(recorded.summary, COLUMNS)
    upright = shown.T.reset_index().set_axis(["quantity", "value"], axis=1)
    texts = upright.assign(value=[column_text(shown[name])[0] for name in shown.columns])
    console.print(table_of(texts, "", 2, right=("value",)))
    console.print(caption(recorded), style="dim")
    console.print(lead(recorded), soft_wrap=True)
    console.print(f"Report: {path}", soft_wrap=True)


def _diff_recorded(first: Path, second: Path, json: bool) -> None:
    """Print the numbers of two runs of which a script has made one or both: their losses are not comparable."""
    from shardlab.experiment import load_saved
    from shardlab.experiment.summary import differences, pairs_of, readable
    from shardlab.recording.report import is_recorded, load_recorded

    one, other = (
        load_recorded(path).summary if is_recorded(path) else load_saved(path)[0].summary for path in (first, second)
    )
    table = differences(one, other, pairs_of(list(one["strategy"]), list(other["strategy"])))
    if json:
        print_json(table)
        return
    _print_quantities(readable(table))
    Console(highlight=False).print("Losses were not compared: a script was recorded, and its data are not known.")


def _result_table(comparison: "Comparison", config: "CompareConfig", console: Console) -> tuple[Table, list[str]]:
    """The table, and the names of the columns that do not fit into the terminal."""
    from shardlab.experiment.summary import TERMINAL, readable_summary

    steps = int(comparison.summary["steps"].max())
    title = f"{config.title}, {count(config.ranks, 'rank')}, {count(steps, 'step')}"
    gap = 2 if console.width >= ROOMY else 0  # besides the one space between columns
    columns, left_out = dict(TERMINAL), list[str]()
    table = table_of(readable_summary(comparison.summary, columns), title, gap)
    for name in DISPENSABLE:
        if Measurement.get(console, console.options.update(max_width=UNBOUNDED), table).maximum <= console.width:
            break
        left_out.append(columns.pop(name)[0].replace("\n", " "))
        table = table_of(readable_summary(comparison.summary, columns), title, gap)
    return table, left_out


def _print_difference(difference: "Difference") -> None:
    _print_quantities(difference.readable)
    console = Console(highlight=False)
    for line in (*difference.settings, *difference.verdicts):
        console.print(line, soft_wrap=True)


def _print_quantities(readable: pd.DataFrame) -> None:
    console = Console(highlight=False)
    for strategy, rows in readable.groupby("strategy", sort=False):
        texts = pd.DataFrame([_texts(row) for row in rows.to_dict("records")])
        console.print(table_of(texts, str(strategy), 2, right=("first", "second", "difference", "ratio")))


def _texts(row: Mapping[Hashable, Any]) -> dict[str, str]:
    """A quantity of both runs as text. Each row has its own format, and losses need many digits."""
    from shardlab.plots.text import column_text

    values = [row["first"], row["second"], row["difference"]]
    is_loss = str(row["quantity"]).endswith("loss")
    texts = [f"{value:.7f}" for value in values] if is_loss else column_text(pd.Series(values, dtype="float64"))
    (ratio,) = column_text(pd.Series([row["ratio"]], dtype="float64"))
    return {"quantity": row["quantity"], "first": texts[0], "second": texts[1], "difference": texts[2], "ratio": ratio}


def table_of(shown: pd.DataFrame, title: str, gap: int, right: Collection[str] = ()) -> Table:
    """A table for the terminal; numbers and the columns ``right`` are aligned right."""
    from shardlab.plots.text import column_text

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, gap, 0, 0),
    )  # fmt: skip
    for name in shown.columns:
        numeric = name in right or pd.api.types.is_numeric_dtype(shown[name])
        # Where the terminal is too narrow, a name goes on in the next line; half a number says nothing.
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in zip(*(column_text(shown[name]) for name in shown.columns), strict=True):
        table.add_row(*row)
    return table


def print_json(table: pd.DataFrame) -> None:
    """Print rows as JSON; missing, infinite and NaN values are null."""
    rows = [
        {str(name): None if pd.isna(value) or value in (inf, -inf) else value for name, value in row.items()}
        for row in table.astype("object").to_dict("records")
    ]
    typer.echo(json_text.dumps(rows, indent=2, allow_nan=False))
