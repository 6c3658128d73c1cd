"""The timeline of one training step: what each rank computed, and which collectives ran at the same time.

Each rank has a track of compute (units of the model, optimizer) and a track of communication for each axis of the mesh.
The bar of a collective runs from the moment the transport begins it to its end. The thin grey strip before the bar is
the time in the queue; a thin red strip below compute is a rank that waits. A rank that neither computes nor waits,
because it sleeps or another process has its core, is off the CPU: that has a hatched bar of its own where compute
stands, without a name, which could not be read on it. (The recorder knows for how long it was so between two marks, not
when; the bar stands at their end.) There is one trace per kind and collective, however many bars.

Collectives of one axis that are in flight at the same time get rows below each other in its track.

A span of the whole model contains those of its blocks, which contain those of their layers. The level drawn is the
outermost at which there are at least two units: the blocks. Surrounding spans stay visible as a pale background, so
that time in the model but in no unit shows too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from shardlab.analysis import bandwidth, overlap
from shardlab.analysis.intervals import concurrent_rows
from shardlab.analysis.overlap import hidden_by_rank
from shardlab.analysis.rows import of_steps, one_step_of_run
from shardlab.plots import theme
from shardlab.plots.bars import gaps
from shardlab.plots.text import format_bytes, format_percent, format_us, subtitle
from shardlab.records.tables import COLLECTIVES, SPANS
from shardlab.vocabulary import WHOLE_MODEL, SpanKind

WAITS, QUEUED = "rank waits", "queued"
VISIBLE = 0.01  # of a step
COMPUTE = "compute"
MAX_ROWS = 6
MAX_BARS = 1000
RANK_GAP = 0.35
MAX_NAMED = 200  # with more bars none is wide enough for its name
Row = Mapping[str, Any]
Describe = Callable[[Row], str]
Tracks = dict[tuple[int, str], list[float]]
"""By rank and track the rows of it from top to bottom, as y downward from 0."""


def collective_timeline(
    collectives: pd.DataFrame, spans: pd.DataFrame, *, run: str | None = None, step: int | None = None, until_ms: float
    | None = None,
) -> go.Figure:  # fmt: skip
    """Tracks of compute and communication of one step of one run, in milliseconds from the start of the step.

    A step ends before its loss is reported: what sends it is left out.

    Args:
        collectives: table ``collectives``.
        spans: table ``spans``; may be empty.
        run: which run; None where the tables hold one.
        step: which step; None for the last.
        until_ms: length of the time axis, so that timelines can be compared; None for the length of the step.

    Raises:
        ValueError: there is no such run or step, there are several runs and none is named, or times are impossible.
    """
    COLLECTIVES.check(collectives)
    SPANS.check(spans)
    collectives = of_steps(collectives)
    if not len(collectives) and not len(spans):
        return theme.nothing("Timeline of a step", "no collectives and no spans recorded")
    moved, worked, both = one_step_of_run(collectives, spans, run, step)
    name, step = str(both["label"].iloc[0]), int(both["step"].iloc[0])
    measures = overlap(moved, worked)
    begin = float(np.nanmin([moved["issue_us"].min(), worked["start_us"].min()]))
    window = float(np.nanmax([moved["end_us"].max(), worked["end_us"].max()])) - begin
    tracks, places = lay_out(moved, worked)
    figure = theme.new_figure(f"Timeline of step {step}: {name}")
    levels = drawn_levels(worked)
    compute = {rank: rows[0] for (rank, track), rows in tracks.items() if track == COMPUTE}
    _draw_compute(figure, levels, compute, (begin, window))
    _draw_waits(figure, moved, compute, (begin, window))
    _draw_collectives(figure, moved.assign(y=places), (begin, window))
    _axes(figure, tracks)
    if until_ms is not None:
        figure.update_xaxes(range=[0, until_ms])
    figure.update_layout(title_subtitle_text=subtitle(both, _note(figure, levels, moved)))
    return theme.finish(figure, _summary(name, step, measures, (moved, worked), window))


def _note(figure: go.Figure, levels: pd.DataFrame, moved: pd.DataFrame) -> str:
    """What the legend does not say, after a note if some bars stand for several spans or collectives."""
    shown = sum(len(trace.x) for trace in figure.data if trace.name not in (WAITS, QUEUED))
    parts = [
        theme.thinning_note(len(levels) + len(moved), shown, "spans and collectives"),
        "pale: the model around its units" if levels["ground"].any() else "",
        "" if len(moved) else "no communication",
    ]
    return "; ".join(part for part in parts if part)


def _draw_compute(figure: go.Figure, spans: pd.DataFrame, y: dict[int, float], extent: tuple[float, float]) -> None:
    """One trace per kind for the units, and one for the pale background that surrounds them."""
    spans = spans.assign(y=spans["rank"].astype("int64").map(y).astype("float64"))
    for ground in (True, False):
        for kind, colour in theme.SPAN_COLOURS.items():
            rows = spans[(spans["kind"] == str(kind)) & (spans["ground"] == ground)]
            if len(rows):
                merged = grouped(rows, "unit", describe_span, extent)
                trace = bars(merged, kind_in_words(kind), colour, 0.62 if ground else 0.56)
                if ground:  # its name would show between the bars on top of it
                    trace.update(text=None)
                trace.update(opacity=0.3 if ground else 1.0, showlegend=not ground, legendgroup=str(kind))
                figure.add_trace(trace)


def _draw_waits(figure: go.Figure, moved: pd.DataFrame, y: dict[int, float], extent: tuple[float, float]) -> None:
    waits = moved[(moved["wait_end_us"] > moved["wait_start_us"]).fillna(False)]
    if not len(waits) or not y:
        return
    waits = waits.assign(
        y=waits["rank"].astype("int64").map(y), start_us=waits["wait_start_us"], end_us=waits["wait_end_us"]
    )
    drawn = grouped(waits, "tag", lambda row: f"<b>rank {row['rank']} waits</b> for {row['tag']}{_took(row)}", extent)
    figure.add_trace(strips(drawn, WAITS, theme.EXPOSED))


def _draw_collectives(figure: go.Figure, moved: pd.DataFrame, extent: tuple[float, float]) -> None:
    """One trace per collective, and one for the strips of queued collectives."""
    if not len(moved):
        return
    queued = moved[moved["start_us"] > moved["issue_us"]]
    queued = queued.assign(start_us=queued["issue_us"], end_us=queued["start_us"])
    if len(queued):
        drawn = grouped(queued, "tag", lambda row: f"<b>queued</b>: {row['tag']}{_took(row)}", extent)
        figure.add_trace(strips(drawn, QUEUED, theme.QUEUED))
    speeds = bandwidth(moved.drop(columns="y"))["bus_gb_per_s"]
    moved = moved.assign(bus_gb_per_s=speeds)
    for op, colour in theme.COLLECTIVE_COLOURS.items():
        rows = moved[moved["op"] == str(op)]
        if len(rows):
            merged = grouped(rows, "tag", describe_collective, extent)
            # First in the legend, of which a narrow page shows the first lines.
            figure.add_trace(bars(merged, str(op).replace("_", " "), colour, 0.56).update(legendrank=1))


def _axes(figure: go.Figure, tracks: Tracks) -> None:
    """A tick in the middle of each track; the first of a rank has the rank's name too."""
    names, named, num_rows = list[str](), set[int](), sum(map(len, tracks.values()))
    for rank, track in tracks:
        words = track if track == COMPUTE else f"{track} axis"
        names.append(words if rank in named else f"<b>rank {rank}</b>  {words}")
        named.add(rank)
    height = max(16.0, min(44.0, 1100 / num_rows))
    figure.update_layout(barmode="overlay", height=round(220 + height * num_rows), legend_font_size=13)
    figure.update_layout(uniformtext={"minsize": 11, "mode": "hide"})  # names that do not fit are left out
    figure.update_xaxes(title_text="time in the step (ms)", rangemode="tozero", zeroline=False)
    figure.update_yaxes(
        tickvals=[float(np.mean(rows)) for rows in tracks.values()], ticktext=names, showgrid=False, zeroline=False,
        range=[max(map(max, tracks.values())) + 0.6, -0.6],
    )  # fmt: skip
    for rank in sorted(named)[1:]:
        top = min(rows[0] for (owner, _), rows in tracks.items() if owner == rank)
        figure.add_hline(y=top - 0.5 - 0.175, line={"color": theme.GRID, "width": 1})


