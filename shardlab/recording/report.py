"""What ``record`` has left, read and shown: an answer in lines, a summary of one row, a page of tables and figures."""

import json
from math import isnan
from pathlib import Path
from shlex import join, quote

import pandas as pd
import plotly.graph_objects as go

from shardlab.analysis.attribution import waits
from shardlab.analysis.held_bytes import at_rest
from shardlab.analysis.intervals import total
from shardlab.analysis.rows import in_timed_steps, timed_steps
from shardlab.experiment.directory import write_page
from shardlab.experiment.told.answer import ALIKE, ROLES, Line, messages, quartiles, steps_differ
from shardlab.experiment.told.report import REASONS, memory_figures, memory_tables, middle_step, time_figures
from shardlab.experiment.told.saved_runs import Comparison, check_complete, check_steps
from shardlab.experiment.told.step_reasons import NO_MESH, reasons_table, why
from shardlab.experiment.told.summary import COLUMNS as COMPARED
from shardlab.plots import collective_timeline, loss_curves, report_page
from shardlab.plots.text import format_bytes, format_percent, format_us
from shardlab.records.store import Records, load_run, whole_steps
from shardlab.vocabulary import Role
from shardlab.why.slow_messages import repeated, repeated_in_words

from shardlab.experiment.told.summary import (  # isort: skip
    LOOK_FOR, MB, averaged_runs, readable_summary, summarise, watched_in_turn, why_dead,
)  # fmt: skip

_FIRST = (
    "ranks", "loss_last", "step_ms", "exposed_comm_ms", "overlap",
    "parameter_bytes", "gradient_bytes", "optimizer_bytes",
)  # fmt: skip
COLUMNS = {
    "strategy": ("record", 1),
    "steps": ("steps", 1),
    **{name: COMPARED[name] for name in _FIRST},
    "buffer_bytes": ("buckets (MB)", MB),
    "unattributed_bytes": ("unattributed (MB)", MB),
    **{name: COMPARED[name] for name in ("peak_bytes", "wire_bytes_per_step", "moved_bytes_per_step")},
    "recorder_share": ("recording (%)", 0.01),
    "unwatched_recorder_share": ("unwatched (%)", 0.01),
}
CAPTION = (
    "Times are medians over steps, of each step's median over ranks, without the first step; exposed and hidden refer "
    "to communication. What is sent, exposed or hidden is known of watched steps: {watched}. Bytes are maxima over "
    "ranks, at rest; the peak is the highest of the traced steps; unattributed are tensors that belong to no module "
    "that trains and to no optimizer. The loss is what the script called backward on, the mean over ranks. Recording "
    "is the time that rank 0 spent in the recorder's own code, by its own clock, in percent of the steps' time, "
    "without the first step and traced ones. All memory is read after a step (0, 1, 64, 256 and so on), which counts "
    "as recording and is in no step's time: after a few short steps the number may be above 100. Unwatched is the same "
    "of the steps that are not watched, which are most of a long run. 1 MB is 1,000,000 bytes."
)


LATE = 0.6  # of the steps: a rank that is waited for most in more of them is late
_STARTERS = ("ipykernel_launcher", "__main__")  # Python files that run something else


