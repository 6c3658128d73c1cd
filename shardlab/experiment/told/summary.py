"""One row per strategy: what it cost, whether it trained the same model, and how to print that."""

from collections.abc import Collection, Iterable, Mapping
from math import isfinite, nan
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.held_bytes import at_rest, peaks_of_steps
from shardlab.analysis.overlap import hidden_share
from shardlab.analysis.rows import step_lengths, timed_steps
from shardlab.experiment.told.pipelined import bubble_of, bubbles
from shardlab.records.store import Records
from shardlab.vocabulary import Phase, Role

REFERENCE = "single"
FULL = "full"  # precision
DRAWS = "the loss draws random numbers, as dropout does, and each rank draws its own"
# Sums in a different order differ in the last bits, and training carries the difference along.
LOSS_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
# The same where training has not yet carried it far, and of the norm of the gradients. In float32 our engines reach
# 2e-7 and 6e-6, relative, on CPUs, with MLPs, convolutions, an LSTM and GPTs under Adam and SGD; of GPUs it is unknown.
EARLY_STEPS, EARLY_TOLERANCE, NORM_TOLERANCE = 3, 1e-6, 5e-5
# Later, training has amplified the last bit of float32 so much that two correct runs drift apart.
JUDGED_STEPS = 10
UNMOVED = 1e-6  # relative: what rounding makes of numbers that are the same
LOOK_FOR = "a constant or detached loss, outputs times 0, or a learning rate of 0"
ROUNDED_LOSS_TOLERANCE, ROUNDED_NORM_TOLERANCE = 0.05, 0.1  # 16-bit compute rounds differently
MB = 1e6
MOVED = "moved_bytes_per_step"
# Column, its header, its header in a terminal of 80 columns, where the unit stands below, and its divisor.
_HEADERS: tuple[tuple[str, str, str, float], ...] = (
    ("strategy", "strategy", "strategy", 1),
    ("ranks", "ranks", "", 1),
    ("loss_last", "last loss", "last\nloss", 1),
    ("max_loss_difference", "loss differs", "loss\ndiffers", 1),
    ("step_ms", "step (ms)", "step\nms", 1),
    ("exposed_comm_ms", "exposed (ms)", "exposed\nms", 1),
    ("overlap", "hidden (%)", "hidden\n%", 0.01),
    ("parameter_bytes", "parameters (MB)", "params\nMB", MB),
    ("gradient_bytes", "gradients (MB)", "grads\nMB", MB),
    ("optimizer_bytes", "optimizer (MB)", "optim\nMB", MB),
    ("offloaded_bytes", "offloaded (MB)", "host\nMB", MB),
    ("peak_bytes", "peak (MB)", "peak\nMB", MB),
    ("wire_bytes_per_step", "sent (MB/step)", "sent\nMB/step", MB),
    (MOVED, "moved (MB/step)", "moved\nMB/step", MB),
)
COLUMNS = {name: (header, divisor) for name, header, _, divisor in _HEADERS}
TERMINAL = {name: (header, divisor) for name, _, header, divisor in _HEADERS if header}
PLANNED = {
    "strategy": ("strategy", 1),
    "planned_rest_bytes": ("planned at rest (bytes)", 1),
    "rest_bytes": ("measured (bytes)", 1),
    "planned_wire_bytes": ("planned to send (bytes)", 1),
    "wire_bytes_per_step": ("sent (bytes)", 1),
    "as_planned": ("each role, rank and message as planned", 1),
}