def _longest_off_cpu(worked: pd.DataFrame) -> str:
    """Which rank was off the CPU for longest; empty if none was for a visible time."""
    away = worked[worked["kind"] == str(SpanKind.OFF_CPU)]
    lengths = (away["end_us"] - away["start_us"]).groupby(away["rank"]).sum()
    window = float(worked["end_us"].max() - worked["start_us"].min())
    if lengths.empty or lengths.max() < VISIBLE * window:
        return ""
    return f" Rank {lengths.idxmax()} is off the CPU for {format_us(float(lengths.max()))} of it."


def _summary(
    name: str, step: int, measures: pd.DataFrame, tables: tuple[pd.DataFrame, pd.DataFrame], window: float
) -> str:
    moved, worked = tables
    ranks = measures["rank"].nunique()
    head = f"Step {step} of run {name}: {ranks} {'rank' if ranks == 1 else 'ranks'}, {format_us(window)}."
    head += _longest_off_cpu(worked)
    if not len(moved):
        return f"{head} No communication."
    sent = moved["wire_bytes"].sum(skipna=False) / moved["rank"].nunique()
    count = len(moved) / moved["rank"].nunique()
    verb = "collective a rank sends" if count == 1 else "collectives a rank send"
    hidden, exposed_us = hidden_by_rank(measures)["overlap"].median(), measures["exposed_us"].median()
    return (
        f"{head} {count:g} {verb} {format_bytes(float(sent))};"
        f" {format_percent(hidden)} of communication is hidden by compute,"
        f" {format_us(exposed_us)} exposed (medians over ranks)."
    )


