"""The report page of a comparison: the table first, then the pictures that explain it."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.overlap import overlap
from shardlab.experiment.compare import Comparison
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.report_tables import ALLOCATOR, PATH, PEAK, allocator_table, path_table, peak_table
from shardlab.experiment.summary import JUDGED_STEPS, REFERENCE, not_finite, reference_of, timed_steps
from shardlab.plots import (
    collective_timeline,
    loss_curves,
    loss_difference,
    memory_by_role,
    overlap_bars,
    report_page,
    step_times,
    wire_volume,
)
from shardlab.vocabulary import HostTransport, Phase

MB = 1e6
COLUMNS = {
    "strategy": ("strategy", 1),
    "ranks": ("ranks", 1),
    "loss_last": ("last loss", 1),
    "max_loss_difference": ("loss differs", 1),
    "step_ms": ("step (ms)", 1),
    "exposed_comm_ms": ("exposed (ms)", 1),
    "overlap": ("hidden (%)", 0.01),
    "parameter_bytes": ("parameters (MB)", MB),
    "gradient_bytes": ("gradients (MB)", MB),
    "optimizer_bytes": ("optimizer (MB)", MB),
    "offloaded_bytes": ("offloaded (MB)", MB),
    "peak_bytes": ("peak (MB)", MB),
    "wire_bytes_per_step": ("sent (MB/step)", MB),
}
PLANNED = {
    "strategy": ("strategy", 1),
    "planned_rest_bytes": ("planned at rest (bytes)", 1),
    "rest_bytes": ("measured (bytes)", 1),
    "planned_wire_bytes": ("planned to send (bytes)", 1),
    "wire_bytes_per_step": ("sent (bytes)", 1),
    "as_planned": ("each role, rank and message as planned", 1),
}
# The same for a terminal of 80 columns: a word over its unit.
TERMINAL = {
    "strategy": ("strategy", 1),
    "loss_last": ("last\nloss", 1),
    "max_loss_difference": ("loss\ndiffers", 1),
    "step_ms": ("step\nms", 1),
    "exposed_comm_ms": ("exposed\nms", 1),
    "overlap": ("hidden\n%", 0.01),
    "parameter_bytes": ("params\nMB", MB),
    "gradient_bytes": ("grads\nMB", MB),
    "optimizer_bytes": ("optim\nMB", MB),
    "offloaded_bytes": ("host\nMB", MB),
    "peak_bytes": ("peak\nMB", MB),
    "wire_bytes_per_step": ("sent\nMB/step", MB),
}
HIDDEN = "Exposed communication lengthens the step; hidden, it slows the compute where no core is idle."


def readable_summary(summary: pd.DataFrame, columns: Mapping[str, tuple[str, float]] = COLUMNS) -> pd.DataFrame:
    """The summary with units a person reads: ms, percent, MB (decimal).

    Args:
        summary: rows of ``summary.json``.
        columns: header and divisor of each column to show; what nobody offloads is not shown.
    """
    return pd.DataFrame(
        {
            label: summary[name] if divisor == 1 else summary[name].astype("Float64") / divisor
            for name, (label, divisor) in columns.items()
            if name != "offloaded_bytes" or summary[name].any()
        }
    )


def write_report(comparison: Comparison, config: CompareConfig) -> Path:
    """Write ``report.html`` beside the records; its path."""
    path = comparison.directory / "report.html"
    title = f"{config.model} on {config.ranks} {'rank' if config.ranks == 1 else 'ranks'}"
    path.write_text(report_page(title, _lead(comparison, config), _tables(comparison), _figures(comparison)))
    return path


def verdicts(comparison: Comparison) -> list[str]:
    """What a comparison has shown, in sentences."""
    said = (verdict(comparison), plan_verdict(comparison), transport_verdict(comparison))
    return [sentence for sentence in said if sentence]


def verdict(comparison: Comparison) -> str:
    """One sentence: are the losses equal, and are they numbers at all?"""
    if wrong := not_finite(comparison.records.steps):
        runs = ", ".join(f"that of {run} from step {step} on" for run, step in wrong.items())
        return f"Losses are NOT finite, so the run has failed: {runs}. Lower the learning rate, or clip the gradients."
    judged = comparison.summary["judged_loss_difference"].max()
    if pd.isna(judged) or len(comparison.summary) == 1:
        return "Losses were not compared: only one strategy ran."
    reference = str(comparison.summary["loss_reference"].iloc[0])
    origin = "the single process" if reference == REFERENCE else f"{reference}, the first strategy,"
    rounded = {run: precision for run in comparison.summary["strategy"] if (precision := _rounded(run, comparison))}
    equal = "equal" if comparison.losses_equal else "NOT equal"
    if rounded and comparison.losses_equal:
        equal = f"equal, those of {', '.join(rounded)} within the rounding of {next(iter(rounded.values()))}"
    steps, largest = int(comparison.summary["steps"].max()), comparison.summary["max_loss_difference"].max()
    if steps <= JUDGED_STEPS:
        return f"Losses are {equal}: the largest difference from {origin} is {judged:.1e}."
    return (
        f"Losses are {equal}: the largest difference from {origin} in the first {JUDGED_STEPS} steps is "
        f"{judged:.1e}; over all {steps} steps, in which training amplifies every rounding, it is {largest:.1e}."
    )


def _rounded(run: str, comparison: Comparison) -> str | None:
    """The precision of a run that computes in 16 bits."""
    precision = str(comparison.records.manifests[run]["config"].get("precision", "full"))
    return None if precision == "full" else precision


def plan_verdict(comparison: Comparison) -> str:
    """One sentence: do bytes and messages equal the planner's?"""
    planned = comparison.summary.dropna(subset="as_planned")
    if planned.empty:
        return "There is no plan to compare bytes and messages with."
    wrong = planned.loc[~planned["as_planned"].astype(bool), "strategy"]
    if len(wrong):
        return f"Bytes at rest or messages of {', '.join(wrong)} are NOT those of the plan."
    unplanned = comparison.summary.loc[comparison.summary["as_planned"].isna(), "strategy"]
    besides = f" ({', '.join(unplanned)}: not ours, not planned)" if len(unplanned) else ""
    return f"Bytes at rest of every role and rank, and every message of a step, are those of the plan{besides}."


