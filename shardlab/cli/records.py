"""``shardlab record``, and the commands on records that exist: ``report``, ``trace``, ``modules`` and ``diff``."""

from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from shardlab import experiment  # whose names are imported when they are used: they need torch, which takes 1.5 s
from shardlab.cli.console import answer_table, count, in_units, say, say_json, table_of
from shardlab.records.store import load_runs, run_directories

DISPENSABLE = ("overlap", "max_loss_difference", "exposed_comm_ms")  # left out in a narrow terminal, in this order
UNBOUNDED = 1000
LOSSES_DIFFER = 1  # an exit code
NOTE = (
    "Times are medians; bytes are maxima over ranks, at rest; the peak is the highest of the traced steps. Exposed: "
    "communication without compute at the same time; hidden: the share behind compute. Single trains on the rows of "
    "all ranks."
)
OF_A_MODULE = {
    "parameter_bytes": "params", "gradient_bytes": "grads", "optimizer_bytes": "optim", "offloaded_bytes": "host",
    "other_bytes": "other", "bytes": "all",
}  # fmt: skip
SCRIPT_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Arguments after the script belong to the script, even if they look like options."""


class TraceFormat(StrEnum):
    """The tool that a trace is for."""

    PERFETTO = "perfetto"
    HTA = "hta"


Directory = Annotated[Path, typer.Argument(help="A comparison, or one run: DIR/records/STRATEGY.", show_default=False)]
Strategy = Annotated[str | None, typer.Option(help="Which run, if there are several.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the rows, and the answer, as JSON.")]


def record(
    script: Annotated[Path, typer.Argument(help="A Python script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="A new or empty directory; by default runs/DATE.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the record that is in --out.")] = False,
    watch_every: Annotated[
        int, typer.Option(min=1, help="Record what is sent, exposed or hidden in the first 16 steps, then in one in N.")
    ] = 16,
) -> Any:
    """Run a script that knows nothing of shardlab, and record it; under torchrun every rank of it.

    The output, the errors and the exit code are the script's own. Then: shardlab report DIR.
    """
    from shardlab.recording.record import directory_by_date, recorded_script

    # Called by main, when the command line has been dealt with: what the script raises is no error of an option.
    directory = out or directory_by_date()
    run = recorded_script(script, arguments or (), directory, overwrite=overwrite, watch_every=watch_every)
    if out is None and experiment.is_reporter():
        said = f"records go to {directory}; then: shardlab report {directory}"
        Console(stderr=True, highlight=False).print(said, soft_wrap=True)
    return run


def report(directory: Directory, json: AsJson = False) -> None:
    """Write report.html again from existing records, and print its table; also for a run that was cut off."""
    from shardlab.experiment.told.answer import answer
    from shardlab.recording.report import is_recorded

    if is_recorded(directory):
        _report_recorded(directory, json)
        return
    comparison, config = experiment.load_saved(directory)
    path = experiment.write_report(comparison, config)
    if json:
        print_json(comparison.summary, answer(comparison, config))
    else:
        print_result(comparison, config, path)


def trace(
    directory: Directory,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write (.json, .json.gz); hta: a directory.")],
    strategy: Strategy = None,
    format: Annotated[TraceFormat, typer.Option(help="Perfetto, or Holistic Trace Analysis.")] = TraceFormat.PERFETTO,
) -> None:
    """Export a run for Perfetto (ui.perfetto.dev) or for Holistic Trace Analysis."""
    from shardlab.export import export_hta, write_perfetto

    records = load_runs([_run(directory, strategy)])
    if format is TraceFormat.HTA:
        paths = export_hta(records, output)
        typer.echo(
            f"Wrote {count(len(paths), 'file')}: TraceAnalysis(trace_dir={str(output)!r}) reads them. "
            "They hold the steps that 'hidden' is of: neither the first nor the traced one, unless there are no others."
        )
    elif not output.name.endswith((".json", ".json.gz")):
        raise ValueError(f"output: {output} is given; name a file that ends with .json or .json.gz")
    else:
        path = write_perfetto(records, output)
        typer.echo(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB): open it in https://ui.perfetto.dev")


def modules(
    directory: Directory,
    strategy: Strategy = None,
    depth: Annotated[int | None, typer.Option(help="Parts of a module's name that count: 2 for blocks.3.")] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank; by default the one that holds the most.")] = None,
    json: AsJson = False,
) -> None:
    """Print the bytes that a rank holds of each module: parameters, gradients, optimizer state."""
    from shardlab.analysis.held_bytes import held_at_rest, module_bytes

    records = load_runs([_run(directory, strategy)])
    if not len(records.shards):
        raise ValueError(f"run: {directory} does not say who holds what; only a finished comparison does")
    table = module_bytes(records.shards, held_at_rest(records.memory), depth)
    ranks = table.groupby("rank")["bytes"].sum()
    chosen = sorted(ranks.index, key=lambda known: -ranks[known])[0] if rank is None else rank
    if chosen not in ranks.index:
        raise ValueError(f"rank: {chosen} is not one of {', '.join(map(str, ranks.index))}")
    own = table[table["rank"] == chosen].drop(columns=["run", "source", "rank"])
    if json:
        print_json(own)
        return
    title = f"{records.shards['run'].iloc[0]}, rank {chosen}, at rest"
    _print_modules(own.set_index("module"), set(table["module"]), title)


def diff(
    first: Annotated[Path, typer.Argument(help="A comparison, or one run.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The other one.", show_default=False)],
    json: AsJson = False,
) -> None:
    """Compare two comparisons or runs: every number of each strategy, and whether the losses are equal."""
    from shardlab.experiment.told.differences import differences, losses_compared, readable, set_otherwise
    from shardlab.recording.report import is_recorded, load_recorded

    if is_recorded(first) or is_recorded(second):
        one, other = (
            load_recorded(path) if is_recorded(path) else experiment.load_saved(path)[0] for path in (first, second)
        )
        most = {name: (int(one.summary[name].max()), int(other.summary[name].max())) for name in ("ranks", "steps")}
        lines = [f"{name}: {a} in the first, {b} in the second" for name, (a, b) in most.items() if a != b]
        lines.append("Losses were not compared: a script was recorded, and its data are not known.")
        are_equal = True
    else:
        saved = experiment.load_saved(first), experiment.load_saved(second)
        (one, _), (other, _) = saved
        losses = losses_compared(*saved)
        lines, are_equal = [*set_otherwise(*saved), *(said for _, said in losses)], all(equal for equal, _ in losses)
    table = differences(one.summary, other.summary)
    if json:
        print_json(table)
    else:
        _print_quantities(readable(table))
        for line in lines:
            say(line, soft_wrap=True)
    if not are_equal:
        raise typer.Exit(LOSSES_DIFFER)


def print_result(comparison: "experiment.Comparison", config: "experiment.CompareConfig", report: Path) -> None:
    """Print the answer of a comparison, its table, verdicts, and the path of its report."""
    from shardlab.experiment.told.answer import answer
    from shardlab.experiment.told.verdicts import verdicts

    say(answer_table(answer(comparison, config)))
    table, left_out = _result_table(comparison, config)
    say(table)
    say(NOTE, style="dim")
    if left_out:
        say(f"Left out for lack of width: {', '.join(left_out)}; the report has all columns.", style="dim")
    if said := verdicts(comparison):
        say(*said)
    say(f"Report: {report}", soft_wrap=True)


def _run(directory: Path, strategy: str | None) -> Path:
    """The directory of the one run that is meant."""
    found = {path.name: path for path in run_directories(directory)}
    if strategy is None and len(found) == 1:
        return next(iter(found.values()))
    if strategy not in found:
        names = ", ".join(found)
        said = "none given; name" if strategy is None else f"{strategy!r} is not"
        raise ValueError(f"strategy: {said} one of {names}, the runs in {directory}")
    return found[strategy]


def _report_recorded(directory: Path, json: bool) -> None:
    """Write and print the report of a script recorded from outside."""
    from shardlab.experiment.told.summary import readable_summary
    from shardlab.plots.text import column_text
    from shardlab.recording.report import COLUMNS, answer_of_record, caption, lead, load_recorded, write_report

    recorded = load_recorded(directory)
    path = write_report(recorded)
    said = answer_of_record(recorded)
    if json:
        print_json(recorded.summary, said)
        return
    say(answer_table(said))
    shown = readable_summary(recorded.summary, COLUMNS)
    upright = shown.T.reset_index().set_axis(["quantity", "value"], axis=1)
    texts = upright.assign(value=[column_text(shown[name])[0] for name in shown.columns])
    say(table_of(texts, "", 2, right=("value",)))
    say(caption(recorded), style="dim")
    say(lead(recorded), soft_wrap=True)
    say(f"Report: {path}", soft_wrap=True)


def _result_table(comparison: "experiment.Comparison", config: "experiment.CompareConfig") -> tuple[Table, list[str]]:
    """The table, and the names of the columns that do not fit into the terminal."""
    from shardlab.experiment.told.summary import TERMINAL, readable_summary

    steps = int(comparison.summary["steps"].max())
    title = f"{config.title}, {count(config.ranks, 'rank')}, {count(steps, 'step')}"
    console, columns, left_out = Console(), dict(TERMINAL), list[str]()
    for name in ("", *DISPENSABLE):
        if name:
            left_out.append(columns.pop(name)[0].replace("\n", " "))
        shown = readable_summary(comparison.summary, columns)
        table = table_of(shown, title)
        for strategy in comparison.failed:  # verdicts say why
            table.add_row(strategy, *["–"] * (len(shown.columns) - 1))
        if Measurement.get(console, console.options.update(max_width=UNBOUNDED), table).maximum <= console.width:
            break
    return table, left_out


def _print_modules(held: pd.DataFrame, modules: set[str], title: str) -> None:
    """Without columns of zeros; what this rank holds nothing of is named."""
    from shardlab.plots.text import format_bytes

    say(table_of(in_units(held.reset_index(), OF_A_MODULE, {}, add_up=True), title))
    say(f"In all {format_bytes(held['bytes'].sum())}.")
    if elsewhere := sorted(modules - set(held.index)):
        say(f"This rank holds nothing of {', '.join(elsewhere)}: other ranks do.")


def _print_quantities(readable: pd.DataFrame) -> None:
    for strategy, rows in readable.groupby("strategy", sort=False):
        texts = pd.DataFrame([_texts(row) for row in rows.to_dict("records")])
        say(table_of(texts, str(strategy), 2, right=("first", "second", "difference", "ratio")))


def _texts(row: Mapping[Hashable, Any]) -> dict[str, str]:
    """A quantity of both runs as text. Each row has its own format, and losses need many digits."""
    from shardlab.plots.text import column_text

    values = [row["first"], row["second"], row["difference"]]
    is_loss = str(row["quantity"]).endswith("loss")
    texts = [f"{value:.7f}" for value in values] if is_loss else column_text(pd.Series(values, dtype="float64"))
    (ratio,) = column_text(pd.Series([row["ratio"]], dtype="float64"))
    return {"quantity": row["quantity"], "first": texts[0], "second": texts[1], "difference": texts[2], "ratio": ratio}


def print_json(table: pd.DataFrame, said: Iterable[tuple[str, str]] = (), **others: pd.DataFrame | None) -> None:
    """Print rows as JSON, and with an answer that and ``others``; missing, infinite and NaN values are null."""
    rows, beside = _rows_of(table), {name: _rows_of(one) for name, one in others.items() if one is not None}
    found = {"answer": dict(said), "strategies": rows, **beside} if said else rows
    say_json(found)


def _rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(name): None if pd.isna(value) or value in (inf, -inf) else value for name, value in row.items()}
        for row in table.astype("object").to_dict("records")
    ]