def lay_out(collectives: pd.DataFrame, spans: pd.DataFrame) -> tuple[Tracks, NDArray[np.float64]]:
    """Tracks of one step, and the y of each collective.

    Args:
        collectives: rows of one step with ``start_us`` and ``end_us``.
        spans: rows of one step.
    """
    ranks = sorted({int(rank) for rank in [*spans["rank"], *collectives["rank"]]})
    axes = [str(axis) for axis in collectives["axis"].drop_duplicates()]
    has_compute = len(spans) > 0
    places, y, tracks = np.zeros(len(collectives)), 0.0, Tracks()
    for rank in ranks:
        here = (collectives["rank"] == rank).to_numpy(dtype=np.bool_)
        mine = [axis for axis in axes if (here & (collectives["axis"] == axis).to_numpy(dtype=np.bool_)).any()]
        for track in ([COMPUTE] if has_compute else []) + mine:
            where = np.flatnonzero(here & (collectives["axis"] == track).to_numpy(dtype=np.bool_))
            rows = concurrent_rows(collectives[["start_us", "end_us"]].iloc[where], MAX_ROWS)
            places[where] = y + rows
            tracks[rank, track] = [y + row for row in range(int(rows.max(initial=0)) + 1)]
            y += len(tracks[rank, track])
        y += RANK_GAP
    return tracks, places


