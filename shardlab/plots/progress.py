"""How training goes, in one picture: loss, time of a step, and what a rank holds, for all runs so far."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.analysis import at_rest
from shardlab.plots.colours import ROLE_COLOURS, dash, run_colours
from shardlab.plots.labels import labelled, labels_of, source_note
from shardlab.plots.theme import finish, new_figure, nothing
from shardlab.plots.thinning import thinned
from shardlab.plots.units import byte_scale, format_bytes, format_us
from shardlab.tables import MEMORY, STEPS

TITLE = "Training"


def training_progress(steps: pd.DataFrame, memory: pd.DataFrame) -> go.Figure:
    """Three panels: loss by step, time by step (the slowest rank's), and live bytes at rest by role.

    Args:
        steps: table ``steps``, of one rank or of all.
        memory: table ``memory``; of each run the last sample at rest is drawn.
    """
    STEPS.check(steps)
    MEMORY.check(memory)
    rows = labelled(steps[steps["step"] >= 0])
    if rows.empty:
        return nothing(TITLE, "no step has ended yet")
    columns = ["step", "loss", "step_us"]
    by_step = rows.groupby(["label", "step"], sort=False).agg(loss=("loss", "mean"), step_us=("step_us", "max"))
    curves = by_step.reset_index().astype(dict.fromkeys(columns, "float64"))
    figure, labels = _panels(), labels_of(rows)
    colours = run_colours(labels)
    for place, label in enumerate(labels):  # thinner from run to run, so that curves that coincide all show
        curve = curves[curves["label"] == label].sort_values("step", kind="stable")
        _draw_curves(figure, curve, label, (colours[label], max(2.0, 6.0 - 4.0 * place / max(len(labels) - 1, 1))))
    held = labelled(at_rest(memory)) if len(memory) else None
    if held is not None and len(held):
        _draw_memory(figure, held, labels)
    last = curves[curves["label"] == labels[-1]].sort_values("step", kind="stable").iloc[-1]
    words = (
        f"{labels[-1]}, step {last['step']:.0f}: loss {last['loss']:.4f}, {format_us(float(last['step_us']))} a step"
    )
    note = source_note(steps)
    figure.update_layout(title_text=TITLE, title_subtitle_text=f"{words}; {note}" if note else words)
    return finish(figure, f"{TITLE} of {len(labels)} {'run' if len(labels) == 1 else 'runs'}. {words}.")


def _panels() -> go.Figure:
    figure = make_subplots(rows=1, cols=3, column_widths=[0.36, 0.36, 0.28], horizontal_spacing=0.09)
    look = new_figure(TITLE)
    figure.update_layout(template=look.layout.template, title=look.layout.title, height=400, barmode="stack")
    figure.update_xaxes(title_text="step", tickformat="d", col=1)
    figure.update_xaxes(title_text="step", tickformat="d", col=2)
    figure.update_yaxes(title_text="loss", col=1)
    figure.update_yaxes(title_text="time of a step (ms)", rangemode="tozero", col=2)
    figure.update_xaxes(showgrid=False, col=3)
    return figure


def _draw_curves(figure: go.Figure, curve: pd.DataFrame, label: str, style: tuple[str, float]) -> None:
    for panel, column, scale, words in ((1, "loss", 1.0, "loss %{y:.4f}"), (2, "step_us", 1e-3, "%{y:.1f} ms")):
        known = curve[curve[column].notna()]
        drawn = known.iloc[thinned(known[column])] if len(known) else known
        figure.add_scatter(
            x=drawn["step"].to_numpy(),
            y=(drawn[column] * scale).to_numpy(),
            mode="lines" if len(drawn) > 1 else "markers",
            name=label,
            legendgroup=label,
            showlegend=panel == 1,
            opacity=0.5 if style[1] > 4 and panel == 1 else 1.0,
            line={"color": style[0], "width": style[1] if panel == 1 else 2.0, "dash": dash(label)},
            hovertemplate=f"<b>{label}</b><br>step %{{x}}<br>{words}<extra></extra>",
            row=1,
            col=panel,
        )


def _draw_memory(figure: go.Figure, held: pd.DataFrame, labels: list[str]) -> None:
    held = held.assign(bytes=held["bytes"].astype("float64"))
    divisor, unit = byte_scale(float(held.groupby("label")["bytes"].sum().max()))
    for role, colour in ROLE_COLOURS.items():
        sizes = held[held["role"] == str(role)].set_index("label")["bytes"].reindex(labels).fillna(0.0)
        if not (sizes > 0).any():
            continue
        words = str(role).replace("_", " ")
        figure.add_bar(
            x=labels,
            y=(sizes / divisor).to_numpy(),
            name=words,
            marker_color=colour,
            customdata=[format_bytes(size) for size in sizes],
            hovertemplate=f"<b>%{{x}}</b><br>{words}: %{{customdata}}<extra></extra>",
            row=1,
            col=3,
        )
    figure.update_yaxes(title_text=f"held at rest ({unit})", rangemode="tozero", row=1, col=3)