def is_recorded(directory: Path) -> bool:
    """Whether ``record`` wrote the directory."""
    try:
        return "recorded" in json.loads((directory / "manifest.json").read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def load_recorded(directory: Path) -> Comparison:
    """What ``record`` has left in a directory, also if the script was killed; as a comparison of one row.

    The row has the columns that ``summary.json`` has for a strategy, and more; the tables are of the steps that all
    ranks have finished.

    Raises:
        ValueError: a record is damaged, or no step was finished.
    """
    records = whole_steps(load_run(directory))
    check_complete(records, "record")
    check_steps(records, directory)
    mean = records.steps.groupby("step")["loss"].transform("mean")
    records = Records(**{**vars(records), "steps": records.steps.assign(loss=mean)})
    (row,), (manifest,) = summarise(records, "float32"), records.manifests.values()
    held = at_rest(records.memory).set_index("role")["bytes"]
    row |= {
        "buffer_bytes": int(held.get(Role.COMMUNICATION_BUFFER, 0)),
        "unattributed_bytes": int(held.get(Role.UNATTRIBUTED, 0)),
        "unwatched_recorder_share": manifest.get("unwatched_recorder_share"),
        "losses_equal": None,  # it has no reference: nothing is said of its losses
    }
    return Comparison(pd.DataFrame([row]), records, directory)


def write_report(recorded: Comparison) -> Path:
    """Write ``report.html`` beside the records and return its path."""
    ranks = int(recorded.summary["ranks"].iloc[0])
    title = f"{_name(recorded)} on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    page = report_page(
        title, lead(recorded), _tables(recorded), _figures(recorded), answer_of_record(recorded), first=2
    )
    return write_page(recorded.directory / "report.html", page)


def answer_of_record(recorded: Comparison) -> list[Line]:
    """What a record answers: what a rank holds, how long a step takes, what is sent, who is late, what to look at."""
    rows, records = recorded.summary.set_index("strategy"), recorded.records
    exposed, hidden, sent = rows[["exposed_comm_ms", "overlap", "wire_bytes_per_step"]].astype("float64").iloc[0]
    took = f"{quartiles(records.steps)['middle'].iloc[0]:.3g} ms a step (median)"
    if sent > 0:
        known = (
            f"of its communication {format_percent(hidden)} is hidden, {exposed:.3g} ms are exposed, median over ranks"
        )
        took += f"; {'how much of its communication is hidden is not known' if isnan(hidden) else known}"
    held = rows[[*ROLES, "buffer_bytes"]].sum(axis=1).iloc[0]
    peak, last = rows["peak_bytes"].iloc[0], late(records)
    most = "no peak was traced" if pd.isna(peak) else f"at the peak {format_bytes(peak)}{steps_differ(rows)}"
    sends = f"{format_bytes(sent)} a rank and step; {_messages(records)}{_again(records)}" if sent else "nothing"
    where = quote(str(recorded.directory))
    looks = f"shardlab trace {where} -o timeline.json: each rank's timeline, for ui.perfetto.dev"
    again = f"shardlab diff {where} OTHER: what a change has changed, from a record of the changed script"
    return [
        Line("MEMORY", f"{format_bytes(held)} at rest on a rank; {most}"),
        Line("TIME", took),
        Line("WHY", why(recorded.reasons, is_script=True)),
        Line("SENT", "not known: no step was watched" if isnan(sent) else sends),
        Line("LATE", last),
        *_dead(records),
        Line("NEXT", (looks if last.startswith("rank") else again) + _is_it_right(recorded)),
    ]


def _messages(records: Records) -> str:
    """How many a rank sends in a step, and that it is a mean where steps send unlike bytes."""
    if not (averaged := averaged_runs(records)):
        return f"messages: {messages(records.collectives).max():g}"
    steps = watched_in_turn(records.steps.dropna(subset="wire_bytes"), records)
    number = messages(watched_in_turn(records.collectives, records), averaged, steps).max()
    return f"messages: {number:g}; means over the first {steps['step'].nunique()} steps, of which some send more"


def _is_it_right(recorded: Comparison) -> str:
    """How to know whether a script is right, which a record does not say."""
    ranks, (manifest,) = int(recorded.summary["ranks"].iloc[0]), recorded.records.manifests.values()
    if ranks == 1 or not _name(recorded).endswith(".py"):
        return ""
    return f"; shardlab same --ranks {ranks} {join(manifest['recorded'])}: are its gradients those of one process?"


def _dead(records: Records) -> list[Line]:
    """A line if the run has not trained: then its times and bytes are of no training."""
    dead = why_dead(records.steps)
    return [Line("TRAINS", f"cannot be said: {dead}; look for {LOOK_FOR}")] if dead else []


