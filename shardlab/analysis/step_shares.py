"""Causes of a long step where no host is seen to wait: each is a share of the step, and nothing is replayed.

On a GPU streams wait and the host runs ahead; a profiler's trace has no waits at all. So what a cause takes is the part
of the step that it fills with nothing beside it (``step_split``), the median over ranks and steps, and the most that a
change could gain.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.attribution import waits
from shardlab.analysis.intervals import total
from shardlab.analysis.judged_steps import Cause, hop_us_of, hops
from shardlab.analysis.overlap import step_split
from shardlab.analysis.rows import KEYS
from shardlab.analysis.timed import in_timed_steps, timed_steps
from shardlab.vocabulary import Collective, Phase, SpanKind

LEAST, LEAST_OF_OPTIMIZER, SAME_RANK = 0.1, 0.2, 0.6  # of a step; of the meetings


def found(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> list[Cause]:
    """Those that take a tenth of a step, the largest first.

    Raises:
        ValueError: see ``step_split``.
    """
    timed = timed_steps(steps)
    sent, worked = in_timed_steps(collectives, spans, timed)
    sent = sent[sent["phase"] != str(Phase.METRICS)]
    split = step_split(sent, worked, timed, axes)
    parts = {name: float(split[name].median()) for name in split.columns if name.endswith("_us")}
    us = parts["step_us"]

    def of_kind(kind: SpanKind) -> float:
        rows = worked[worked["kind"] == str(kind)].groupby(KEYS)
        lengths = rows[["start_us", "end_us"]].apply(total) if len(rows) else pd.Series(dtype=float)
        return float(lengths.reindex(pd.MultiIndex.from_frame(timed[KEYS]), fill_value=0.0).median())

    said = [
        *_moving(sent, axes, parts["moving_us"]), *_late(sent, axes, parts["waiting_us"]),
        *_idle(parts["other_us"], of_kind),
    ]  # fmt: skip
    causes = [Cause(name, taken, taken / us, text, change, gain) for name, taken, text, change, gain in said]
    least = {"optimizer step": LEAST_OF_OPTIMIZER}
    causes = [cause for cause in causes if cause.share >= least.get(cause.name, LEAST)]
    return sorted(causes, key=lambda cause: -cause.us) or [_balanced(parts["compute_us"], us)]


Share = tuple[str, float, str, str, float]
"""Name, microseconds of a step, evidence, change, and the most that it gains."""


def _moving(sent: pd.DataFrame, axes: Any, moving_us: float) -> Iterator[Share]:
    """Messages that nothing hides: how many of their microseconds are latency."""
    if sent.empty:
        return
    per_step = sent.groupby(KEYS).size().median()
    said = f"{moving_us / 1e3:.3g} ms of a step are messages with no compute beside them, {per_step:.0f} are sent"
    hop_us = hop_us_of(sent, axes)
    if hop_us is None:
        share, said = 0.0, f"{said}, latency not told apart: all of one size"
    else:
        pairs = zip(sent["op"], sent["group_size"], strict=True)
        latency = [hop_us * hops(Collective(op), int(size)) for op, size in pairs]
        lasted = (sent["end_us"] - sent["start_us"]).to_numpy(dtype=np.float64)
        share = min(1.0, sum(latency) / lasted.sum())
    if share >= 0.5:
        yield "latency of many small messages", moving_us, said, "fewer and larger messages, at most,", moving_us
    else:
        change = "half the bytes or twice the bandwidth, at most,"
        yield "bandwidth", moving_us, said, change, moving_us * (1 - share) / 2


def _late(sent: pd.DataFrame, axes: Any, waiting_us: float) -> Iterator[Share]:
    """A rank that is last in most meetings."""
    met = waits(sent, axes).drop_duplicates(["step", "axis", "group", "seq"]) if waiting_us else sent[:0]
    if met.empty:
        return
    shares = met["last_rank"].value_counts(normalize=True)
    if shares.iloc[0] > SAME_RANK:
        rank = shares.index[0]
        said = f"rank {rank} is last in {100 * shares.iloc[0]:.0f} % of {len(met)} meetings, and {waiting_us / 1e3:.3g}"
        yield (
            "straggler", waiting_us, f"{said} ms of a step are spent waiting",
            f"giving rank {rank} as much to do as the others, at most,", waiting_us,
        )  # fmt: skip


def _idle(other_us: float, of_kind: Callable[[SpanKind], float]) -> Iterator[Share]:
    """Where neither compute nor a message is under way; and what is computed beside forward and backward."""
    data_us = min(other_us, of_kind(SpanKind.DATA))
    said = "{:.3g} ms of a step have neither compute nor messages, while {}".format
    change = "loading ahead of the step, at most,"
    yield "input wait", data_us, said(data_us / 1e3, "data are loaded"), change, data_us
    host_us = other_us - data_us
    change = "larger micro-batches or torch.compile, at most,"
    yield "host-bound", host_us, said(host_us / 1e3, "the host issues the next"), change, host_us
    for name, kind, words, change in (
        ("recomputation", SpanKind.RECOMPUTE, "computing activations again takes", "less checkpointing, at most,"),
        ("optimizer step", SpanKind.OPTIMIZER, "the optimizer takes", "fused=True or a cheaper one, at most,"),
    ):
        taken = of_kind(kind)
        yield name, taken, f"{words} {taken / 1e3:.3g} ms a step", change, taken


def _balanced(compute_us: float, us: float) -> Cause:
    said = f"{100 * compute_us / us:.0f} % of a step is compute, and no other part is a tenth of it"
    return Cause("balanced", compute_us, compute_us / us, said, "a faster device or fewer operations", 0.0)
