"""Losses: of each run, their distance from a reference run, and beside time and memory while ranks train."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis import at_rest
from shardlab.analysis.rows import labelled, labels_of
from shardlab.analysis.timed import traced
from shardlab.plots import theme
from shardlab.plots.bars import SEEN
from shardlab.plots.text import byte_scale, format_bytes, format_us, listing, significant, source_note, subtitle
from shardlab.tables import MEMORY, STEPS

TRAINING = "Training"
Trace = dict[str, Any]


def loss_curves(steps: pd.DataFrame, unlike: str = "") -> go.Figure:
    """Loss of each run against the step.

    Equal losses coincide, so the first run is drawn wide and each later one thinner: all of them stay visible.

    Args:
        steps: table ``steps``.
        unlike: what may keep losses from being equal, in words; by default nothing does.
    """
    STEPS.check(steps)
    losses = _losses(steps)
    if losses.empty:
        return theme.nothing("Loss", "no losses recorded")
    labels = labels_of(losses)
    given, losses = losses, _thinned(losses, "loss")
    note = theme.thinning_note(len(given), len(losses), "steps: the extremes of each stretch,")
    words = [note or "mean over ranks", unlike or ("" if note else "equal losses coincide")]
    figure = theme.new_figure("Loss by step", subtitle(steps, "; ".join(filter(None, words))))
    colours = theme.run_colours(labels)
    for place, label in enumerate(labels):
        rows = losses[losses["label"] == label].sort_values("step", kind="stable")
        figure.add_scatter(
            x=rows["step"].to_numpy(), y=rows["loss"].to_numpy(), name=label,
            mode="lines" if len(rows) > 1 else "markers",
            line={"color": colours[label], "width": nested_width(place, len(labels)), "dash": theme.dash(label)},
            hovertemplate=f"<b>{label}</b><br>step %{{x}}<br>loss %{{y:.6f}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="step", tickformat="d", **_whole_steps(steps))
    figure.update_yaxes(title_text="loss")
    return theme.finish(figure, _loss_summary(given, labels))


def nested_width(index: int, count: int) -> float:
    """Width of curve ``index`` of ``count`` curves that may coincide: each leaves a rim of the one below visible."""
    return 2.0 + min(3.0, 12.0 / max(count - 1, 1)) * (count - 1 - index)


def loss_difference(steps: pd.DataFrame, reference: str = "single") -> go.Figure:
    """|loss - loss of the reference| at each step, on a logarithmic axis.

    A difference of exactly zero has no logarithm: such steps are open markers on their own line, labelled 'exactly 0'.

    Args:
        steps: table ``steps``.
        reference: the run that the others are compared with.

    Raises:
        ValueError: there is no run of that name.
    """
    STEPS.check(steps)
    losses = _losses(steps)
    runs = labels_of(labelled(steps[steps["step"] >= 0]))
    if reference not in runs:
        raise ValueError(f"reference: {reference!r} is not one of {', '.join(runs) or 'the runs: there are none'}")
    differences = _differences(losses, reference)
    title = f"Difference of the loss from {reference}"
    if differences.empty:
        return theme.nothing(title, "no other run has finite losses at the same steps")
    given, differences = differences, _thinned(differences, "difference")
    note = theme.thinning_note(len(given), len(differences), "steps: the extremes of each stretch,")
    figure = theme.new_figure(title, subtitle(steps, note or "absolute difference at each step"))
    floor = _zero_floor(differences["difference"])
    labels = labels_of(differences)
    colours = theme.run_colours(labels)
    for place, label in enumerate(labels):
        # later markers are smaller, so that runs with the same difference all stay visible
        style = (colours[label], theme.SYMBOLS[place % len(theme.SYMBOLS)], max(7, 14 - 3 * place))
        figure.add_trace(_difference_trace(differences[differences["label"] == label], label, style, floor))
    figure.update_xaxes(title_text="step", tickformat="d", **_whole_steps(steps))
    _difference_axis(figure, differences["difference"], floor)
    largest = given.groupby("label", sort=False)["difference"].max()
    parts = [f"{label} {'exactly 0' if value == 0 else significant(value)}" for label, value in largest.items()]
    return theme.finish(figure, f"Largest difference of the loss from {reference} at any step: {listing(parts)}.")


def _losses(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per label and step: the mean of the finite losses over ranks."""
    rows = labelled(steps[(steps["step"] >= 0) & np.isfinite(steps["loss"])])
    table = rows.groupby(["label", "step"], sort=False)["loss"].mean().reset_index()
    return table.astype({"step": "int64", "loss": "float64"})