def summarise(records: Records, dtype: str) -> list[dict[str, Any]]:
    """The rows of ``summary.json``.

    Times are medians over steps, of each step's median over ranks, without the first step and memory-traced steps if
    others remain; ``overlap`` is the median over ranks of ``analysis.overlap.hidden_share``, over the same steps. Bytes
    are maxima over ranks, at rest after the last step in which they were sampled; ``peak_bytes`` is the highest moment
    of the traced steps (on CUDA of all), with ``peak_step``, ``least_peak_bytes`` and ``unlike_step`` as
    ``held_bytes.peaks_of_steps`` says.
    ``wire_bytes_per_step`` is what the algorithm needs the busiest rank to send in the last step that a scaler of
    gradients did not skip, without the reported loss, or the mean over all steps where these send different bytes, as
    in local SGD, which sends in some steps only;
    ``moved_bytes_per_step`` is what the transport of the busiest rank sends for it, null if not known.
    ``recorder_share`` is the time of recording over the time of the steps, on the rank where it is largest.
    ``max_loss_difference`` is against ``loss_reference``, and null without one; ``losses_equal`` judges the first
    ``JUDGED_STEPS`` steps that both have, whose largest difference is ``judged_loss_difference``; null if they have no
    step in common, if ranks differ by design, or if losses that are equal show nothing (``why_dead``). Of the first
    ``EARLY_STEPS`` steps less is allowed, and the norm of the gradients counts too: ``norm_ratio`` is the one farthest
    from 1, relative to the reference's. If a loss of the run or of its reference is inf or NaN at any step, the
    differences are null and ``losses_equal`` is False, even without a reference. Runs with a schedule have the columns
    of ``pipelined.bubbles`` too. No number is inf or NaN, because JSON has neither.
    """
    losses = losses_of(records.steps)
    rest = at_rest(records.memory).pivot_table(index="run", columns="role", values="bytes", aggfunc="max")
    hidden = hidden_share(records.collectives, records.spans, records.steps).groupby("run")["overlap"].median()
    lengths = step_lengths(records.steps).groupby("run").median()
    timed = timed_steps(records.steps)
    has_none = (timed["wire_bytes"] == 0) & timed["exposed_comm_us"].isna()  # where other steps of the run send
    exposed = timed["exposed_comm_us"].mask(has_none & timed["run"].isin(averaged_runs(records)), 0.0)
    exposed = exposed.groupby([timed["run"], timed["step"]]).median().groupby("run").median()
    sources = records.steps.groupby("run")["source"].first()
    idle = bubbles(records)
    return [
        {
            **_training(run, losses, records, dtype),
            "step_ms": float(lengths[run]) / 1e3,
            "exposed_comm_ms": _number(exposed[run], 1e-3),
            "overlap": _number(hidden.get(run)),
            "source": str(sources[run]),
            **_bytes(run, rest, records),
            **bubble_of(run, idle),
        }
        for run in losses
    ]


def losses_of(steps: pd.DataFrame) -> "dict[str, pd.Series[float]]":
    """The losses of each run by step; all ranks have the same."""
    return {str(run): own.groupby("step")["loss"].first() for run, own in steps.groupby("run", sort=False)}


def reference_of(records: Records) -> str | None:
    """The run that the losses of the others are compared with: 'single', else the first of several.

    Not 'single' where ranks that share a batch compute something else than one process, such as BatchNorm's statistics;
    and none whose ranks differ by design.
    """
    names = [str(run) for run in records.steps["run"].unique()]
    if REFERENCE in names and not differs_by_rank(records):
        return REFERENCE
    names = [name for name in names if name not in (REFERENCE, *ranks_differ(records))]
    return names[0] if len(names) > 1 else None


def differs_by_rank(records: Records) -> list[str]:
    """Why ranks that share a batch differ from one process although all is right; empty if they do not."""
    manifests: list[Mapping[str, Any]] = list(records.manifests.values())
    layers = ((manifest.get("workload") or {}).get("differs_by_rank", []) for manifest in manifests)
    drew = any(manifest.get("drew_random_numbers") for manifest in manifests)
    buffers = own_buffers_said(manifests)
    matters = bool(buffers) and not _as_single(records)
    return [*next(layers, []), *([DRAWS] if drew else []), *([buffers] if matters else [])]


def _as_single(records: Records) -> bool:
    """Whether the losses of all runs are the single process's: then buffers that differ by rank are no reason."""
    losses = losses_of(records.steps)
    single = losses.get(REFERENCE, pd.Series(dtype="float64"))
    differences = {run: judged((own - single).abs().dropna()).max() for run, own in losses.items()}
    return all(not far > tolerance_of_run(run, records, "float32") for run, far in differences.items())


