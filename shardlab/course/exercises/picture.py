"""The attempt beside what was wanted: who held what, what moved, memory over time. And its schedule on the clock."""

from collections.abc import Sequence
from math import inf

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.course.exercises.exercise import Case, Done, Exercise, Message
from shardlab.course.exercises.judge import Report
from shardlab.course.exercises.values import difference, plain
from shardlab.plots import theme
from shardlab.plots.theme import finish, new_figure
from shardlab.vocabulary import SpanKind

SIDES = ("attempt", "wanted")
MOST_TICKS = 8  # of an axis that is half as wide as a notebook
SCALE = (theme.BLUE, theme.GREEN, theme.SAND, theme.ORANGE, theme.PINK, theme.VIOLET)
KINDS = {"compute": theme.SPAN_COLOURS[SpanKind.BACKWARD], "message": theme.VIOLET}
DASHED = {"dash": "dash", "color": theme.INK}
BORDER = {"color": "rgba(255,255,255,0.6)", "width": 1}


def held_table(exercise: Exercise, report: Report) -> pd.DataFrame:
    """One row per number of a result: side, rank, place, value, differs."""
    assert report.case is not None
    rows: list[tuple[str, int, int, float, bool]] = []
    for rank, (done, wanted) in enumerate(zip(report.done, report.case.wanted, strict=True)):
        found, right = _numbers(exercise, done.result), _numbers(exercise, plain(wanted))
        for place, value in enumerate(found):
            differs = place >= len(right) or bool(difference(right[place], value))
            rows.append(("attempt", rank, place, value, differs))
        rows += [("wanted", rank, place, value, False) for place, value in enumerate(right)]
    return pd.DataFrame(rows, columns=["side", "rank", "place", "value", "differs"])


def moved_table(report: Report) -> pd.DataFrame:
    """One row per message: side, rank, message, op, bytes, axis."""
    assert report.case is not None
    traffic = report.case.traffic
    found: list[Sequence[Message]] = [done.messages for done in report.done]
    sides = {"attempt": found, "wanted": traffic.wanted if traffic else []}
    rows = [
        (side, rank, number, message.op, message.num_bytes, message.axis)
        for side, by_rank in sides.items()
        for rank, messages in enumerate(by_rank)
        for number, message in enumerate(messages)
    ]
    return pd.DataFrame(rows, columns=["side", "rank", "message", "op", "bytes", "axis"])


def differ(messages: pd.DataFrame) -> bool:
    """Whether the two sides of ``moved_table`` differ in anything."""
    attempt, wanted = (messages[messages["side"] == side].drop(columns="side").to_numpy().tolist() for side in SIDES)
    return bool(attempt != wanted)


