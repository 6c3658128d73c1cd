"""What was weighed, drawn: memory over time beside that of a right answer, and a schedule on the virtual clock."""

from collections.abc import Sequence
from math import inf

import plotly.graph_objects as go

from shardlab.course.exercises.exercise import Case, Done
from shardlab.course.exercises.picture import two_halves
from shardlab.plots.theme import INK, RANKS, SPAN_COLOURS, VIOLET, finish, new_figure
from shardlab.vocabulary import SpanKind

KINDS = {"compute": SPAN_COLOURS[SpanKind.BACKWARD], "message": VIOLET}
DASHED = {"dash": "dash", "color": INK}


def memory(found: Sequence[Done], wanted: Sequence[Done], most_bytes: float, title: str) -> go.Figure:
    """Bytes held by each rank, one after another; what is allowed is a dashed line."""
    allowed = f"; dashed: the {most_bytes:,.0f} B that are allowed" if most_bytes < inf else ""
    figure = two_halves(title, f"bytes held by each rank, in order{allowed}")
    peaks = [max(max(of_rank.held, default=0.0) for of_rank in done) for done in (found, wanted)]
    for column, (done, highest) in enumerate(zip((found, wanted), peaks, strict=True), 1):
        for rank, of_rank in enumerate(done):
            line = {"color": RANKS[rank % len(RANKS)], "shape": "hv"}
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
            marker={"color": colour, "line": {"color": "rgba(255,255,255,0.6)", "width": 1}},
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
