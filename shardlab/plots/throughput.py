"""Throughput against the batch of a rank: measured as marks, predicted as lines; two lines cross at break-even."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.colours import run_colours
from shardlab.plots.labels import emulated_note, joined, listing
from shardlab.plots.loss import SYMBOLS
from shardlab.plots.theme import finish, log_axis, new_figure, nothing
from shardlab.plots.units import format_count, tick

TITLE = "Throughput against the batch of a rank"
COLUMNS = ("run", "source", "rows", "tokens_per_s")
PREDICTED = "predicted"


def throughput(table: pd.DataFrame) -> go.Figure:
    """Tokens a second of all ranks together over the rows of one rank, both axes logarithmic.

    Args:
        table: columns ``run``, ``source`` ('predicted' is drawn as a line, all else as marks), ``rows`` (sequences of
            one rank in a step), ``tokens_per_s``; both numbers above zero.

    Raises:
        ValueError: a column is missing, or a number is not above zero.
    """
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise ValueError(f"table: missing columns {missing}; needs {', '.join(COLUMNS)}")
    if table.empty:
        return nothing(TITLE, "nothing measured")
    if not (table[["rows", "tokens_per_s"]] > 0).all(axis=None):
        raise ValueError("table: rows and tokens_per_s must be above 0 for logarithmic axes")
    figure = new_figure(TITLE, joined(emulated_note(table), "marks: measured; lines: predicted"))
    runs = [str(run) for run in table["run"].drop_duplicates()]
    for place, (run, colour) in enumerate(run_colours(runs).items()):
        for is_line in (True, False):
            rows = table[(table["run"] == run) & ((table["source"] == PREDICTED) == is_line)].sort_values("rows")
            if len(rows):
                figure.add_trace(_trace(rows, run, colour, None if is_line else SYMBOLS[place % len(SYMBOLS)]))
    sizes = sorted(table.loc[table["source"] != PREDICTED, "rows"].unique()) or sorted(table["rows"].unique())
    figure.update_xaxes(type="log", title_text="rows of a rank in a step (logarithmic)", tickvals=sizes, ticktext=sizes)
    speeds = log_axis(table["tokens_per_s"].tolist(), lambda speed: tick(format_count(speed)))
    figure.update_yaxes(title_text="tokens a second, all ranks", **speeds)
    return finish(figure, _summary(table, runs))


def _trace(rows: pd.DataFrame, run: str, colour: str, symbol: str | None) -> go.Scatter:
    kind = PREDICTED if symbol is None else "measured"
    trace = go.Scatter(
        x=rows["rows"].to_numpy(),
        y=rows["tokens_per_s"].to_numpy(),
        mode="lines" if symbol is None else "markers",
        name=run if symbol is not None else f"{run}, predicted",
        legendgroup=run,
        showlegend=symbol is not None,
        customdata=[tick(format_count(value)) for value in rows["tokens_per_s"]],
        hovertemplate=f"<b>{run}</b>, {kind}<br>%{{x}} rows a rank<br>%{{customdata}} tokens a second<extra></extra>",
    )
    style = {"line": {"color": colour, "width": 2.5}} if symbol is None else {
        "marker": {"color": colour, "symbol": symbol, "size": 11}
    }  # fmt: skip
    return trace.update(style)


def _summary(table: pd.DataFrame, runs: list[str]) -> str:
    measured = table[table["source"] != PREDICTED]
    parts = []
    for run in runs:
        rows = measured[measured["run"] == run].sort_values("rows")
        if len(rows):
            first, last = rows.iloc[0], rows.iloc[-1]
            parts.append(
                f"{run} {format_count(first['tokens_per_s'])} with {first['rows']:g} rows a rank and "
                f"{format_count(last['tokens_per_s'])} with {last['rows']:g}"
            )
    return f"Tokens a second: {listing(parts)}."