def grouped(rows: pd.DataFrame, what: str, describe: Describe, extent: tuple[float, float]) -> pd.DataFrame:
    """Bars for rows with ``y``, ``start_us``, ``end_us``; rows within one column of the screen share a bar.

    Args:
        rows: spans or collectives of one trace.
        what: column with the name of a bar: ``unit`` or ``tag``.
        describe: makes the hover text of a row.
        extent: (beginning, length) of the figure in microseconds.

    Returns:
        ``y``, ``start`` and ``length`` (ms from the beginning), ``count`` (rows in the bar), ``name`` (written in
        the bar), ``text`` (shown on hover).
    """
    places = pd.DataFrame({
        "y": rows["y"].to_numpy(), "place": np.arange(len(rows)), "group": np.arange(len(rows)),
        **{name: rows[f"{name}_us"].to_numpy(dtype=np.float64) - extent[0] for name in ("start", "end")},
    })  # fmt: skip
    column = extent[1] / MAX_BARS
    if len(rows) > MAX_BARS and column > 0:  # otherwise each row has a column of the screen
        is_short = places["end"] - places["start"] < column
        places["group"] = places["group"].where(~is_short, -1 - places["start"] // column)
    same = places.groupby(["y", "group"], sort=False)
    merged = same.agg(start=("start", "min"), end=("end", "max"), count=("place", "size"), place=("place", "first"))
    counts = merged["count"].tolist()
    first: list[Any] = rows.iloc[merged["place"]].to_dict("records")
    many = "<b>{} merged</b>: zoomed out too far to tell them apart"
    return pd.DataFrame({
        "y": merged.index.get_level_values("y"), "start": merged["start"].to_numpy() / 1e3,
        "length": (merged["end"] - merged["start"]).to_numpy() / 1e3, "count": counts,
        # 'bucket 0' of 'gradients of bucket 0', since the colour says what moves.
        "name": [
            str(row[what]).rpartition(" of ")[2] if count == 1 else "" for row, count in zip(first, counts, strict=True)
        ],
        "text": [
            describe(row) if count == 1 else many.format(count) for row, count in zip(first, counts, strict=True)
        ],
    })  # fmt: skip


def bars(merged: pd.DataFrame, name: str, colour: str, width: float) -> go.Bar:
    """All bars of one kind as one trace."""
    start, length = (merged[column].to_numpy(dtype=np.float64) for column in ("start", "length"))
    pattern = theme.PATTERNS.get(colour)  # on which no name could be read
    return go.Bar(
        base=start, x=length, y=merged["y"].to_numpy(), width=width, orientation="h", name=name,
        marker={"color": colour, "line": gaps(length, float((start + length).max(initial=0.0))), "pattern": pattern},
        text=merged["name"].tolist() if len(merged) <= MAX_NAMED and not pattern else None, textposition="inside",
        insidetextanchor="middle", insidetextfont={"color": theme.readable_on(colour)}, textangle=0,
        hovertext=merged["text"].tolist(), hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def strips(merged: pd.DataFrame, name: str, colour: str) -> go.Bar:
    """Thin bars below those of ``bars``, for times in which nothing moved."""
    return bars(merged.assign(y=merged["y"] + 0.38), name, colour, 0.14).update(text=None, marker_line=None)


def kind_in_words(kind: str) -> str:
    """A kind of span as the legend names it."""
    # Not "data": an axis of the mesh is called so, and has a row of its own.
    return {SpanKind.OFF_CPU: "off the CPU", SpanKind.DATA: "loading data"}.get(SpanKind(kind), kind)


def describe_span(row: Row) -> str:
    """Hover text of a unit that computes, or that is off the CPU."""
    kind = kind_in_words(row["kind"])
    return f"<b>{row['unit'] or 'model'}</b>: {kind}, rank {row['rank']}{_took(row)}"


def describe_collective(row: Row) -> str:
    """Hover text of a collective: bytes, times, bandwidth, and whether the rank waited for it."""
    speed = float(row["bus_gb_per_s"])
    waited = all(pd.notna(row[name]) for name in ("wait_start_us", "wait_end_us"))
    group: str = f" of {row['group_size']}" if pd.notna(row["group_size"]) else ""
    lines = [
        f"<b>{row['op']}</b>: {row['tag']}, rank {row['rank']}{group} on {row['axis']}",
        f"{format_bytes(row['bytes'])} {row['dtype']}, {_sent(row)}",
        f"took {_length(row, 'start_us', 'end_us')}" + ("" if np.isnan(speed) else f", bus {speed:.3g} GB/s"),
        f"queued {_length(row, 'issue_us', 'start_us')}",
        f"the rank waited {_length(row, 'wait_start_us', 'wait_end_us')}" if waited else "the rank never waited for it",
        f"transport {row['transport']}, issued in {row['phase']}",
    ]
    return "<br>".join(lines)


def _sent(row: Row) -> str:
    needed, moved = float(row["wire_bytes"]), float(row.get("moved_bytes", np.nan))
    if abs(moved - needed) >= 1:  # not if it is not known
        return f"has to send {format_bytes(needed)}, sends {format_bytes(moved)}"
    return f"sends {format_bytes(needed)}"


def _took(row: Row) -> str:
    return f"<br>{_length(row, 'start_us', 'end_us')}"


def _length(row: Row, start: str, end: str) -> str:
    return format_us(float(row[end]) - float(row[start]))


def drawn_levels(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans to draw, with a column ``ground``: True for spans that only surround the level that is drawn.

    Args:
        spans: rows of table ``spans`` of one step; the level is chosen for each kind, over all ranks.
    """
    if not len(spans):
        return spans.assign(ground=False)
    rows = pd.concat([_with_depth(own) for _, own in spans.groupby(["kind", "rank"], sort=False)])
    level = rows["kind"].map({kind: _level(own) for kind, own in rows.groupby("kind")})
    return rows.assign(ground=(rows["depth"] < level) & ~rows["leaf"])[rows["depth"] <= level]


def _with_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """One rank's spans of one kind with ``depth`` (number of surrounding spans) and ``leaf`` (contains no span)."""
    # If two spans begin and end together, the whole model surrounds a unit, and a unit surrounds its parts.
    parts = rows["unit"].astype(str).where(rows["unit"] != WHOLE_MODEL, "")
    rows = rows.assign(depth=parts.str.count(r"\.") + (parts != ""))
    rows = rows.sort_values(["start_us", "end_us", "depth"], ascending=[True, False, True], kind="stable")
    ends = rows["end_us"].to_numpy(dtype=np.float64)
    depth = np.zeros(len(rows), dtype=np.intp)
    around: list[float] = []
    for index, (start, end) in enumerate(zip(rows["start_us"].to_numpy(dtype=np.float64), ends, strict=True)):
        while around and (around[-1] <= start or around[-1] < end):
            around.pop()
        depth[index] = len(around)
        around.append(end)
    return rows.assign(depth=depth, leaf=np.append(depth[1:] <= depth[:-1], True))


def _level(rows: pd.DataFrame) -> int:
    """The outermost depth with two or more units; 0 if every depth has only one."""
    units = rows.groupby("depth")["unit"].nunique()
    wide = units[units >= 2]
    return int(wide.index.min()) if len(wide) else 0
