"""The report page of a comparison: the answer, the figures that show it, and folded the tables that support it.

Besides the summary there are tables that say why: where in the model memory peaked, what a GPU's allocator holds, and
which causes the length of a step has.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from shardlab import plots
from shardlab.analysis.held_bytes import allocator_items, peak
from shardlab.analysis.overlap import overlap, step_split
from shardlab.analysis.rows import in_timed_steps, of_steps, timed_steps
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.directory import write_page
from shardlab.experiment.told.answer import answer
from shardlab.experiment.told.losses import dead_verdict
from shardlab.experiment.told.pipelined import BUBBLES, readable_bubbles
from shardlab.experiment.told.saved_runs import Comparison, config_of
from shardlab.experiment.told.step_reasons import reasons_table
from shardlab.experiment.told.summary import FULL, PLANNED, REFERENCE, readable_summary, reference_of, rounding_of
from shardlab.experiment.told.verdicts import transports_of, verdicts
from shardlab.records.store import Records
from shardlab.vocabulary import Role

HELD = "What a rank's engine holds between two steps, and the most in one."
SPLIT = "Means; whiskers: quartiles. Off the CPU beside communication counts as exposed."
PROCESS = "All that a rank's process holds: tensors, and what torch does not own."
HIDDEN = "Exposed communication lengthens the step; hidden communication slows compute if no core is idle."
PEAK = (
    "Where the peak of the traced steps was: step and rank, the unit that computed, and the live bytes at that moment "
    "by role. Tracing slows compute and not messages: on a CPU an ordinary step may have other messages under way at "
    "its peak. Other: temporaries, gradients of activations, and with ZeRO-3 and FSDP whole gradients not yet reduced."
)
ALLOCATOR = (
    "What torch's CUDA allocator holds after the last step, on the rank that holds the most: the items add up to its "
    "reserved bytes. Library workspaces belong to no tensor of the engine; fragments are free parts of used segments."
)
REASONS = (
    "Why a step takes as long as it does: its causes, the primary one first. Gain is by how much the step would be "
    "shorter with the change made, by a replay of the recorded steps: the median over at most 12 of them."
)


def write_report(comparison: Comparison, config: CompareConfig | None = None) -> Path:
    """Write ``report.html`` beside the records and return its path; without ``config`` the records say it."""
    config = config_of(comparison.records) if config is None else config
    title = f"{config.title} on {config.ranks} {'rank' if config.ranks == 1 else 'ranks'}"
    page = plots.report_page(
        title, _lead(comparison, config), _tables(comparison), _figures(comparison), answer(comparison, config),
        first=2, choices=_timelines(comparison),
    )  # fmt: skip
    return write_page(comparison.directory / "report.html", page)


def _lead(comparison: Comparison, config: CompareConfig) -> str:
    manifest = next(iter(comparison.records.manifests.values()))
    return (
        f"{_steps_of(comparison)} on {_data_of(config, manifest)}, "
        f"{config.dtype} on {manifest['devices'][0]}{_sent_by(comparison, config.link)}, "
        f"torch {manifest['versions']['torch']}{_chosen(config)}. " + " ".join(verdicts(comparison))
    )


def _steps_of(comparison: Comparison) -> str:
    """How many there are: fewer than asked for if the run was cut off, or goes on from a checkpoint."""
    first, count = int(comparison.records.steps["step"].min()), int(comparison.summary["steps"].max())
    return f"{count} {'step' if count == 1 else 'steps'}{f' from step {first} on' if first else ''}"


def _data_of(config: CompareConfig, manifest: Mapping[str, Any]) -> str:
    if config.workload is None:
        return f"{config.text}, {config.global_batch} sequences of {config.seq_len} bytes a step"
    trained = manifest["workload"]
    return f"{trained['data']}, {trained['parameters']:,} parameters in {trained['module']}"


def _sent_by(comparison: Comparison, link: str | None) -> str:
    names = sorted(transports_of(comparison))
    sent = f", messages by {' and '.join(names)}" if names else ""
    return f"{sent}, link emulated as {link}" if link else sent


def _chosen(config: CompareConfig) -> str:
    """The options that differ from their default and were not mentioned yet."""
    said = {
        "strategies", "ranks", "steps", "workload", "model", "text", "batch", "seq_len", "dtype", "device", "link",
        "transport", "timeout_s",
    }  # fmt: skip
    values = ((field, getattr(config, field.name)) for field in fields(config) if field.name not in said)
    return "".join(f", {field.name}={value}" for field, value in values if value != field.default)


def _tables(comparison: Comparison) -> dict[str, pd.DataFrame]:
    caption = (
        f"Times are medians over steps, of each step's median over ranks, {_which(comparison.records.steps)}; exposed "
        "and hidden refer to communication. Bytes are maxima over ranks, at rest; the peak is the highest of the "
        "traced steps. 1 MB is 1,000,000 bytes."
    )
    tables = {caption: readable_summary(comparison.summary)}
    planned = comparison.summary.dropna(subset="as_planned")
    if len(planned):
        beside = "Planned without running, and measured: bytes at rest and bytes sent in a step, maxima over ranks."
        tables[beside] = readable_summary(planned, PLANNED)
    if len(comparison.bubbles):
        tables[BUBBLES] = readable_bubbles(comparison.bubbles)
    tables[REASONS] = reasons_table(comparison.reasons)
    return tables | memory_tables(comparison.records)


def memory_tables(records: Records) -> dict[str, pd.DataFrame]:
    """Why memory is so high, of one run or several: the peak and the allocator, without empty ones."""
    has_peak = (records.memory["where"] == "peak").any()
    tables = {PEAK: peak_table(records)} if has_peak else {}
    tables |= {ALLOCATOR: allocator_table(records)}
    return {caption: table for caption, table in tables.items() if len(table)}


def _figures(comparison: Comparison) -> dict[str, go.Figure]:
    """The first two are those of the first screen; losses, which should coincide, come last."""
    records = comparison.records
    has_single = REFERENCE in records.manifests and len(records.manifests) > 1
    without = f" Without {REFERENCE}, which trains on the rows of all ranks." if has_single else ""
    _, *at_the_peak = memory_figures(records).items()
    figures = {
        HELD: plots.memory_by_role(records.memory, with_peak=True), SPLIT + without: plots.step_parts(_parts(records)),
        **dict(at_the_peak),
    }  # fmt: skip
    if (records.memory["where"] == "process").any():
        figures[PROCESS] = plots.held_by_process(records.memory)
    figures |= time_figures(records, list(comparison.summary["strategy"]))
    figures["Every strategy trains on the same rows."] = plots.loss_curves(records.steps)
    reference = reference_of(records)
    if reference is not None and records.steps["run"].nunique() > 1:
        figures[_differs(comparison)] = plots.loss_difference(records.steps, reference)
    return figures


def _differs(comparison: Comparison) -> str:
    """What losses that are equal or are not mean; the verdicts say why they are not."""
    runs = comparison.records.manifests
    if not comparison.losses_equal:
        return "More than rounding differs."
    if dead_verdict(comparison) or any(rounding_of(run, comparison.records) != FULL for run in runs):
        return "How far losses differ."
    return "Only the order of summation differs."


def _parts(records: Records) -> pd.DataFrame:
    """Where the steps whose times count went; run by run, since each has a mesh of its own."""
    split = []
    for run, manifest in records.manifests.items():
        if run == REFERENCE and len(records.manifests) > 1:
            continue  # trains on the rows of all ranks
        tables = (records.collectives, records.spans, records.steps)
        collectives, spans, steps = (table[table["run"] == run] for table in tables)
        watched = timed_steps(steps).dropna(subset="wire_bytes")
        if len(watched):
            split.append(step_split(*in_timed_steps(collectives, spans, steps), watched, manifest.get("mesh")))
    return pd.concat(split, ignore_index=True)


def _timelines(comparison: Comparison) -> dict[str, go.Figure]:
    """By strategy and step: when ranks compute and communicate, in a step of median length and in the longest."""
    records = comparison.records
    timed, drawn = timed_steps(records.steps), {}
    sending = set(of_steps(records.collectives)["run"])
    for run in comparison.summary["strategy"]:
        own = timed[timed["run"] == run].dropna(subset="wire_bytes")
        if run in sending and len(own):
            longest = int(own.loc[own["step_us"].idxmax(), "step"])
            for step, which in {longest: "the longest", middle_step(own): "of median length"}.items():
                figure = plots.collective_timeline(records.collectives, records.spans, run=run, step=step)
                drawn[f"{run}, step {step}, {which}"] = figure
    return dict(reversed(drawn.items()))  # of the strategies the last first, which is the most sharded one


def memory_figures(records: Records) -> dict[str, go.Figure]:
    """What each rank holds between two steps, and at the peak."""
    figures = {"What each rank holds between two steps.": plots.memory_by_role(records.memory)}
    if (records.memory["where"] == "peak").any():
        figure = plots.memory_by_role(records.memory, where="peak")
        figures["The peak of a step, on the rank where it is highest."] = figure
    return figures


def time_figures(records: Records, runs: list[str] | None = None) -> dict[str, go.Figure]:
    """What is hidden, what is sent beside the reported loss, and how long steps take.

    Args:
        records: of one run or several.
        runs: in this order; None for one run.
    """
    return {
        HIDDEN: plots.overlap_bars(overlap(*in_timed_steps(records.collectives, records.spans, records.steps))),
        "Bytes sent by one rank in one step, by the ring formula.": plots.wire_volume(records.collectives, runs=runs),
        f"How long a step takes, {_which(records.steps)}.": plots.step_times(timed_steps(records.steps)),
    }


def _which(steps: pd.DataFrame) -> str:
    """Which steps count for times, see ``timed_steps``."""
    if len(timed_steps(steps)) < len(steps):
        return "without the first step, which allocates, and those whose memory is traced"
    return "the first step and those whose memory is traced among them: there are no others"


def middle_step(steps: pd.DataFrame) -> int:
    """The step of median length, of those that were watched; of two in the middle, the shorter."""
    us = steps.dropna(subset="wire_bytes").groupby("step")["step_us"].median().sort_values(kind="stable")
    return int(us.index[(len(us) - 1) // 2])


def peak_table(records: Records) -> pd.DataFrame:
    """Step, rank, unit and phase of each run's peak, and the bytes of each role at that moment, which add up to it."""
    rows = peak(records.memory)
    rows = rows[rows["role"] != str(Role.OFFLOADED)]
    wide = rows.pivot_table(
        index=["run", "step", "rank", "unit", "phase"], columns="role", values="bytes", aggfunc="sum", sort=False
    )
    held = [str(role) for role in Role if role in wide.columns and wide[role].any()]
    table = wide[held].assign(all=wide.sum(axis=1)) / 1e6
    names = {role: f"{role.replace('_', ' ')} (MB)" for role in (*held, "all")} | {"run": "strategy"}
    return table.reset_index().rename(columns=names).rename_axis(columns=None)


def allocator_table(records: Records) -> pd.DataFrame:
    """One column for each item of ``allocator_items``; no rows if no run used a GPU."""
    items = allocator_items(records.memory)
    wide = items.pivot_table(index=["run", "rank"], columns="item", values="bytes", aggfunc="sum", sort=False) / 1e6
    wide = wide.rename(columns=lambda item: f"{item.replace('_', ' ')} (MB)").reset_index()
    return wide.rename(columns={"run": "strategy"}).rename_axis(columns=None)