def not_finite(steps: pd.DataFrame) -> dict[str, int]:
    """The first step with an inf or NaN loss, for each run that has one.

    Args:
        steps: table ``steps``.
    """
    wrong = steps[~np.isfinite(steps["loss"].astype("float64"))]
    return {str(run): int(step) for run, step in wrong.groupby("run", sort=False)["step"].min().items()}


def readable_summary(summary: pd.DataFrame, columns: Mapping[str, tuple[str, float]] = COLUMNS) -> pd.DataFrame:
    """The summary in readable units: ms, percent, MB (decimal).

    Args:
        summary: rows of ``summary.json``.
        columns: header and divisor of each column; bytes offloaded are left out if there are none. Where a transport
            moves other bytes than the algorithm needs, both stand there, "to send" and "moved"; else one, "sent".
    """
    moved, needed = (summary[name].astype("Float64") for name in (MOVED, "wire_bytes_per_step"))
    moves_others = bool(((moved - needed).abs() > 0.5).any())
    empty = {"offloaded_bytes": not summary.get("offloaded_bytes", pd.Series()).any(), MOVED: not moves_others}
    readable = pd.DataFrame(
        {
            label: summary[name] if divisor == 1 else summary[name].astype("Float64") / divisor
            for name, (label, divisor) in columns.items()
            if not empty.get(name, False)
        }
    )
    return readable.rename(columns=lambda label: label.replace("sent", "to send")) if moves_others else readable


def _training(run: str, losses: dict[str, pd.Series], records: Records, dtype: str) -> dict[str, Any]:
    own, reference = losses[run], reference_of(records)
    differ = run in ranks_differ(records)
    if run == REFERENCE != reference:
        reference = None
    differences = None if reference is None else (own - losses[reference]).abs().dropna()
    difference = None if differences is None else _number(judged(differences).max())
    tolerance = max(tolerance_of_run(name, records, dtype) for name in (run, reference) if name is not None)
    failed = not not_finite(records.steps).keys().isdisjoint({run, reference})
    equal = None if difference is None else difference <= tolerance
    ratio = None if reference is None else _norm_ratio(records.steps, run, reference)
    # A run that goes on from a checkpoint carries differences from before.
    is_early = int(own.index.min()) == 0 and tolerance <= LOSS_TOLERANCE["float32"]
    is_on_cpus = all(str(device).startswith("cpu") for device in records.manifests[run]["devices"])
    if equal and differences is not None and is_early and is_on_cpus:
        early, scale = judged(differences, EARLY_STEPS).max(), max(1.0, float(losses[str(reference)].abs().max()))
        equal = bool(early <= EARLY_TOLERANCE * scale and (ratio is None or abs(ratio - 1) <= NORM_TOLERANCE))
    if equal and ratio is not None and abs(ratio - 1) > ROUNDED_NORM_TOLERANCE:
        equal = False
    if equal and why_dead(records.steps):
        equal = None
    return {
        "strategy": run, "ranks": int(records.manifests[run]["ranks"]), "steps": len(own),
        "loss_first": _number(own.iloc[0]), "loss_last": _number(own.iloc[-1]), "loss_reference": reference,
        "max_loss_difference": None if failed or differences is None else _number(differences.max()),
        "judged_loss_difference": None if failed or differ else difference,
        "losses_equal": False if failed else None if differ else equal,
        "norm_ratio": ratio,
    }  # fmt: skip


def _norm_ratio(steps: pd.DataFrame, run: str, reference: str) -> float | None:
    """How many times as large as the reference's the norm of the gradients is, where that is farthest from 1."""
    own, other = (steps[steps["run"] == name].groupby("step")["grad_norm"].first() for name in (run, reference))
    ratios = judged((own / other).where(lambda ratio: np.isfinite(ratio)).dropna(), EARLY_STEPS)
    return None if ratios.empty else float(ratios.iloc[int((ratios - 1).abs().to_numpy().argmax())])


