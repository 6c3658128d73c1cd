"""The timeline of one training step: what each rank computed, and which collectives ran at the same time.

Each rank has a track of compute (units of the model, optimizer) and a track of communication for each axis of the mesh.
The bar of a collective runs from the moment the transport begins it to its end. The thin strip before the bar is the
time in the queue; a strip below compute is a rank that waits. A rank that neither computes nor waits, because it sleeps
or another process has its core, is off the CPU: that has a bar of its own where compute stands. (The recorder knows for
how long it was so between two marks, not when; the bar stands at their end.) There is one trace per kind and
collective, however many bars.
"""

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import bandwidth, overlap
from shardlab.analysis.overlap import hidden_by_rank
from shardlab.analysis.rows import one_step_of_run
from shardlab.plots.text import format_bytes, format_percent, format_us, subtitle
from shardlab.plots.theme import (
    COLLECTIVE_COLOURS,
    EXPOSED,
    GREY,
    GRID,
    SPAN_COLOURS,
    finish,
    new_figure,
    nothing,
    thinning_note,
)
from shardlab.plots.timeline_bars import (
    Tracks,
    bars,
    describe_collective,
    describe_queue,
    describe_span,
    describe_wait,
    drawn_levels,
    grouped,
    kind_in_words,
    lay_out,
    strips,
)
from shardlab.tables import COLLECTIVES, SPANS
from shardlab.vocabulary import SpanKind

WAITS, QUEUED = "rank waits", "queued"
STRIPS = (WAITS, QUEUED)  # below the bars
VISIBLE = 0.01  # of a step


def collective_timeline(
    collectives: pd.DataFrame,
    spans: pd.DataFrame,
    *,
    run: str | None = None,
    step: int | None = None,
    until_ms: float | None = None,
) -> go.Figure:
    """Tracks of compute and communication of one step of one run, in milliseconds from the start of the step.

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
    if not len(collectives) and not len(spans):
        return nothing("Timeline of a step", "no collectives and no spans recorded")
    moved, worked, both = one_step_of_run(collectives, spans, run, step)
    name, step = str(both["label"].iloc[0]), int(both["step"].iloc[0])
    measures = overlap(moved, worked)
    begin, window = _extent(moved, worked)
    tracks, places = lay_out(moved, worked)
    figure = new_figure(f"Timeline of step {step}: {name}")
    levels = drawn_levels(worked)
    _draw_compute(figure, levels, tracks, (begin, window))
    _draw_waits(figure, moved, tracks, (begin, window))
    _draw_collectives(figure, moved.assign(y=places), (begin, window))
    _axes(figure, tracks)
    if until_ms is not None:
        figure.update_xaxes(range=[0, until_ms])
    figure.update_layout(title_subtitle_text=subtitle(both, _note(figure, levels, moved)))
    return finish(figure, _summary(name, step, measures, (moved, worked), window))


def _note(figure: go.Figure, levels: pd.DataFrame, moved: pd.DataFrame) -> str:
    """What the legend does not say, after a note if some bars stand for several spans or collectives."""
    shown = sum(len(trace.x) for trace in figure.data if trace.name not in STRIPS)
    parts = [
        thinning_note(len(levels) + len(moved), shown, "spans and collectives"),
        "pale: the model around its units" if levels["ground"].any() else "",
        "" if len(moved) else "no communication",
    ]
    return "; ".join(part for part in parts if part)


def _extent(moved: pd.DataFrame, worked: pd.DataFrame) -> tuple[float, float]:
    """(beginning, length) of the step over all ranks, in microseconds."""
    begin = min(float(value) for value in (moved["issue_us"].min(), worked["start_us"].min()) if pd.notna(value))
    end = max(float(value) for value in (moved["end_us"].max(), worked["end_us"].max()) if pd.notna(value))
    return begin, end - begin


def _draw_compute(figure: go.Figure, spans: pd.DataFrame, tracks: Tracks, extent: tuple[float, float]) -> None:
    """One trace per kind for the units, and one for the pale background that surrounds them."""
    spans = spans.assign(y=spans["rank"].astype("int64").map(tracks.of_compute()).astype("float64"))
    for ground in (True, False):
        for kind, colour in SPAN_COLOURS.items():
            rows = spans[(spans["kind"] == str(kind)) & (spans["ground"] == ground)]
            if len(rows):
                merged = grouped(rows, "unit", describe_span, extent)
                trace = bars(merged, kind_in_words(kind), colour, 0.62 if ground else 0.56)
                if ground:  # its name would show between the bars on top of it
                    trace.update(text=None)
                trace.update(opacity=0.3 if ground else 1.0, showlegend=not ground, legendgroup=str(kind))
                figure.add_trace(trace)


def _draw_waits(figure: go.Figure, moved: pd.DataFrame, tracks: Tracks, extent: tuple[float, float]) -> None:
    waits = moved[(moved["wait_end_us"] > moved["wait_start_us"]).fillna(False)]
    if not len(waits) or not (rows := tracks.of_compute()):
        return
    waits = waits.assign(
        y=waits["rank"].astype("int64").map(rows), start_us=waits["wait_start_us"], end_us=waits["wait_end_us"]
    )
    figure.add_trace(strips(grouped(waits, "tag", describe_wait, extent), WAITS, EXPOSED))


def _draw_collectives(figure: go.Figure, moved: pd.DataFrame, extent: tuple[float, float]) -> None:
    """One trace per collective, and one for the strips of queued collectives."""
    if not len(moved):
        return
    queued = moved[moved["start_us"] > moved["issue_us"]]
    queued = queued.assign(start_us=queued["issue_us"], end_us=queued["start_us"])
    if len(queued):
        figure.add_trace(strips(grouped(queued, "tag", describe_queue, extent), QUEUED, GREY).update(opacity=0.85))
    speeds = bandwidth(moved.drop(columns="y"))["bus_gb_per_s"]
    moved = moved.assign(bus_gb_per_s=speeds)
    for op, colour in COLLECTIVE_COLOURS.items():
        rows = moved[moved["op"] == str(op)]
        if len(rows):
            merged = grouped(rows, "tag", describe_collective, extent)
            figure.add_trace(bars(merged, str(op).replace("_", " "), colour, 0.56))


def _axes(figure: go.Figure, tracks: Tracks) -> None:
    ticks, names = tracks.labels()
    height = max(16.0, min(44.0, 1100 / tracks.num_rows))
    figure.update_layout(barmode="overlay", height=round(220 + height * tracks.num_rows))
    figure.update_layout(uniformtext={"minsize": 11, "mode": "hide"})  # names that do not fit are left out
    figure.update_xaxes(title_text="time in the step (ms)", rangemode="tozero", zeroline=False)
    figure.update_yaxes(
        tickvals=ticks, ticktext=names, range=[tracks.bottom + 0.6, -0.6], showgrid=False, zeroline=False
    )
    for rank in sorted({rank for rank, _ in tracks.positions})[1:]:
        top = min(rows[0] for (owner, _), rows in tracks.positions.items() if owner == rank)
        figure.add_hline(y=top - 0.5 - 0.175, line={"color": GRID, "width": 1})


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
