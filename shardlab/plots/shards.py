"""Which slices of the parameters each rank holds, along the elements of all parameters."""

from math import prod

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.rows import one_run
from shardlab.plots.bars import gaps
from shardlab.plots.text import COUNT_UNITS, format_bytes, format_count, format_percent, scale, subtitle
from shardlab.plots.theme import GRID, RANKS, finish, new_figure, nothing
from shardlab.records.tables import SHARDS

MIN_LABEL_SHARE = 0.06
PLOT_PX, LETTER_PX = 700, 6.2  # a typical width of the plot; width of a letter of a slanted name


def shard_map(shards: pd.DataFrame, run: str | None = None, role: str = "parameter") -> go.Figure:
    """The slices of one role that each rank holds, along the elements of all parameters.

    Args:
        shards: table ``shards``, of all ranks.
        run: which run; None where the table holds one.
        role: 'parameter', 'gradient' or 'optimizer_state'.

    Raises:
        ValueError: there is no such run or role, there are several runs and none is named, or ranks are missing.
    """
    SHARDS.check(shards)
    if not len(shards):
        return nothing("Who holds which slice", "no shards recorded; they are written at the end of a run")
    rows = one_run(shards, run)
    roles = sorted(set(rows["role"]))
    if role not in roles:
        raise ValueError(f"role: {role!r} is not one of {', '.join(roles)}")
    extents = _extents(rows)
    end = int(extents["numel"].sum())
    rows = rows[(rows["role"] == role) & (rows["step"] == rows["step"].max())]
    rows = rows.drop_duplicates(["rank", "parameter", "start", "stop"])
    held = rows.drop_duplicates(["parameter", "start", "stop"]).groupby("parameter")[["start", "stop"]].sum()
    if (lost := held["stop"] - held["start"] < extents["numel"].reindex(held.index)).any():
        raise ValueError(f"shards: no rank holds all of {lost.idxmax()!r}; give the rows of all ranks")
    words = f"Who holds which slice of the {role.replace('_', ' ')}s: {rows['label'].iloc[0]}"
    figure = new_figure(words.replace("states:", "state:"), subtitle(rows, f"{format_count(end)} elements"))
    divisor, unit = scale(end, COUNT_UNITS)
    ranks = sorted(int(rank) for rank in set(rows["rank"]))
    for rank in ranks:
        own = rows[rows["rank"] == rank]
        begin = own["parameter"].map(extents["begin"]).to_numpy(dtype=np.float64)
        start, stop = (own[name].to_numpy(dtype=np.float64) for name in ("start", "stop"))
        figure.add_bar(
            base=(begin + start) / divisor, x=(stop - start) / divisor, y=[rank] * len(own), width=0.72,
            orientation="h", name=f"rank {rank}",
            marker={"color": RANKS[rank % len(RANKS)], "line": gaps(stop - start, end)},
            hovertext=[
                f"<b>{row['parameter']}</b> ({row['shape']})<br>rank {rank}: elements {row['start']:,} to "
                f"{row['stop']:,}<br>{row['stop'] - row['start']:,} elements, {format_bytes(row['bytes'])}"
                + (f"<br>bucket {row['bucket']}" if row["bucket"] >= 0 else "")
                for row in own.to_dict("records")
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    _shard_axes(figure, extents, ranks, divisor, unit)
    return finish(figure, _shard_summary(rows, role, end))


def _extents(rows: pd.DataFrame) -> pd.DataFrame:
    """First element and number of elements of each parameter, by name, bucket by bucket.

    Within a bucket, rank after rank: that is their order in a flat bucket, of which each rank lists its own part.
    """
    places = {bucket: place for place, bucket in enumerate(rows["bucket"].drop_duplicates())}
    rows = rows.sort_values("bucket", key=lambda buckets: buckets.map(places), kind="stable")
    shapes = rows.drop_duplicates("parameter").set_index("parameter")["shape"]
    numel = shapes.map(lambda shape: prod(int(size) for size in str(shape).split("x") if size.strip("()").isdigit()))
    return pd.DataFrame({"begin": numel.cumsum() - numel, "numel": numel}).astype("int64")


def _shard_axes(figure: go.Figure, extents: pd.DataFrame, ranks: list[int], divisor: float, unit: str) -> None:
    """Ranks downward; borders of parameters as lines; names above the parameters that are wide enough."""
    end, overhang = int(extents["numel"].sum()), 0.0
    for begin in extents["begin"][1:]:
        figure.add_vline(x=begin / divisor, line={"color": GRID, "width": 1})
    for parameter, extent in extents.iterrows():
        if extent["numel"] >= MIN_LABEL_SHARE * end:
            middle = extent["begin"] + extent["numel"] / 2
            is_level = extent["numel"] / end > 0.15  # else it is narrower than its name, which is slanted
            figure.add_annotation(
                x=middle / divisor, y=1, yref="paper", yanchor="bottom", text=str(parameter), showarrow=False,
                font_size=12, **({"textangle": 0} if is_level else {"textangle": -30, "xanchor": "left"}),
            )  # fmt: skip
            if not is_level:  # by how much it exceeds the right end, in a plot of typical width
                beside = PLOT_PX * (1 - middle / end)
                overhang = max(overhang, float(LETTER_PX * len(str(parameter)) - beside))
    figure.update_layout(barmode="overlay", height=max(346, 246 + 40 * len(ranks)), showlegend=False)
    figure.update_layout(margin_t=150, margin_r=24 + overhang)
    figure.update_xaxes(title_text=f"element ({unit})" if unit else "element", range=[0, end / divisor],
                        showgrid=False)  # fmt: skip
    figure.update_yaxes(tickvals=ranks, ticktext=[f"rank {rank}" for rank in ranks], showgrid=False,
                        range=[max(ranks) + 0.5, min(ranks) - 0.5])  # fmt: skip


def _shard_summary(rows: pd.DataFrame, role: str, numel: int) -> str:
    held = (rows["stop"] - rows["start"]).groupby(rows["rank"]).sum()
    low, high = int(held.min()), int(held.max())
    amount = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    share = format_percent(low / numel) + ("" if low == high else f" to {format_percent(high / numel)}")
    return (
        f"Run {rows['run'].iloc[0]}, {role.replace('_', ' ')}, {numel:,} elements: "
        f"{'the one rank' if len(held) == 1 else f'each of {len(held)} ranks'} holds {amount} elements ({share})."
    )
