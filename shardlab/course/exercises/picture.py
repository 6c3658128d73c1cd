"""The attempt beside what was wanted: who held what, and what moved."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.course.exercises.exercise import Exercise, Message
from shardlab.course.exercises.judge import Report
from shardlab.course.exercises.values import difference, plain
from shardlab.plots.theme import BLUE, COLLECTIVE_COLOURS, GREEN, ORANGE, PINK, SAND, VIOLET, finish, new_figure
from shardlab.vocabulary import Collective

SIDES = ("attempt", "wanted")
MOST_TICKS = 8  # of an axis that is half as wide as a notebook
SCALE = (BLUE, GREEN, SAND, ORANGE, PINK, VIOLET)


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
    seen, line = set[str](), {"color": "rgba(255,255,255,0.6)", "width": 1}
    for column, side in enumerate(SIDES, 1):
        rows = table[table["side"] == side]
        for number, of_number in rows.groupby("message"):
            for op, of_op in of_number.groupby("op"):
                figure.add_bar(
                    x=of_op["bytes"], y=of_op["rank"], orientation="h", name=str(op), legendgroup=str(op),
                    showlegend=op not in seen, row=1, col=column, text=of_op["axis"], textposition="inside",
                    marker={"color": COLLECTIVE_COLOURS[Collective(op)], "line": line}, insidetextanchor="middle",
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
