"""Losses: of each run, their distance from a reference run, and beside time and memory while ranks train."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardlab.analysis.held_bytes import on_fullest_rank
from shardlab.analysis.rows import labelled, labels_of, traced
from shardlab.plots import theme
from shardlab.plots.bars import SEEN
from shardlab.plots.text import byte_scale, format_bytes, format_us, joined, listing, significant, source_note, subtitle
from shardlab.records.tables import MEMORY, STEPS

TRAINING = "Training"


def loss_curves(steps: pd.DataFrame, unlike: str = "") -> go.Figure:
    """Loss of each run against the step.

    Equal losses coincide, so the first run is drawn wide and each later one thinner: all of them stay visible. A loss
    that is inf or NaN is a gap, and is named.

    Args:
        steps: table ``steps``.
        unlike: what may keep losses from being equal, in words; by default nothing does.
    """
    STEPS.check(steps)
    losses = _losses(steps)
    if losses["loss"].isna().all():
        return theme.nothing("Loss", "no finite losses recorded")
    labels = labels_of(losses)
    given, losses = losses, _thinned(losses, "loss")
    note = theme.thinning_note(len(given), len(losses), "steps: the extremes of each stretch,")
    words = [note or "mean over ranks", unlike or ("" if note else "equal losses coincide")]
    figure = theme.new_figure("Loss by step", joined(_lost(given), subtitle(steps, "; ".join(filter(None, words)))))
    colours = theme.run_colours(labels)
    for place, label in enumerate(labels):
        rows = losses[losses["label"] == label].sort_values("step", kind="stable")
        figure.add_scatter(
            x=rows["step"].to_numpy(), y=rows["loss"].to_numpy(), name=label,
            mode=_mode(rows["loss"]),
            line={"color": colours[label], "width": nested_width(place, len(labels)), "dash": theme.dash(label)},
            hovertemplate=f"<b>{label}</b><br>step %{{x}}<br>loss %{{y:.6g}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="step", tickformat="d", **_whole_steps(steps))
    figure.update_yaxes(title_text="loss", exponentformat="power", **_around(losses["loss"]))
    return theme.finish(figure, _loss_summary(given, labels))


def _mode(values: "pd.Series[float]") -> str:
    """Lines, of which nothing is seen where a value stands alone."""
    return "lines" if len(values) > 1 and values.notna().all() else "lines+markers"


def _around(values: "pd.Series[float]") -> dict[str, list[float]]:
    """The range of an axis around one small value, where plotly's is from -1 to 1."""
    largest = float(values.abs().max())
    return {"range": [-2 * largest, 2 * largest]} if values.nunique() == 1 and 0 < largest < 0.5 else {}


def _lost(losses: pd.DataFrame) -> str:
    """Which runs lack a finite loss, and from which step on; empty if none does."""
    first = losses[losses["loss"].isna()].groupby("label", sort=False)["step"].min()
    runs = [f"{label} (first at step {step})" for label, step in first.items()]
    return f"without a finite loss: {listing(runs)}" if runs else ""


