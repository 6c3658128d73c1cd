"""The steps of one run that are judged, and the latency of a message in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.analysis.bandwidth import fit_latency_bandwidth
from shardlab.analysis.intervals import covered_until, merge, total
from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.rows import in_steps, timed_steps
from shardlab.partition.ring_cost import Link, ring_wire_bytes
from shardlab.partition.step_program import Message
from shardlab.vocabulary import FLAG, Collective, SpanKind
from shardlab.why.recorded_step import NOTHING, RecordedStep, Removed, by_rank, recorded_steps

APART = 8.0  # by how much the largest message must exceed the smallest
MOST = 12  # steps that are judged
EMULATED = " as "  # in the name of a transport, before the link
BALANCED, UNKNOWN = "balanced", "cannot be said"


def in_ms(us: float) -> str:
    """Microseconds as '385 ms' or '10,152 ms'."""
    return f"{us / 1e3:,.0f} ms" if us >= 999_500 else f"{us / 1e3:.3g} ms"


Steps = list[RecordedStep]


@dataclass(frozen=True)
class Cause:
    """One reason for the time of a step.

    Attributes:
        name: of the table in ``causes``; 'balanced', or 'cannot be said'.
        us: how much of a step it takes, in microseconds.
        share: of the step.
        evidence: numbers of the record that show it; what is missing, where nothing can be said.
        change: one thing to do about it.
        gain_us: what that takes off a step, by replay.
        settings: the change as options of ``CompareConfig``, where it is one; of ``prefetch`` how much more, of
            ``bandwidth`` and ``latency`` a factor of the link's, of ``wrap`` 'root' or the unit to cut.
    """

    name: str
    us: float
    share: float
    evidence: str
    change: str
    gain_us: float
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A cause before it is weighed: steps with the change made, without the cause at all, and as they were.

    It counts from the share ``least`` of a step on.
    """

    name: str
    changed: Steps
    evidence: str
    change: str
    without: Steps | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    base: Steps | None = None
    least: float = 0.1


class Recorded:
    """The steps of one run that are judged."""

    def __init__(self, collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, axes: Any) -> None:
        self.timed = _spread(watched(steps))
        self._all_steps = steps
        self.collectives, self.spans = (in_steps(table, self.timed) for table in (collectives, spans))
        self.axes = axes
        self.steps = recorded_steps(self.collectives, self.spans, self.timed, axes)
        self.base = _us(self.steps)
        self.us = float(np.median(self.base))

    def gains(self, changed: Steps, base: Steps | None = None) -> NDArray[np.float64]:
        """By step, in microseconds; nothing where a changed step cannot end, as ranks would issue in other orders."""
        before, after = self.base if base is None else _us(base), _us(changed)
        return np.subtract(before, after, out=np.zeros_like(after), where=np.isfinite(after))

    def of_kind(self, *kinds: SpanKind, on_cpu: bool = False) -> Removed:
        """By rank, when spans of these kinds were open, and off the CPU in them, unless ``on_cpu``."""
        rows = self.spans[self.spans["kind"].isin([str(kind) for kind in kinds])]
        away = self.spans[self.spans["kind"] == str(SpanKind.OFF_CPU)]
        found = {}
        for rank, own in by_rank(rows).items():
            # Spans are cut where a rank was off the CPU, which is noted at the end of what it did.
            inside = away[(away["rank"] == rank) & away["start_us"].isin(own["end_us"]) & (not on_cpu)]
            times = pd.concat([own, inside])[["start_us", "end_us"]].to_numpy(dtype=np.float64)
            found[rank] = merge(times)
        return found

    def without(self, removed: Removed) -> Steps:
        """The steps without some of their work."""
        return [step.without(removed) for step in self.steps]

    def with_transfers(self, us_of: Callable[[Message, float], float]) -> Steps:
        """The steps with other times of transfer."""
        return [step.with_transfers(us_of) for step in self.steps]

    def us_of(self, removed: Removed) -> float:
        """How long some intervals are, in microseconds for a rank and step."""
        return sum(map(total, removed.values())) / len(self.timed)

    def lost_us(self, removed: Removed) -> float:
        """How much of a step some rank is in its intervals, in microseconds: without them it is no more shorter.

        Ranks that lose time in turn lose it for each other, so it may be more than each of them has.
        """
        of_any = merge(np.concatenate([NOTHING, *removed.values()]))
        begins = self.timed.groupby("step")["start_us"].min().to_numpy(dtype=np.float64)
        ends = (self.timed["start_us"] + self.timed["step_us"]).groupby(self.timed["step"]).max()
        windows = np.column_stack((begins, ends.to_numpy(dtype=np.float64)))
        return float(np.median(np.diff(covered_until(of_any, windows))))

    @cached_property
    def dispatch(self) -> Removed:
        """By rank, as much of forward and backward as calling their operations takes at least, where that is known.

        It is known how much, not when: the end of each stretch stands for it.
        """
        if "dispatch_us" not in self._all_steps:
            return {}
        known = self._all_steps.dropna(subset="dispatch_us").groupby("rank")["dispatch_us"].median()
        found = {}
        for rank, times in self.of_kind(SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.RECOMPUTE, on_cpu=True).items():
            share = float(known.get(rank, 0.0)) * len(self.steps) / max(total(times), 1e-9)
            found[rank] = np.column_stack((times[:, 1] - min(1.0, share) * np.diff(times).ravel(), times[:, 1]))
        return found

    @cached_property
    def queued_us(self) -> float:
        """How long a rank had no core though it could have run, for a rank and step; NaN where it is not known."""
        if "queued_us" not in self.timed:
            return float("nan")
        return float(self.timed["queued_us"].to_numpy(dtype=np.float64, na_value=np.nan).mean())

    @cached_property
    def away(self) -> float:
        """Which share of a step a rank is off the CPU, the median over the ranks."""
        away = self.of_kind(SpanKind.OFF_CPU)
        us = [total(away.get(rank, NOTHING)) for rank in self.steps[0].programs]
        return float(np.median(us)) / len(self.steps) / self.us

    @cached_property
    def messages(self) -> list[Message]:
        """Of the first rank in the first step, without those that carry a flag."""
        rank = min(self.steps[0].programs)
        return [one for one in self.steps[0].messages if one.tag != FLAG and rank in one.transfer_us]

    @cached_property
    def latency_us(self) -> Callable[[Message], float] | None:
        """Of a message; None where it cannot be told from the time of its bytes."""
        hop_us = hop_us_of(self.collectives, self.axes)
        return None if hop_us is None else lambda one: hop_us * hops(one.op, one.group_size)


