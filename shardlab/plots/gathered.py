"""Which units of an FSDP engine are gathered at each moment of a step."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.colours import INK, PALETTE
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.units import byte_scale, format_bytes

COLUMNS = ("sample", "moment", "unit", "bytes")
TITLE = "Gathered parameters over a step"


def gathered_over_a_step(
    table: pd.DataFrame, limit_bytes: float | None = None, title: str = TITLE, *, limit_name: str = "predicted"
) -> go.Figure:
    """Bytes of gathered parameters as stacked bars, a bar per moment and a colour per unit.

    Args:
        table: of one rank, from ``experiment.gathered.gathered_table``.
        limit_bytes: a dashed line, such as what was predicted; None for none.
        title: of the figure.
        limit_name: what the dashed line is.

    Raises:
        ValueError: a column is missing.
    """
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise ValueError(f"table: missing columns {missing}; it comes from gathered_table")
    if table.empty:
        return nothing(title, "no samples")
    totals = table.groupby("sample")["bytes"].sum()
    divisor, name = byte_scale(max(float(totals.max()), limit_bytes or 0.0))
    figure = new_figure(title, "a bar is a moment at which a unit begins (labelled) or has ended; a colour is a unit")
    units = list(dict.fromkeys(str(unit) for unit in table["unit"]))
    for place, unit in enumerate(units):
        rows = table[(table["unit"] == unit) & (table["bytes"] > 0)]
        figure.add_trace(_bars(rows, unit, PALETTE[place % len(PALETTE)], divisor))
    if limit_bytes is not None:
        figure.add_hline(
            y=limit_bytes / divisor, line={"color": INK, "width": 2, "dash": "dash"},
            annotation_text=f"{limit_name}: {format_bytes(limit_bytes)}", annotation_position="top left",
        )  # fmt: skip
    _axes(figure, table.drop_duplicates("sample"), name)
    return finish(figure, _summary(table, units, limit_bytes))


def _bars(rows: pd.DataFrame, unit: str, colour: str, divisor: float) -> go.Bar:
    return go.Bar(
        x=rows["sample"].to_numpy(),
        y=(rows["bytes"] / divisor).to_numpy(),
        name=unit,
        marker={"color": colour, "line": {"width": 0}},
        customdata=[[moment, format_bytes(size)] for moment, size in zip(rows["moment"], rows["bytes"], strict=True)],
        hovertemplate=f"<b>{unit}</b><br>at: %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>",
    )


def _axes(figure: go.Figure, moments: pd.DataFrame, unit: str) -> None:
    begins = moments[moments["moment"].str.endswith((" forward", " backward"))]
    words = begins["moment"].str.replace(r"(forward|backward)$", "", regex=True).str.strip().str.split(".").str[-1]
    figure.update_layout(barmode="stack", bargap=0.06, legend_traceorder="normal")
    figure.update_xaxes(
        title_text="moment: forward, then backward",
        tickvals=begins["sample"].to_numpy(),
        ticktext=words.tolist(),
        range=[-0.6, float(moments["sample"].max()) + 0.6],
        showgrid=False,
        tickangle=0,
    )
    figure.update_yaxes(title_text=f"gathered ({unit})", rangemode="tozero")
    backward = begins.loc[begins["moment"].str.endswith(" backward"), "sample"]
    if len(backward):
        figure.add_vline(
            x=float(backward.min()) - 0.5, line={"color": INK, "width": 1, "dash": "dot"},
            annotation_text="backward", annotation_position="top right",
        )  # fmt: skip


def _summary(table: pd.DataFrame, units: list[str], limit_bytes: float | None) -> str:
    at_once = int(table.groupby("sample")["bytes"].sum().max())
    num_units = int((table["bytes"] > 0).groupby(table["sample"]).sum().max())
    predicted = "" if limit_bytes is None else f", predicted {format_bytes(limit_bytes)}"
    return (
        f"Gathered parameters over a step of {len(units)} units: at most {format_bytes(at_once)} "
        f"in {num_units} units at once{predicted}."
    )