def _again(records: Records) -> str:
    """Which reductions every micro-batch sends, though the last one's would do."""
    rows = repeated(*in_timed_steps(records.collectives, records.spans, records.steps))
    rows = rows[rows["rank"] == rows["rank"].min()]
    return f"; {repeated_in_words(rows, rows['step'].nunique())}" if len(rows) else ""


def late(records: Records) -> str:
    """Which rank the others wait for most, in how many steps, and how long.

    Args:
        records: of one run.
    """
    (manifest,) = records.manifests.values()
    if manifest.get("ranks") == 1:
        return "no rank: there is one alone"
    if manifest["mesh"] is None:
        return f"cannot be said: {NO_MESH}"
    sent, _ = in_timed_steps(records.collectives, records.spans, records.steps)
    met = waits(sent, manifest["mesh"])
    met = met[met["group"].str.contains(",")]
    if met.empty:
        return "cannot be said: no meeting of ranks was watched"
    waiting = met[met["rank"] != met["last_rank"]]
    waiting = waiting.assign(until_us=waiting["start_us"] + waiting["straggler_us"])
    # Where several messages wait at once, as DDP's buckets do, that is one wait.
    us = waiting.groupby(["step", "last_rank", "rank"])[["start_us", "until_us"]].apply(total)
    # Of each step, since ranks may come last more often by a little than the one that costs time.
    by_step = us.groupby(["step", "last_rank"]).mean().unstack(fill_value=0)
    most = by_step.idxmax(axis="columns")
    rank = most.mode()[0]
    # In other steps they do not meet.
    watched = timed_steps(records.steps).dropna(subset="wire_bytes")
    num_steps = max(len(most), watched["step"].nunique())
    share, lost_us = float((most == rank).sum() / num_steps), float(by_step[rank].sum() / num_steps)
    said = f"rank {rank} is waited for most in {format_percent(share)} of all steps, {format_us(lost_us)} a step"
    is_late = share > LATE and lost_us > ALIKE * timed_steps(records.steps)["step_us"].median()
    return said if is_late else f"no rank; {said}"


def _name(recorded: Comparison) -> str:
    """The script's file, or the directory where the record was made in a notebook: its name is that of a kernel."""
    (manifest,) = recorded.records.manifests.values()
    script = Path(manifest["recorded"][0])
    return script.name if script.suffix == ".py" and script.stem not in _STARTERS else str(manifest["run"])


def lead(recorded: Comparison) -> str:
    """What ran, in one or two sentences."""
    (manifest,) = recorded.records.manifests.values()
    sent = f", messages by {manifest['backend']}" if manifest["backend"] else ""
    steps = int(recorded.summary["steps"].iloc[0])
    return (
        f"{' '.join(manifest['recorded'])}: {steps} steps on {manifest['devices'][0]}{sent}, "
        f"torch {manifest['versions']['torch']}."
    )


def caption(recorded: Comparison) -> str:
    """What the numbers of the summary are."""
    (manifest,) = recorded.records.manifests.values()
    always, every = manifest.get("always_watched", 0), manifest.get("watch_every", 1)
    watched = "all of them" if every == 1 else f"the first {always}, then one in {every}"
    return CAPTION.format(watched=watched)


def _tables(recorded: Comparison) -> dict[str, pd.DataFrame]:
    summary = {caption(recorded): readable_summary(recorded.summary, COLUMNS)}
    return summary | {REASONS: reasons_table(recorded.reasons, is_script=True)} | memory_tables(recorded.records)


def _figures(recorded: Comparison) -> dict[str, go.Figure]:
    records = recorded.records
    memory, times = memory_figures(records), time_figures(records)
    (held, at_rest_figure), (length, step_times_figure) = next(iter(memory.items())), list(times.items())[-1]
    figures = {held: at_rest_figure, length: step_times_figure}
    figures["When it computes and when it communicates."] = collective_timeline(
        records.collectives, records.spans, step=middle_step(timed_steps(records.steps))
    )
    return figures | memory | times | {"The scalar that backward was called on.": loss_curves(records.steps)}
