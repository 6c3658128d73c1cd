"""Causes of a long step where no host is seen to wait: each is a share of the step, and nothing is replayed.

On a GPU streams wait and the host runs ahead; a profiler's trace has no waits at all. So what a cause takes is the part
of the step that it fills with nothing beside it (``step_split``), the median over ranks and steps, and the most that a
change could gain; of recomputation and the optimizer their whole length.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isnan
from typing import Any

import numpy as np
import pandas as pd

from shardlab.analysis.attribution import waits
from shardlab.analysis.intervals import total
from shardlab.analysis.overlap import overlap, step_split
from shardlab.analysis.rows import KEYS, in_timed_steps, timed_steps
from shardlab.vocabulary import Collective, Phase, SpanKind
from shardlab.why.judged_steps import BALANCED, UNKNOWN, Cause, hop_us_of, hops, in_ms
from shardlab.why.slow_messages import CHANGE, LATENCY, REPEATED, repeated, repeated_in_words
from shardlab.why.slow_work import OPTIMIZER

LEAST, LEAST_OF_OPTIMIZER, SAME_RANK = 0.1, 0.2, 0.6  # of a step; of the meetings


def found(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> list[Cause]:
    """Those that take a tenth of a step, the largest first.

    Raises:
        ValueError: see ``step_split``.
    """
    seen = pd.concat([collectives[KEYS], spans[KEYS]]).drop_duplicates()
    timed = timed_steps(steps).merge(seen, on=KEYS)  # of a long record one step in sixteen is watched
    sent, worked = in_timed_steps(collectives, spans, steps)
    sent = sent[sent["phase"] != str(Phase.METRICS)]
    size = sent["group_size"]  # missing in some traces; and of ranks that are not recorded nobody knows the last
    met = sent.empty or bool(size.notna().all() and size.max() <= timed["rank"].nunique())
    split = step_split(sent, worked, timed, axes) if met else _of_some_ranks(sent, worked, timed)
    parts = {name: float(split[name].median()) for name in split.columns if name.endswith("_us")}
    us = parts["step_us"]
    missing = ""
    if isnan(parts["moving_us"]):
        missing = "which messages were exposed is missing: the stream that computes was not seen to wait for them"
    elif parts["moving_us"] > us:
        missing = "when the device took a step is missing: its messages last longer than the host, which ran ahead"
    if missing:
        return [Cause(UNKNOWN, 0.0, 0.0, missing, "", 0.0)]

    def of_kind(kind: SpanKind) -> float:
        rows = worked[worked["kind"] == str(kind)].groupby(KEYS)
        lengths = rows[["start_us", "end_us"]].apply(total) if len(rows) else pd.Series(dtype=float)
        return float(lengths.reindex(pd.MultiIndex.from_frame(timed[KEYS]), fill_value=0.0).median())

    said = [
        *_again(sent, worked, parts["moving_us"]),
        *_moving(sent, hop_us_of(collectives, axes) if len(sent) and met else None, parts["moving_us"]),
        *_late(sent, axes, split.groupby("rank")["waiting_us"].median() if met else None),
        *_idle(parts["other_us"], of_kind),
    ]  # fmt: skip
    causes = [Cause(name, taken, taken / us, text, change, gain) for name, taken, text, change, gain in said]
    least = {OPTIMIZER: LEAST_OF_OPTIMIZER}
    causes = [cause for cause in causes if cause.share >= least.get(cause.name, LEAST)]
    return sorted(causes, key=lambda cause: -cause.us) or [_balanced(parts["compute_us"], us)]


def _of_some_ranks(sent: pd.DataFrame, worked: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    """The parts where other ranks are not recorded: waiting for them counts as moving."""
    split = timed.merge(overlap(sent, worked)[[*KEYS, "compute_us", "exposed_us"]], on=KEYS, how="left")
    other = split["step_us"] - split["compute_us"] - split["exposed_us"]
    return split.assign(moving_us=split["exposed_us"], waiting_us=0.0, other_us=other)


Share = tuple[str, float, str, str, float]
"""Name, microseconds of a step, evidence, change, and the most that it gains."""


def _again(sent: pd.DataFrame, worked: pd.DataFrame, moving_us: float) -> Iterator[Share]:
    """Reductions of micro-batches before the last: as much of what nothing hides as they are of all messages."""
    rows = repeated(sent, worked)
    if rows.empty:
        return
    us = [float((table["end_us"] - table["start_us"]).sum()) for table in (rows, sent)]
    own = rows[rows["rank"] == rows["rank"].min()]
    taken = moving_us * us[0] / us[1]
    yield REPEATED, taken, repeated_in_words(own, own["step"].nunique()), f"{CHANGE}, at most,", taken


def _moving(sent: pd.DataFrame, hop_us: float | None, moving_us: float) -> Iterator[Share]:
    """Messages that nothing hides: whether most of their time is latency."""
    if sent.empty:
        return
    per_step = sent.groupby(KEYS).size().median()
    said = f"{in_ms(moving_us)} of a step are messages with no compute beside them, {per_step:.0f} are sent"
    if hop_us is None:
        share, said = 0.0, f"{said}, latency and waiting not told apart"
    else:
        pairs = zip(sent["op"], sent["group_size"], strict=True)
        latency = [hop_us * hops(Collective(op), int(size)) for op, size in pairs]
        lasted = (sent["end_us"] - sent["start_us"]).to_numpy(dtype=np.float64)
        share = min(1.0, sum(latency) / lasted.sum())
    if share >= 0.5:
        yield LATENCY, moving_us, said, "fewer and larger messages, at most,", moving_us
    else:
        change = "a link of twice the bandwidth, at most,"
        yield "bandwidth", moving_us, said, change, moving_us * (1 - share) / 2


def _late(sent: pd.DataFrame, axes: Any, waiting_us: "pd.Series[float] | None") -> Iterator[Share]:
    """A rank that is last in most meetings, for which the others wait."""
    if waiting_us is None or sent.empty:
        return
    met = waits(sent, axes).drop_duplicates(["step", "axis", "group", "seq"])
    shares = met["last_rank"].value_counts(normalize=True)
    if len(met) and shares.iloc[0] > SAME_RANK:
        rank = int(shares.index[0])
        lost_us = float(waiting_us.drop(rank).median())
        said = f"rank {rank} is last in {100 * shares.iloc[0]:.0f} % of {len(met)} meetings, and {lost_us / 1e3:.3g}"
        yield (
            "straggler", lost_us, f"{said} ms of a step the others wait",
            f"giving rank {rank} as much to do as the others, at most,", lost_us,
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
        (OPTIMIZER, SpanKind.OPTIMIZER, "the optimizer, with clipping, takes", "fused=True or a cheaper one, at most,"),
    ):
        taken = of_kind(kind)
        yield name, taken, f"{words} {in_ms(taken)} a step", change, taken


def _balanced(compute_us: float, us: float) -> Cause:
    said = f"{100 * compute_us / us:.0f} % of a step is compute, and no other part is a tenth of it"
    return Cause(BALANCED, compute_us, compute_us / us, said, "a faster device or fewer operations", 0.0)