def why_dead(steps: pd.DataFrame) -> str:
    """Why the losses of these steps say nothing of a strategy, in words; empty where they do.

    Of a run whose loss never moves every strategy says the same, right or wrong.

    Args:
        steps: table ``steps`` of one run or several; NaN norms are not known.
    """
    losses = steps.groupby(["run", "step"])["loss"].first()
    norms = steps.reindex(columns=["run", "step", "grad_norm"]).dropna().groupby(["run", "step"])["grad_norm"].max()
    if len(norms) and not norms.to_numpy().any():
        return "the norm of the gradients is 0"
    if _all_alike(losses):
        return f"the loss is {losses.iloc[0]:.6g} in every step"
    if _all_alike(norms):
        return f"the norm of the gradients is {norms.iloc[0]:.6g} in every step"
    return ""


def _all_alike(known: "pd.Series[float]") -> bool:
    """Whether in every run, of two steps or more, a number is the same in all."""
    by_run = known.groupby("run")
    spread = by_run.max() - by_run.min()
    return bool(len(known) and (by_run.size() > 1).all() and (spread <= UNMOVED * by_run.max().abs()).all())


def judged(differences: "pd.Series[float]", num_steps: int = JUDGED_STEPS) -> "pd.Series[float]":
    """Of differences by step those of the first steps, counted from the first that two runs both have.

    Not from step 0: a run that goes on from a checkpoint may have none of those.
    """
    steps = differences.index
    first: pd.Series[float] = differences[steps < steps.min() + num_steps]
    return first


def tolerance_of_run(run: str, records: Records, dtype: str) -> float:
    """How far losses of a run may differ and be called equal.

    By the coarsest of its parameters, or by ``dtype`` if its record names none, and by what it computes in.
    """
    described: Mapping[str, Any] = records.manifests[run].get("workload") or {}
    dtypes = [name for name in described.get("dtypes", []) if "float" in name] or [dtype]
    if rounding_of(run, records) != FULL:
        return ROUNDED_LOSS_TOLERANCE
    return max(LOSS_TOLERANCE.get(name, ROUNDED_LOSS_TOLERANCE) for name in dtypes)


def precision_of(run: str, records: Records) -> str:
    """What a run computes in, as ``CompareConfig.precision`` says it; 'full' if its strategy takes no precision."""
    return str(records.manifests[run]["config"].get("precision", FULL))


def rounding_of(run: str, records: Records) -> str:
    """Likewise, or the reader's own autocast, around the model or in it."""
    own = records.manifests[run].get("autocast")
    return f"{own} autocast" if own and precision_of(run, records) == FULL else precision_of(run, records)


def _bytes(run: str, rest: pd.DataFrame, records: Records) -> dict[str, Any]:
    steps = records.steps[records.steps["run"] == run]
    watched = stepped(steps.dropna(subset="wire_bytes"), records)
    averaged = averaged_runs(records)
    counted = counted_steps(watched_in_turn(watched, records) if run in averaged else watched, averaged)
    held = {str(role): int(num_bytes) for role, num_bytes in rest.loc[run].to_dict().items()}
    return {
        **peaks_of_steps(steps[steps["step"] >= 0]),
        "parameter_bytes": held.get(Role.PARAMETER, 0), "gradient_bytes": held.get(Role.GRADIENT, 0),
        "optimizer_bytes": held.get(Role.OPTIMIZER_STATE, 0) + held.get(Role.MASTER_WEIGHT, 0),
        "offloaded_bytes": held.get(Role.OFFLOADED, 0), "other_bytes": held.get(Role.OTHER, 0),
        "unattributed_bytes": held.get(Role.UNATTRIBUTED, 0),
        "padding_bytes": int(records.manifests[run]["padding_bytes"]),
        "wire_bytes_per_step": float(counted.groupby("rank")["wire_bytes"].mean().max()) if len(counted) else nan,
        MOVED: None if counted.empty else _moved(records, run, counted["step"]),
        "recorder_share": _number(records.manifests[run]["recorder_share"]),
    }  # fmt: skip


