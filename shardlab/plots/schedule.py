"""A pipeline's schedule over time: a row for each rank, a bar for each action, numbered by its micro-batch."""

import plotly.graph_objects as go

from shardlab.plots.text import format_percent
from shardlab.plots.theme import ROLE_COLOURS, SPAN_COLOURS, TEXT, finish, new_figure, readable_on
from shardlab.schedules.actions import Kind
from shardlab.schedules.clock import Played
from shardlab.vocabulary import Role, SpanKind

TITLE = "What each rank does when"
STYLE = {
    Kind.FORWARD: ("forward", ROLE_COLOURS[Role.PARAMETER]),
    Kind.BACKWARD: ("backward", ROLE_COLOURS[Role.OPTIMIZER_STATE]),
    Kind.BACKWARD_OF_INPUT: ("backward of the input", SPAN_COLOURS[SpanKind.RECOMPUTE]),
    Kind.BACKWARD_OF_WEIGHTS: ("backward of the weights", SPAN_COLOURS[SpanKind.DATA]),
}
ROW, AROUND = 46, 170  # pixels


def schedule_chart(played: Played, unit: str = "") -> go.Figure:
    """Draw a schedule that has been played.

    Where stages share a rank, later ones are drawn lighter. White gaps are the bubble.

    Args:
        played: see ``shardlab.schedules.play``.
        unit: of its times, for the axis.
    """
    ranks, num_ranks = played.schedule.ranks, len(played.schedule.ranks)
    held = ", ".join(f"{played.schedule.held(rank):g}" for rank in range(num_ranks))
    said = f"{format_percent(played.bubble)} of the ranks' time is idle; micro-batches held at once, by rank: {held}"
    figure = new_figure(TITLE, said)
    for kind, (name, colour) in STYLE.items():
        drawn = [(rank, action) for rank, actions in enumerate(ranks) for action in actions if action.kind is kind]
        if not drawn:
            continue
        begins = [played.begins[action] for _, action in drawn]
        figure.add_bar(
            orientation="h", name=name, y=[rank for rank, _ in drawn], base=begins,
            x=[played.ends[action] - begin for (_, action), begin in zip(drawn, begins, strict=True)],
            text=[str(action.micro_batch) for _, action in drawn], textposition="inside", insidetextanchor="middle",
            textangle=0, hovertext=[f"{action}: {name} of stage {action.stage}" for _, action in drawn],
            hoverinfo="text", width=0.8,
            marker={
                "color": colour, "line": {"color": "#ffffff", "width": 1},
                "opacity": [0.62 ** (action.stage // num_ranks) for _, action in drawn],
            },
            textfont={"color": [readable_on(colour) if action.stage < num_ranks else TEXT for _, action in drawn]},
        )  # fmt: skip
    figure.update_layout(barmode="overlay", height=AROUND + ROW * num_ranks)
    figure.update_xaxes(title_text=f"time ({unit})" if unit else "time", rangemode="tozero")
    figure.update_yaxes(tickvals=list(range(num_ranks)), ticktext=[f"rank {rank}" for rank in range(num_ranks)],
                        autorange="reversed")  # fmt: skip
    return finish(figure, f"{num_ranks} ranks, {played.seconds:g} {unit or 'units'} of time: {said}.")