def _thinned(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows of each label that are drawn, in order of the steps."""
    curves = [curve.sort_values("step", kind="stable") for _, curve in rows.groupby("label", sort=False)]
    return pd.concat([curve.iloc[theme.thinned(curve[column])] for curve in curves])


def _differences(losses: pd.DataFrame, reference: str) -> pd.DataFrame:
    base = losses.loc[losses["label"] == reference, ["step", "loss"]].rename(columns={"loss": "base"})
    rows = losses[losses["label"] != reference].merge(base, on="step")
    return rows.assign(difference=(rows["loss"] - rows["base"]).abs())


def _zero_floor(differences: pd.Series) -> float:
    """Where zeros are drawn: one decade below the smallest other difference."""
    positive = differences[differences > 0]
    return float(10 ** (np.floor(np.log10(positive.min())) - 1)) if len(positive) else 1e-16


def _difference_trace(rows: pd.DataFrame, label: str, style: tuple[str, str, int], floor: float) -> go.Scatter:
    colour, shape, size = style
    difference = rows["difference"].to_numpy()
    zero = difference == 0
    symbol = [f"{shape}-open" if is_zero else shape for is_zero in zero]
    return go.Scatter(
        x=rows["step"].to_numpy(), y=np.where(zero, floor, difference), name=label, mode="lines+markers",
        line={"color": colour, "width": 1.5, "dash": theme.dash(label)},
        marker={"symbol": symbol, "size": size, "line": {"color": colour, "width": 2}},
        hovertext=["exactly 0" if is_zero else f"{value:.3e}" for value, is_zero in zip(difference, zero, strict=True)],
        hovertemplate=f"<b>{label}</b><br>step %{{x}}<br>difference %{{hovertext}}<extra></extra>",
    )  # fmt: skip


def _difference_axis(figure: go.Figure, differences: pd.Series, floor: float) -> None:
    """A logarithmic axis; the line at which zeros are drawn is labelled 'exactly 0'."""
    positive = differences[differences > 0].tolist()
    axis = theme.log_axis(positive or [floor], _scientific)
    if (differences == 0).any():
        figure.add_hline(y=floor, line={"color": theme.GRID, "width": 2, "dash": "dash"})
        above = [(value, text) for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if positive]
        axis["tickvals"], axis["ticktext"] = zip((floor, "exactly 0"), *above, strict=True)
        axis["range"][0] = np.log10(floor) - 0.3
    figure.update_yaxes(title_text="|difference|", **axis)


def _scientific(value: float) -> str:
    """'5x10^-7', with a raised exponent."""
    factor, _, exponent = f"{value:.0e}".partition("e")
    power = f"10<sup>{int(exponent)}</sup>"
    return power if factor == "1" else f"{factor}\u00d7{power}"


def _loss_summary(losses: pd.DataFrame, labels: list[str]) -> str:
    losses = losses.sort_values("step", kind="stable")
    curves = [losses.loc[losses["label"] == label, "loss"].tolist() for label in labels]
    parts = [f"{label} from {curve[0]:.4f} to {curve[-1]:.4f}" for label, curve in zip(labels, curves, strict=True)]
    return f"Loss over {losses['step'].nunique()} steps: {listing(parts)}."


def _whole_steps(steps: pd.DataFrame) -> dict[str, int]:
    """A tick at every step of a short run: plotly would label half steps too, and round their numbers."""
    return {"dtick": 1} if steps["step"].max() - steps["step"].min() <= 10 else {}


def training_progress(steps: pd.DataFrame, memory: pd.DataFrame) -> go.Figure:
    """Three panels: loss by step, time by step (of the slowest rank), and live bytes at rest by role.

    Steps whose memory was traced have no time, because tracing slows them.

    Args:
        steps: table ``steps``, of one rank or of all.
        memory: table ``memory``; the last sample at rest of each run is drawn.
    """
    STEPS.check(steps)
    MEMORY.check(memory)
    rows = labelled(steps[steps["step"] >= 0])
    rows = rows.assign(step_us=rows["step_us"].where(~traced(rows)))
    if rows.empty:
        return theme.nothing(TRAINING, "no step has ended yet")
    columns = ["step", "loss", "step_us"]
    by_step = rows.groupby(["label", "step"], sort=False).agg(loss=("loss", "mean"), step_us=("step_us", "max"))
    curves = by_step.reset_index().astype(dict.fromkeys(columns, "float64"))
    labels = labels_of(rows)
    held = labelled(at_rest(memory)) if len(memory) else memory
    bars, unit = _memory_bars(held, labels) if len(held) else ([], "B")
    traces = _curves(curves, labels) + bars
    last = curves[curves["label"] == labels[-1]].sort_values("step", kind="stable").iloc[-1]
    length = "memory traced" if pd.isna(last["step_us"]) else f"{format_us(float(last['step_us']))} a step"
    words = f"{labels[-1]}, step {last['step']:.0f}: loss {last['loss']:.4f}, {length}"
    note = source_note(steps)
    # Built at once: the figure is redrawn while ranks train, and plotly validates the whole figure at every change.
    figure = go.Figure(data=traces, layout=_layout(f"{words}; {note}" if note else words, unit))
    return theme.finish(figure, f"{TRAINING} of {len(labels)} {'run' if len(labels) == 1 else 'runs'}. {words}.")


def _layout(words: str, unit: str) -> dict[str, Any]:
    steps = {"title": {"text": "step"}, "tickformat": "d"}
    return {
        "template": theme.TEMPLATE,
        "title": {"text": TRAINING, "subtitle": {"text": words}}, "height": 400, "barmode": "stack",
        "xaxis": {**steps, "domain": [0.0, 0.27]},
        "xaxis2": {**steps, "domain": [0.38, 0.66], "anchor": "y2"},
        "xaxis3": {"showgrid": False, "domain": [0.77, 1.0], "anchor": "y3"},
        "yaxis": {"title": {"text": "loss"}},
        "yaxis2": {"title": {"text": "time of a step (ms)"}, "rangemode": "tozero", "anchor": "x2"},
        "yaxis3": {"title": {"text": f"held at rest ({unit})"}, "rangemode": "tozero", "anchor": "x3"},
    }  # fmt: skip


def _curves(curves: pd.DataFrame, labels: list[str]) -> list[Trace]:
    """Loss and time of every run; each run is thinner, so that coinciding losses all stay visible."""
    traces: list[Trace] = []
    colours = theme.run_colours(labels)
    for place, label in enumerate(labels):
        curve = curves[curves["label"] == label].sort_values("step", kind="stable")
        width = nested_width(place, len(labels))
        line = {"color": colours[label], "dash": theme.dash(label)}
        loss = _curve(curve["step"], curve["loss"], f"<b>{label}</b><br>step %{{x}}<br>loss %{{y:.4f}}<extra></extra>")
        time = _curve(
            curve["step"], curve["step_us"] / 1e3, f"<b>{label}</b><br>step %{{x}}<br>%{{y:.1f}} ms<extra></extra>"
        )
        common = {"name": label, "legendgroup": label}
        traces.append(loss | common | {"line": line | {"width": width}})
        traces.append(time | common | {"line": line | {"width": 2}, "showlegend": False, "xaxis": "x2", "yaxis": "y2"})
    return traces


def _curve(steps: pd.Series, values: pd.Series, hover: str) -> Trace:
    known = values.notna().to_numpy()
    x, y = steps.to_numpy()[known], values.to_numpy(dtype=np.float64)[known]
    drawn = theme.thinned(y) if len(y) else np.zeros(0, dtype=np.intp)
    mode = "lines" if len(drawn) > 1 else "markers"
    return {"type": "scatter", "x": x[drawn], "y": y[drawn], "mode": mode, "hovertemplate": hover}


def _memory_bars(held: pd.DataFrame, labels: list[str]) -> tuple[list[Trace], str]:
    """A stack of roles for each run, and the unit of its axis."""
    held = held.assign(bytes=held["bytes"].astype("float64"))
    divisor, unit = byte_scale(float(held.groupby("label")["bytes"].sum().max()))
    table = held.pivot_table("bytes", "role", "label", aggfunc="max").reindex(columns=labels).fillna(0.0)
    traces: list[Trace] = []
    for role, colour in theme.ROLE_COLOURS.items():
        if str(role) not in table.index or not (table.loc[str(role)] > 0).any():
            continue
        sizes, words = table.loc[str(role)].to_numpy(dtype=np.float64), str(role).replace("_", " ")
        traces.append({
            "type": "bar", "x": labels, "y": sizes / divisor, "name": words, "marker": {"color": colour},
            "customdata": [format_bytes(float(size)) for size in sizes], "xaxis": "x3", "yaxis": "y3",
            "showlegend": bool(sizes.max() >= SEEN * table.sum().max()),
            "hovertemplate": f"<b>%{{x}}</b><br>{words}: %{{customdata}}<extra></extra>",
        })  # fmt: skip
    return traces, unit