def _loss_words(value: float) -> str:
    if not np.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.3g}"


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
    differences, lost = _differences(losses, reference), _lost(losses)
    title = f"Difference of the loss from {reference}"
    if differences["difference"].isna().all():
        return theme.nothing(title, "; ".join(filter(None, ("no finite losses at the same steps", lost))))
    given, differences = differences, _thinned(differences, "difference")
    note = theme.thinning_note(len(given), len(differences), "steps: the extremes of each stretch,")
    figure = theme.new_figure(title, joined(lost, subtitle(steps, note or "absolute difference at each step")))
    floor = _difference_axis(figure, differences["difference"])
    labels = labels_of(differences)
    colours = theme.run_colours(labels)
    for place, label in enumerate(labels):
        rows = differences[differences["label"] == label]
        difference, shape = rows["difference"].to_numpy(), theme.SYMBOLS[place % len(theme.SYMBOLS)]
        zero = difference == 0
        figure.add_scatter(
            x=rows["step"].to_numpy(), y=np.where(zero, floor, difference), name=label, mode="lines+markers",
            line={"color": colours[label], "width": 1.5, "dash": theme.dash(label)},
            marker={
                # Later ones are smaller, so that runs with the same difference all stay visible.
                "symbol": np.where(zero, f"{shape}-open", shape).tolist(), "size": max(7, 14 - 3 * place),
                "line": {"color": colours[label], "width": 2},
            },
            hovertext=["exactly 0" if value == 0 else f"{value:.3e}" for value in difference],
            hovertemplate=f"<b>{label}</b><br>step %{{x}}<br>difference %{{hovertext}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="step", tickformat="d", **_whole_steps(steps))
    largest = given.groupby("label", sort=False)["difference"].max().dropna()
    parts = [f"{label} {'exactly 0' if value == 0 else significant(value)}" for label, value in largest.items()]
    said = f"Largest difference of the loss from {reference} at any step: {listing(parts)}"
    return theme.finish(figure, f"{said}{_sentence(lost)}.")


def _losses(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per label and step: the mean of the losses over ranks; NaN where it is not finite."""
    rows = labelled(steps[steps["step"] >= 0]).astype({"loss": "float64"})
    table = rows.groupby(["label", "step"], sort=False)["loss"].mean().reset_index()
    return table.astype({"step": "int64"}).assign(loss=table["loss"].where(np.isfinite(table["loss"])))


def _sentence(note: str) -> str:
    return f". {note[:1].upper()}{note[1:]}" if note else ""


def _thinned(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows of each label that are drawn, in order of the steps."""
    curves = [curve.sort_values("step", kind="stable") for _, curve in rows.groupby("label", sort=False)]
    return pd.concat([curve.iloc[theme.thinned(curve[column])] for curve in curves])


def _differences(losses: pd.DataFrame, reference: str) -> pd.DataFrame:
    base = losses.loc[losses["label"] == reference, ["step", "loss"]].rename(columns={"loss": "base"})
    rows = losses[losses["label"] != reference].merge(base, on="step")
    return rows.assign(difference=(rows["loss"] - rows["base"]).abs())


def _difference_axis(figure: go.Figure, differences: pd.Series) -> float:
    """A logarithmic axis; where zeros are drawn, on a line labelled 'exactly 0': a decade below all others."""
    positive = differences[differences > 0].tolist()
    floor = float(10 ** (np.floor(np.log10(min(positive))) - 1)) if positive else 1e-16
    axis = theme.log_axis(positive or [floor], _scientific)
    if (differences == 0).any():
        figure.add_hline(y=floor, line={"color": theme.GRID, "width": 2, "dash": "dash"})
        above = [(value, text) for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if positive]
        axis["tickvals"], axis["ticktext"] = zip((floor, "exactly 0"), *above, strict=True)
        axis["range"][0] = np.log10(floor) - 0.3
    figure.update_yaxes(title_text="|difference|", **axis)
    return floor


def _scientific(value: float) -> str:
    """'5x10^-7', with a raised exponent."""
    factor, _, exponent = f"{value:.0e}".partition("e")
    power = f"10<sup>{int(exponent)}</sup>"
    return power if factor == "1" else f"{factor}\u00d7{power}"


def _loss_summary(losses: pd.DataFrame, labels: list[str]) -> str:
    ends = losses.sort_values("step", kind="stable").groupby("label")["loss"].agg(["first", "last"]).loc[labels]
    ends, count = ends.dropna(), losses["step"].nunique()
    parts = [f"{label} from {_loss_words(first)} to {_loss_words(last)}" for label, first, last in ends.itertuples()]
    return f"Loss over {count} {'step' if count == 1 else 'steps'}: {listing(parts)}{_sentence(_lost(losses))}."


def _whole_steps(steps: pd.DataFrame) -> dict[str, int]:
    """A tick at every step of a short run: plotly would label half steps too, and round their numbers."""
    return {"dtick": 1} if steps["step"].max() - steps["step"].min() <= 10 else {}


def training_progress(steps: pd.DataFrame, memory: pd.DataFrame) -> go.Figure:
    """Three panels: loss by step, time by step (of the slowest rank), and live bytes at rest by role.

    Steps whose memory was traced have no time, because tracing slows them. The loss of each run is thinner than the one
    before, so that coinciding ones all stay visible. A loss that is inf or NaN is a gap.

    Args:
        steps: table ``steps``, of one rank or of all.
        memory: table ``memory``; the last sample at rest of each run is drawn.
    """
    STEPS.check(steps)
    MEMORY.check(memory)
    rows = labelled(steps[steps["step"] >= 0])
    if rows.empty:
        return theme.nothing(TRAINING, "no step has ended yet")
    rows = rows.assign(step_ms=rows["step_us"].where(~traced(rows)) / 1e3).astype({"step_ms": float})
    longest = rows.groupby(["label", "step"], sort=False)["step_ms"].max()
    curves = _losses(steps).join(longest, on=["label", "step"]).set_index("label")
    labels, last = labels_of(rows), curves.loc[[rows["label"].iloc[-1]]].sort_values("step").iloc[-1]
    length = "memory traced" if pd.isna(last["step_ms"]) else f"{format_us(1e3 * float(last['step_ms']))} a step"
    words = f"{last.name}, step {last['step']:.0f}: loss {_loss_words(last['loss'])}, {length}"
    figure = make_subplots(
        cols=3, horizontal_spacing=0.11, figure=theme.new_figure(TRAINING, joined(words, source_note(steps)))
    )
    for place, (label, colour) in enumerate(theme.run_colours(labels).items()):
        line, width = {"color": colour, "dash": theme.dash(label)}, nested_width(place, len(labels))
        panels = ((1, "loss", width, "loss %{y:.6g}"), (2, "step_ms", 2, "%{y:.1f} ms"))
        for column, values, wide, hover in panels:
            known = curves.loc[[label]].dropna(subset=["step_ms"] * (column - 1)).sort_values("step", kind="stable")
            drawn = known.iloc[theme.thinned(known[values])]
            figure.add_scatter(
                x=drawn["step"].to_numpy(), y=drawn[values].to_numpy(), mode=_mode(drawn[values]),
                name=label, legendgroup=label, showlegend=column == 1, line=line | {"width": wide}, row=1, col=column,
                hovertemplate=f"<b>{label}</b><br>step %{{x}}<br>{hover}<extra></extra>",
            )  # fmt: skip
    unit = _draw_memory(figure, labelled(on_fullest_rank(memory)), labels) if len(memory) else "B"
    figure.update_xaxes(title_text="step", tickformat="d", col=1).update_xaxes(title_text="step", tickformat="d", col=2)
    for column, title in enumerate(("loss", "time of a step (ms)", f"held at rest ({unit})"), 1):
        figure.update_yaxes(title_text=title, rangemode="normal" if column == 1 else "tozero", col=column)
    figure.update_layout(barmode="stack", height=400)
    return theme.finish(figure, f"{TRAINING} of {len(labels)} {'run' if len(labels) == 1 else 'runs'}. {words}.")


def _draw_memory(figure: go.Figure, held: pd.DataFrame, labels: list[str]) -> str:
    """A stack of roles for each run in the last panel; the unit of its axis."""
    table = held.astype({"bytes": float}).pivot_table("bytes", "role", "label", aggfunc="max").reindex(columns=labels)
    divisor, unit = byte_scale(float(table.sum().max()))
    for role, colour in theme.ROLE_COLOURS.items():
        if role in table.index and (sizes := table.loc[role].fillna(0.0)).any():
            words = role.replace("_", " ")
            figure.add_bar(
                x=labels, y=sizes / divisor, name=words, marker_color=colour, customdata=list(map(format_bytes, sizes)),
                showlegend=bool(sizes.max() >= SEEN * table.sum().max()), row=1, col=3,
                hovertemplate=f"<b>%{{x}}</b><br>{words}: %{{customdata}}<extra></extra>",
            )  # fmt: skip
    return unit