def transport_verdict(comparison: Comparison) -> str:
    """One sentence where torch's engines did not send as ours, which shows in the times; else empty."""
    transports = _transports(comparison)
    if set(transports) != set(HostTransport):
        return ""
    ours, theirs = (", ".join(transports[name]) for name in (HostTransport.SHARED_MEMORY, HostTransport.GLOO))
    return (
        f"Times compare more than engines: {ours} sent through shared memory, {theirs} over gloo; "
        "with transport=gloo all do."
    )


def _lead(comparison: Comparison, config: CompareConfig) -> str:
    manifest = next(iter(comparison.records.manifests.values()))
    return (
        f"{config.steps} steps on {config.text}, {config.global_batch} sequences of {config.seq_len} bytes a step, "
        f"{config.dtype} on {manifest['devices'][0]}{_sent_by(comparison, config.link)}, "
        f"torch {manifest['versions']['torch']}{_chosen(config)}. " + " ".join(verdicts(comparison))
    )


def _sent_by(comparison: Comparison, link: str | None) -> str:
    names = sorted(_transports(comparison))
    sent = f", messages by {' and '.join(names)}" if names else ""
    return f"{sent}, link emulated as {link}" if link else sent


def _transports(comparison: Comparison) -> dict[str, list[str]]:
    """How the messages of a step travelled, and of which strategies. (The loss for the report is always sent by us.)"""
    sent = comparison.records.collectives.dropna(subset="transport")
    sent = sent[~sent["phase"].isin([Phase.SETUP, Phase.METRICS])]
    real = sent["transport"].str.replace(" as .*", "", regex=True)  # without the link that is emulated
    return {str(name): list(runs.unique()) for name, runs in sent["run"].groupby(real)}


def _chosen(config: CompareConfig) -> str:
    """What was set to something else than the default and is not said yet."""
    said = {
        "strategies", "ranks", "steps", "model", "text", "batch", "seq_len", "dtype", "device", "link", "transport",
        "timeout_s",
    }  # fmt: skip
    chosen = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in said and getattr(config, field.name) != field.default
    }
    return "".join(f", {name}={value}" for name, value in chosen.items())


def _tables(comparison: Comparison) -> dict[str, pd.DataFrame]:
    caption = (
        "Medians of times over steps and ranks, without the first step. Exposed and hidden: communication. Bytes: "
        "maximum over ranks, at rest; the peak is that of one traced step. 1 MB is 1,000,000 bytes."
    )
    tables = {caption: readable_summary(comparison.summary)}
    planned = comparison.summary.dropna(subset="as_planned")
    if len(planned):
        tables["Planned without running, and measured: bytes at rest on the rank with most, bytes sent in a step."] = (
            readable_summary(planned, PLANNED)
        )
    records, timed = comparison.records, timed_steps(comparison.records.steps)
    if (records.memory["where"] == "peak").any():
        tables[PEAK] = peak_table(records)
    if len(held := allocator_table(records)):
        tables[ALLOCATOR] = held
    path = path_table(records, {str(run): _middle_step(own) for run, own in timed.groupby("run", sort=False)})
    if len(path):
        tables[PATH] = path
    return tables


def _figures(comparison: Comparison) -> dict[str, go.Figure]:
    records = comparison.records
    traffic = records.collectives[records.collectives["phase"] != Phase.METRICS]
    timed = timed_steps(records.steps)
    figures = {"Every strategy trains on the same rows.": loss_curves(records.steps)}
    reference = reference_of(records.steps["run"].unique())
    if reference is not None and records.steps["run"].nunique() > 1:
        figures["Only the order of summation differs."] = loss_difference(records.steps, reference)
    figures["What each rank holds between two steps."] = memory_by_role(records.memory)
    if (records.memory["where"] == "peak").any():
        figures["The highest moment of a step, on the rank where it is highest."] = memory_by_role(
            records.memory, where="peak"
        )
    for run in (run for run in comparison.summary["strategy"] if run in set(traffic["run"])):
        figures[f"When {run} computes and when it communicates."] = collective_timeline(
            traffic, records.spans, run=run, step=_middle_step(timed[timed["run"] == run])
        )
    figures[HIDDEN] = overlap_bars(overlap(_in_steps(traffic, timed), _in_steps(records.spans, timed)))
    figures["Bytes sent by one rank in one step, by the ring formula."] = wire_volume(
        traffic, runs=list(comparison.summary["strategy"])
    )
    figures["The first step, which allocates, and memory-traced ones are left out."] = step_times(timed)
    return figures


def _in_steps(table: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``table`` that belong to one of ``steps``."""
    keys = ["run", "source", "rank", "step"]
    return table.merge(steps[keys], on=keys)


def _middle_step(steps: pd.DataFrame) -> int:
    """The step of median length on the first rank: neither a lucky nor an unlucky one."""
    own = steps[steps["rank"] == steps["rank"].min()].sort_values("step_us", kind="stable")
    return int(own["step"].iloc[len(own) // 2])