def watched(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps whose times count and whose messages and spans are known."""
    return timed_steps(steps).dropna(subset="wire_bytes")


def _spread(timed: pd.DataFrame) -> pd.DataFrame:
    """At most ``MOST`` of the steps, from the first to the last: a long run is judged as fast as a short one."""
    steps = np.unique(timed["step"])
    chosen = steps[np.linspace(0, len(steps) - 1, min(MOST, len(steps))).astype(int)]
    return timed[timed["step"].isin(chosen)]


def _us(steps: Steps) -> NDArray[np.float64]:
    return np.array([step.us for step in steps])


def link_of(collectives: pd.DataFrame) -> Link | None:
    """The emulated link, where the record names it."""
    _, is_emulated, link = str(collectives["transport"].iloc[0]).partition(EMULATED)
    return Link.parse(link) if is_emulated else None


def hop_us_of(collectives: pd.DataFrame, axes: Mapping[str, int] | None) -> float | None:
    """Latency: that of the emulated link, where the record names one; else of a line through the transfers by size."""
    if (link := link_of(collectives)) is not None:
        return link.latency_us
    rows = matched_collectives(collectives, axes)
    rows = rows[(rows["bytes"] > 0) & (rows["group_size"] > 1)].assign(us=rows["end_us"] - rows["last_us"])
    rows = rows.groupby(["op", "bytes", "group_size"])["us"].median().reset_index()
    rows = rows[rows["us"] > 0]
    if rows.empty or rows["bytes"].max() < APART * rows["bytes"].min():
        return None
    columns = [rows[name].tolist() for name in ("op", "bytes", "group_size")]
    found = [(Collective(op), int(size), int(group)) for op, size, group in zip(*columns, strict=True)]
    counts = [hops(op, size) for op, _, size in found]
    sent = [ring_wire_bytes(*one) / count for one, count in zip(found, counts, strict=True)]
    return fit_latency_bandwidth(sent, rows["us"] / counts).latency_us


def hops(op: Collective, group_size: int) -> float:
    """How many latencies a collective takes on a ring."""
    return Link(1.0, 1.0).ring_time_us(op, 0, group_size)
