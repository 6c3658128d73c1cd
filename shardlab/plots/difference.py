"""Two runs of the same strategies side by side: the change of each cost in percent."""

import math
from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.rows import require_columns
from shardlab.plots.text import format_bytes, format_us, listing
from shardlab.plots.theme import INK, dash, finish, new_figure, nothing, run_colours

# column of a summary -> its name in the figure, and how its values are written
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_ms": ("time of a step", lambda value: format_us(1e3 * value)),
    "exposed_comm_ms": ("exposed communication", lambda value: format_us(1e3 * value)),
    "peak_bytes": ("peak", format_bytes),
    "parameter_bytes": ("parameters", format_bytes),
    "gradient_bytes": ("gradients", format_bytes),
    "optimizer_bytes": ("optimizer state", format_bytes),
    "wire_bytes_per_step": ("bytes to send", format_bytes),
}
NAMED_CHANGE = 0.5  # percent: smaller changes count as none


def run_difference(
    first: pd.DataFrame, second: pd.DataFrame, names: tuple[str, str] = ("first", "second")
) -> go.Figure:
    """Change of each cost from one comparison to another, with a bar for each strategy that both have.

    Args:
        first: summary of a comparison: one row per strategy, the columns of ``summary.json``.
        second: the other summary.
        names: names of the two, for titles.

    Raises:
        ValueError: a column is missing; the message names it.
    """
    for name, summary in zip(names, (first, second), strict=True):
        require_columns(summary, ("strategy", *COSTS), f"summary {name!r}", "it comes from compare()")
    title = f"Change from {names[0]} to {names[1]}"
    changes = _changes(first, second)
    if changes.empty:
        return nothing(title, "they have no strategy in common")
    strategies = [str(name) for name in changes["strategy"].drop_duplicates()]
    moved = changes.groupby("cost", sort=False)["words"].transform(lambda words: (words != "").any())
    equal = [str(cost) for cost in changes.loc[~moved, "cost"].drop_duplicates()]
    if not moved.any():
        return nothing(title, f"nothing changed: {listing(equal)}")
    changes, given = changes[moved], changes
    figure = new_figure(title, f"unchanged: {listing(equal)}" if equal else "left: less than before; right: more")
    for strategy, colour in run_colours(strategies).items():
        figure.add_trace(_bars(changes[changes["strategy"] == strategy], strategy, colour))
    costs = [str(cost) for cost in changes["cost"].drop_duplicates()]
    largest = max(10.0, float(changes["percent"].abs().max()))
    figure.add_vline(x=0, line={"color": INK, "width": 1.5})
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.12, legend_traceorder="normal")
    figure.update_layout(height=200 + len(costs) * max(44, 22 * len(strategies)))
    low = min(0.0, float(changes["percent"].min()))
    high = max(0.0, float(changes["percent"].max()))
    figure.update_xaxes(title_text="change", range=[low - 0.3 * largest, high + 0.3 * largest], ticksuffix=" %")
    figure.update_yaxes(categoryorder="array", categoryarray=costs, autorange="reversed", showgrid=False)
    return finish(figure, _summary(given, names))


def _changes(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """One row per strategy and cost.

    Columns ``before`` and ``after`` (as text), ``percent`` (NaN if undefined), ``words`` (empty if unchanged).
    """
    before, after = first.set_index("strategy"), second.set_index("strategy")
    rows = []
    for strategy in (name for name in before.index if name in after.index):
        for column, (cost, words) in COSTS.items():
            one, other = (_number(table.loc[strategy, column]) for table in (before, after))
            percent = 0.0 if one == other else 100 * (other / one - 1) if one else float("nan")
            row = {"strategy": strategy, "cost": cost, "before": words(one), "after": words(other), "percent": percent}
            rows.append(row | {"words": _words(row["before"], row["after"], percent)})
    return pd.DataFrame(rows)


def _number(value: object) -> float:
    return float("nan") if pd.isna(value) else float(value)  # type: ignore[call-overload,arg-type]


def _bars(rows: pd.DataFrame, strategy: str, colour: str) -> go.Bar:
    return go.Bar(
        x=rows["percent"].fillna(0.0).to_numpy(), y=rows["cost"].tolist(), orientation="h", name=strategy,
        marker={"color": colour, "pattern": {"shape": "/" if dash(strategy) == "dot" else ""}},
        text=rows["words"].tolist(), textposition="outside", cliponaxis=False,
        customdata=rows[["before", "after"]].to_numpy().tolist(),
        hovertemplate=f"<b>{strategy}</b>, %{{y}}<br>%{{customdata[0]}} → %{{customdata[1]}}<extra></extra>",
    )  # fmt: skip


def _words(before: str, after: str, percent: float) -> str:
    if math.isnan(percent):
        return "" if before == after else f"{before} → {after}"
    return "" if abs(percent) < NAMED_CHANGE else f"{percent:+.0f} %".replace("-", "\u2212")


def _summary(changes: pd.DataFrame, names: tuple[str, str]) -> str:
    parts = []
    for strategy, rows in changes.groupby("strategy", sort=False):
        moved = rows[rows["words"] != ""].to_dict("records")
        words = listing([f"{row['cost']} {row['before']} to {row['after']}" for row in moved])
        parts.append(f"{strategy}: {words if moved else f'all {len(rows)} costs unchanged'}")
    return f"From {names[0]} to {names[1]}. {'; '.join(parts)}."