def held(table: pd.DataFrame, title: str, words: str) -> go.Figure:
    """Numbers by rank as colours; a cross stands where the attempt differs; ``words`` say what is in a column."""
    figure = two_halves(title, f"in each column {words}; a cross: it differs")
    low, high = table["value"].min(), table["value"].max()
    for column, side in enumerate(SIDES, 1):
        rows = table[table["side"] == side]
        figure.add_heatmap(
            x=rows["place"], y=rows["rank"], z=rows["value"], zmin=low, zmax=high, colorscale=list(SCALE),
            showscale=column == 2, xgap=2, ygap=4, name=side, row=1, col=column,
            hovertemplate="rank %{y}, number %{x}: %{z}<extra></extra>",
        )  # fmt: skip
    wrong = table[table["differs"]]
    marker = {"symbol": "x", "size": 11, "color": "#ffffff", "line": {"color": "#000000", "width": 1}}
    figure.add_scatter(
        x=wrong["place"], y=wrong["rank"], mode="markers", marker=marker, name="differs", hoverinfo="skip", row=1, col=1
    )
    figure.update_layout(showlegend=False)
    num_columns = int(table["place"].max()) + 1
    figure.update_xaxes(title_text="column", matches="x", tick0=0, dtick=-(-num_columns // MOST_TICKS))
    return _with_ranks(figure, table, f"{title}: {len(wrong)} of {sum(table['side'] == 'attempt')} numbers differ.")


def moved(table: pd.DataFrame, title: str) -> go.Figure:
    """The messages of each rank one behind the other, as long as their bytes."""
    figure = two_halves(title, "the messages of each rank in order, as long as their buffers")
    seen = set[str]()
    for column, side in enumerate(SIDES, 1):
        rows = table[table["side"] == side]
        for number, of_number in rows.groupby("message"):
            for op, of_op in of_number.groupby("op"):
                figure.add_bar(
                    x=of_op["bytes"], y=of_op["rank"], orientation="h", name=str(op), legendgroup=str(op),
                    showlegend=op not in seen, row=1, col=column,
                    marker={"color": theme.COLLECTIVE_COLOURS[str(op)], "line": BORDER},
                    text=of_op["axis"], textposition="inside", insidetextanchor="middle",
                    hovertemplate=f"rank %{{y}}, message {number}: {op} of %{{x}} B %{{text}}<extra></extra>",
                )  # fmt: skip
                seen.add(str(op))
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_xaxes(title_text="bytes", matches="x")
    counts = [f"{side} {sum(table['side'] == side)}" for side in SIDES]
    return _with_ranks(figure, table, f"{title}: messages and receptions, {' and '.join(counts)}.")


def _numbers(exercise: Exercise, result: object) -> list[float]:
    """A result that the exercise cannot draw, of another kind than it asks for, has no numbers."""
    try:
        return list(exercise.drawn(result))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        return []


def two_halves(title: str, subtitle: str) -> go.Figure:
    """An empty figure of an attempt and what was wanted."""
    halves = ("your attempt", "wanted")
    return make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=halves, figure=new_figure(title, subtitle))


def _with_ranks(figure: go.Figure, table: pd.DataFrame, summary: str) -> go.Figure:
    ranks = sorted(set(table["rank"]))
    figure.update_layout(height=260 + 40 * len(ranks), margin_t=120)
    figure.update_yaxes(
        tickvals=ranks, ticktext=[f"rank {rank}" for rank in ranks], autorange="reversed", showgrid=False
    )
    return finish(figure, summary)


def memory(found: Sequence[Done], wanted: Sequence[Done], most_bytes: float, title: str) -> go.Figure:
    """Bytes held by each rank, one after another; what is allowed is a dashed line."""
    allowed = f"; dashed: the {most_bytes:,.0f} B that are allowed" if most_bytes < inf else ""
    figure = two_halves(title, f"bytes held by each rank, in order{allowed}")
    peaks = [max(max(of_rank.held, default=0.0) for of_rank in done) for done in (found, wanted)]
    for column, (done, highest) in enumerate(zip((found, wanted), peaks, strict=True), 1):
        for rank, of_rank in enumerate(done):
            line = {"color": theme.RANKS[rank % len(theme.RANKS)], "shape": "hv"}
            held = [*of_rank.held, *of_rank.held[-1:]]  # the last value once more, so that it has a width
            figure.add_scatter(
                y=held, mode="lines", line=line, name=f"rank {rank}", showlegend=column == 1, row=1, col=column
            )
        figure.add_annotation(
            text=f"at most {highest:,.0f} B", x=1, y=highest, xref=f"x{column} domain".replace("x1", "x"), yref="y",
            xanchor="right", yanchor="bottom", showarrow=False,
        )  # fmt: skip
    if most_bytes < inf:
        figure.add_hline(y=most_bytes, line=DASHED)
    figure.update_layout(margin_t=120)
    figure.update_xaxes(title_text="changes, in order", tickformat="d")
    figure.update_yaxes(rangemode="tozero", title_text="bytes", col=1)
    return finish(figure, f"{title}: {peaks[0]:,.0f} B were held at once, and {peaks[1]:,.0f} B by a right answer.")


def schedule(done: Sequence[Done], case: Case, title: str) -> go.Figure:
    """What each rank and its link did on the virtual clock; a dashed line is the time that is enough."""
    said = "; ".join(_targets(done, case))
    figure = new_figure(title, said)
    for kind, colour in KINDS.items():
        rows = [(rank, start, end) for rank, one in enumerate(done) for what, start, end in one.spans if what == kind]
        figure.add_bar(
            y=[f"rank {rank}, {kind}" for rank, _, _ in rows], base=[start for _, start, _ in rows],
            x=[end - start for _, start, end in rows], orientation="h", name=kind,
            marker={"color": colour, "line": BORDER},
        )  # fmt: skip
    if case.most_time_us < inf:
        figure.add_vline(x=case.most_time_us, line=DASHED)
    figure.update_layout(height=240 + 60 * len(done), barmode="overlay")
    figure.update_xaxes(title_text="us on the virtual clock")
    figure.update_yaxes(categoryorder="category descending")
    return finish(figure, f"{title}: {said}.")


def _targets(done: Sequence[Done], case: Case) -> list[str]:
    """What the busiest rank took of each thing that is limited."""
    limits: dict[str, tuple[float, list[float]]] = {
        "us": (case.most_time_us, [of_rank.time_us for of_rank in done]),
        "B at the peak": (case.most_peak_bytes, [of_rank.peak_bytes for of_rank in done]),
        "messages": (case.traffic.most_messages if case.traffic else inf, [len(one.messages) for one in done]),
    }
    return [
        f"{max(taken):,.0f} {words}" + (f" ({most:,.0f} are allowed)" if most < inf else "")
        for words, (most, taken) in limits.items()
    ]
