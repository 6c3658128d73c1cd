"""Live bytes by role over one step on one rank."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import memory_over_step as course_of
from shardlab.plots import theme
from shardlab.plots.text import byte_scale, format_bytes, format_us, subtitle
from shardlab.plots.theme import GRID, ROLE_COLOURS, finish, new_figure, nothing, thinned, thinning_note
from shardlab.records.tables import MEMORY
from shardlab.vocabulary import Role

TITLE = "Memory over a step"
HEADROOM = 1.3  # above the peak, for its label, on a narrow page too
MIN_PHASE_SHARE = 0.07  # of the width: narrower phases get no name


def memory_over_step(
    memory: pd.DataFrame, *, run: str | None = None, step: int | None = None, rank: int | None = None
) -> go.Figure:
    """Bytes of each role over one memory-traced step on one rank, stacked, with the predicted bytes at rest.

    Rows of the same run with ``source == "predicted"`` (``planner.predicted_memory``) are drawn as a dashed line: the
    bytes that are held at rest, after the optimizer has stepped.

    Args:
        memory: table ``memory``, measured rows and optionally predicted ones.
        run: which run; None where the table holds one.
        step: which step; None for the traced one with the highest moment.
        rank: which rank; None for the one with the highest peak.

    Raises:
        ValueError: a column is missing, no step was traced, or there is no such run, step or rank.
    """
    MEMORY.check(memory)
    if not len(memory):
        return nothing(TITLE, "no memory recorded")
    table = course_of(memory, run=run, step=step, rank=rank)
    keep = thinned(table["bytes"])
    drawn, key = table.iloc[keep], table.iloc[0]
    divisor, unit = byte_scale(float(table["bytes"].max()))
    times_ms = (drawn["time_us"] - table["time_us"].iloc[0]).to_numpy(dtype=np.float64) / 1e3
    title = f"Memory over step {key['step']}: {key['run']}, rank {key['rank']}"
    figure = new_figure(
        title, subtitle(table, thinning_note(len(table), len(drawn), "moments") or "live bytes by role")
    )
    _stack(figure, times_ms, drawn, divisor)
    _name_phases(figure, times_ms, drawn["phase"])
    predicted = _at_rest(memory, key, "predicted")
    if predicted is not None:
        _outline(figure, predicted, divisor)
    figure.update_layout(hovermode="x unified", legend_traceorder="normal", height=480, margin_t=110)
    figure.update_xaxes(title_text="time in the step (ms)", zeroline=False, showgrid=False, hoverformat=".1f")
    top = HEADROOM * max(float(table["bytes"].max()), float(predicted or 0)) / divisor
    figure.update_yaxes(title_text=f"live bytes ({unit})", range=[0, top])
    return finish(figure, _summary(table, _at_rest(memory, key, str(key["source"])), predicted))


def _stack(figure: go.Figure, times_ms: np.ndarray, drawn: pd.DataFrame, divisor: float) -> None:
    """An area for each role; an invisible line whose hover gives the sum, the unit and the phase; the peak's label."""
    for role, colour in ROLE_COLOURS.items():
        if role in drawn.columns and (drawn[role] > 0).any():
            held = drawn[role].to_numpy(dtype=np.float64)
            figure.add_scatter(
                x=times_ms, y=held / divisor, mode="lines", stackgroup="roles", name=role.replace("_", " "),
                line={"width": 0, "shape": "hv", "color": colour}, fillcolor=colour,
                customdata=[format_bytes(value) for value in held], hovertemplate="%{customdata}",
            )  # fmt: skip
    totals = drawn["bytes"].to_numpy(dtype=np.float64)
    figure.add_scatter(
        x=times_ms, y=totals / divisor, mode="lines", name="all", line={"width": 0, "shape": "hv"}, showlegend=False,
        customdata=[
            f"<b>{format_bytes(total)}</b> in {unit}, {phase}"
            for total, unit, phase in zip(totals, drawn["unit"], drawn["phase"], strict=True)
        ],
        hovertemplate="%{customdata}",
    )  # fmt: skip
    place = int(totals.argmax())  # which may last for less than a pixel
    figure.add_scatter(
        x=[times_ms[place]], y=[totals[place] / divisor], mode="text", name="peak",
        text=[f"{format_bytes(totals[place])}<br>\u25bc"], textposition="top center", cliponaxis=False,
        hoverinfo="skip", showlegend=False,
    )  # fmt: skip


def _name_phases(figure: go.Figure, times_ms: np.ndarray, phases: pd.Series) -> None:
    """A thin line where a phase begins, and its name above if there is room."""
    names = phases.astype(str).to_numpy()
    begins = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1)]
    ends = [*(times_ms[begin] for begin in begins[1:]), times_ms[-1]]
    for begin, end in zip(begins, ends, strict=True):
        figure.add_vline(x=times_ms[begin], line={"color": GRID, "width": 1.5})
        if end - times_ms[begin] < MIN_PHASE_SHARE * (times_ms[-1] - times_ms[0]):
            continue
        figure.add_annotation(
            x=(times_ms[begin] + end) / 2, y=1, yref="paper", yanchor="bottom", text=names[begin], showarrow=False
        )


def _at_rest(memory: pd.DataFrame, key: pd.Series, source: str) -> int | None:
    """Bytes this run and rank hold at rest according to ``source``: in this step, else in the last one before it.

    Unattributed tensors are left out if the samples within the step do not contain them either.
    """
    rows = memory[
        (memory["run"] == key["run"]) & (memory["source"] == source) & (memory["where"] == "rest")
        & (memory["rank"] == key["rank"]) & (memory["step"] <= key["step"])
        & ((memory["role"] != str(Role.UNATTRIBUTED)) | (key.get(Role.UNATTRIBUTED, 0) > 0))
    ]  # fmt: skip
    return int(rows.loc[rows["step"] == rows["step"].max(), "bytes"].sum()) if len(rows) else None


def _outline(figure: go.Figure, predicted: int, divisor: float) -> None:
    # Dark dashes on a pale line show on every colour, and on light and dark backgrounds. The label stands beside the
    # line because no legend entry would show on both backgrounds.
    figure.add_hline(y=predicted / divisor, line={"color": "rgba(255,255,255,0.8)", "width": 4})
    figure.add_hline(y=predicted / divisor, line={"color": theme.TEXT, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=1, xref="paper", xanchor="left", y=predicted / divisor, showarrow=False, align="left", xshift=6,
        text=f"predicted<br>at rest:<br>{format_bytes(predicted)}",
    )  # fmt: skip
    figure.update_layout(margin_r=96)


def _summary(table: pd.DataFrame, measured: int | None, predicted: int | None) -> str:
    key, top = table.iloc[0], table.iloc[int(table["bytes"].to_numpy(dtype=np.float64).argmax())]
    length_us = float(table["time_us"].iloc[-1] - key["time_us"])
    first, most = (format_bytes(int(row["bytes"])) for row in (key, top))
    words = (
        f"Run {key['run']}, step {key['step']}, rank {key['rank']}: live bytes "
        f"{'stay at' if first == most else f'rise from {first} to'} {most} in "
        f"{top['unit']} ({top['phase']}), over {format_us(length_us)}."
    )
    words += "" if measured is None else f" At rest {format_bytes(measured)}."
    return words if predicted is None else f"{words} Predicted at rest {format_bytes(predicted)}."