def ranks_differ(records: Records) -> list[str]:
    """The runs whose ranks hold parameters of their own by design, as in local SGD."""
    return [run for run, manifest in records.manifests.items() if manifest.get("ranks_differ")]


def averaged_runs(records: Records) -> list[str]:
    """The runs of whose messages the mean over all steps counts, where these send unlike bytes; none of torch's own."""
    # Fewer in a record of before.
    steps = stepped(records.steps.reindex(columns=["run", "rank", "step", "wire_bytes"]), records)
    scripts = [run for run, manifest in records.manifests.items() if "recorded" in manifest]
    # Local SGD may send in the second step alone; of others the first one may send what is sent once. Torch's DDP tells
    # ranks in its second step how it has made buckets anew.
    begins = steps["run"].isin(scripts).astype(int) - steps["run"].isin(ranks_differ(records)).astype(int)
    sent = steps[steps["step"] > begins].groupby(["run", "rank"])["wire_bytes"].agg(["min", "max"])
    unlike = {str(run) for run, _ in sent.index[sent["max"] > sent["min"]]}
    return [run for run in records.manifests if run in unlike and (run in scripts or not run.startswith("torch_"))]


def watched_in_turn(rows: pd.DataFrame, records: Records) -> pd.DataFrame:
    """Those of ``rows``, with ``run`` and ``step``, of steps watched one after another: of a script its first ones.

    What a script sends in one step of eight, it may send in each of those that are watched later.
    """
    for run, known in records.manifests.items():
        if known.get("watch_every", 1) > 1:
            rows = rows[(rows["run"] != run) | (rows["step"] < known["always_watched"])]
    return rows


def counted_steps(steps: pd.DataFrame, averaged: Collection[str] = ()) -> pd.DataFrame:
    """The rows of the steps whose messages count, of each run: of the last, or of all of those ``averaged``.

    Args:
        steps: rows with ``run`` and ``step``, of steps that were watched.
        averaged: runs of which the mean over all steps counts.
    """
    last = steps["step"] == steps.groupby("run")["step"].transform("max")
    return steps[last | steps["run"].isin(list(averaged))]


def skipped_steps(records: Records) -> dict[str, list[int]]:
    """The steps that a scaler of gradients skipped, of the runs in fp16 with some: none of their messages is a step's.

    Nothing is known of a run that has skipped all.
    """
    sent = records.collectives[records.collectives["step"] >= 0]
    found = dict[str, list[int]]()
    for run, rows in sent.groupby("run", sort=False):
        late = {*rows["step"]} - {*(took := rows.loc[rows["phase"] == str(Phase.STEP), "step"])}
        if late and len(took) and records.manifests[str(run)].get("config", {}).get("precision") == "fp16":
            found[str(run)] = sorted(map(int, late))
    return found


def stepped(rows: pd.DataFrame, records: Records) -> pd.DataFrame:
    """Those of ``rows``, with ``run`` and ``step``, whose step was not skipped."""
    for run, steps in skipped_steps(records).items():
        rows = rows[(rows["run"] != run) | ~rows["step"].isin(steps)]
    return rows


def _moved(records: Records, run: str, steps: "pd.Series[int]") -> float | None:
    """What the transport of the busiest rank sends in a step, their mean; None if a transport does not say."""
    table = records.collectives
    sent = table[(table["run"] == run) & table["step"].isin(steps) & (table["phase"] != str(Phase.METRICS))]
    by_rank = sent.groupby("rank")["moved_bytes"].agg(lambda moved: moved.sum(skipna=False))
    return _number(by_rank.max(skipna=False), 1 / steps.nunique()) if len(by_rank) else 0.0


def _number(value: Any, factor: float = 1.0) -> float | None:
    """A float, or None if it is missing (no overlap without communication), inf or NaN."""
    return None if pd.isna(value) or not isfinite(value) else float(value) * factor


def own_buffers_said(manifests: Iterable[Mapping[str, Any]]) -> str:
    """The same from manifests; empty too where ranks disagree, of which buffers may be a consequence."""
    said = (known.get("own_buffers") for known in manifests if not known.get("disagreement"))
    return next(filter(None, said), "")
