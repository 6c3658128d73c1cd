"""What another link, number of ranks, bucket, prefetch, precision or unit would have made of a recorded run.

The engine's step is run again without values (``dry_run``), and what the record says sets the clock: operations of
forward, backward and optimizer take together as long as its spans, messages as long as its messages of their size, and
the rest of a step, outside of both, is a constant. First the run is replayed as it was; where that misses its own step
by more than 5 %, it is said, and what follows is worth no more.

Of a run with stages the recorded schedule is played again, or another one, with the recorded work of each rank
(``why.pipelined``); what is around it stays.

Other numbers of ranks are taken to have as many cores each as the recorded ones had.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from shardlab.analysis.matching import matched_collectives
from shardlab.analysis.rows import in_steps, in_timed_steps, timed_steps
from shardlab.comm.events import CollectiveEvent
from shardlab.comm.foretold import Costs, ToldClock, Wire
from shardlab.engines import STRATEGIES
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.planned.dry_run import dry_run
from shardlab.experiment.planned.forecast import phase_of_autograd, priced, seconds_in
from shardlab.experiment.trained.pipelined import AND, schedules_of
from shardlab.forecast.machine import Line, RankCosts
from shardlab.partition.ring_cost import Link, ring_wire_bytes
from shardlab.records.store import Records
from shardlab.vocabulary import WHOLE_MODEL, Collective, Phase, SpanKind
from shardlab.why.pipelined import pipelined_steps, usual_end

REPRODUCED = 0.05
OF_STAGES = ("micro_batches", "schedule")
KINDS = {
    "forward": (SpanKind.FORWARD,), "backward": (SpanKind.BACKWARD, SpanKind.RECOMPUTE),
    "optimizer": (SpanKind.OPTIMIZER,),
}  # fmt: skip
# How operations share the time of a phase, before it is as long as recorded: 50 GFLOP/s, 10 GB/s, 10 us each.
_PRODUCT, _OTHER = Line([1e3, 1e6], [2e-8, 2e-5]), Line([1.0, 1e6], [1e-10, 1e-4])
USUAL = RankCosts(
    floors=dict.fromkeys(KINDS, 1e-5),
    products=dict.fromkeys(("forward", "input", "weight", "attention", "attention_backward"), _PRODUCT),
    operations={"add": _OTHER}, messages={}, meeting=0.0, host={}, slows_compute=0.0, slowed_by_compute=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class WhatIf:
    """A changed run against the recorded one, in seconds of a step.

    Attributes:
        recorded: the median of its steps.
        replayed: the same run, replayed as it was.
        changed: replayed with the change.
    """

    recorded: float
    replayed: float
    changed: float

    @property
    def is_reproduced(self) -> bool:
        """Whether the replay of the run as it was is within 5 % of it."""
        return abs(self.replayed / self.recorded - 1) <= REPRODUCED

    @property
    def gain(self) -> float:
        """Share of the step that the change takes away; negative where it adds to it."""
        return 1 - self.changed / self.replayed

    def sentence(self) -> str:
        """In a line."""
        becomes = self.recorded * (1 - self.gain)
        said = f"{1e3 * self.recorded:.3g} ms would become {1e3 * becomes:.3g} ms"
        if self.is_reproduced:
            return said
        off = self.replayed / self.recorded - 1
        return f"{said} (doubtful: the run as it was is replayed in {1e3 * self.replayed:.3g} ms, {off:+.0%})"


def what_if(records: Records, config: CompareConfig, strategy: str, **changes: Any) -> WhatIf:
    """The forecast of a recorded run with some options changed.

    Args:
        records: with the run of that strategy.
        config: its configuration; of a workload of your own, with the workload.
        strategy: the name of the run.
        changes: fields of ``CompareConfig``, such as ``link``, ``ranks``, ``bucket_mib``, ``prefetch``, ``precision``,
            ``wrap``; ``strategies`` of one name for another strategy, whose operations are others and cost less surely.
            Of a run with stages: ``schedule`` (a name or a file) and ``micro_batches``.

    Raises:
        ValueError: there is no such run, a change is not allowed, the record has no step whose time counts, or the
            emulated link shall go, without which no message was recorded.
    """
    if config.inside(strategy) not in (*STRATEGIES, *config.own_strategies):
        raise ValueError(
            f"strategy: {strategy!r} is given; give one of ours, or in Python one of your own and its configuration: "
            "what_if(comparison.records, config, name)"
        )
    if config.inside(strategy) != strategy:
        return _with_stages(records, config, strategy, changes)
    if of_stages := [name for name in OF_STAGES if name in changes]:
        raise ValueError(f"{of_stages[0]}: {strategy!r} is a run without stages; leave it out")
    own = config.alone(strategy)
    (other,) = changes.pop("strategies", (strategy,))
    changed = config.alone(other, **changes)
    if own.link is not None and changed.link is None:
        raise ValueError(f"link: the run was recorded over {own.link} and knows no other; give one such as 10Gbps,50us")
    clock = RecordedClock(records, own, strategy)
    recorded = seconds_in(records.steps[records.steps["run"] == strategy])
    return WhatIf(recorded, clock.seconds(own), clock.seconds(changed))


def _with_stages(records: Records, config: CompareConfig, run: str, changes: dict[str, Any]) -> WhatIf:
    """Another schedule, or number of micro-batches, of a run with stages."""
    if others := [name for name in changes if name not in OF_STAGES]:
        raise ValueError(f"{others[0]}: with stages only {' and '.join(OF_STAGES)} can be changed; leave it out")
    plan = run.rpartition(AND)[2]
    named = changes.get("schedule", plan)
    name = named if isinstance(named, str) else named[0]
    same = config.schedules[plan]
    number = changes.get("micro_batches", same.num_micro_batches)
    other = same
    if name != plan or number != same.num_micro_batches:
        (other,) = schedules_of(CompareOptions(pipe=config.pipe, schedule=(name,), accumulation=number)).values()
    own, _ = _steps_of(records, run)
    collectives, spans = in_timed_steps(
        records.collectives[records.collectives["run"] == run], records.spans[records.spans["run"] == run], own
    )
    steps = pipelined_steps(collectives, spans, config.mesh_axes(run))
    recorded = seconds_in(own)
    times = [tuple(map(usual_end, (one.done, one.foretold(), one.foretold(other)))) for one in steps]
    around, again, changed = (float(median(some)) / 1e6 for some in zip(*times, strict=True))
    return WhatIf(recorded, recorded - around + again, recorded - around + changed)


def _steps_of(records: Records, run: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The steps of a run, and those of them whose times count."""
    steps = records.steps[records.steps["run"] == run]
    if steps.empty:
        runs = ", ".join(records.steps["run"].unique())
        raise ValueError(f"strategy: {run!r} is given; the record has {runs}")
    timed = timed_steps(steps)
    if len(timed) == len(steps):
        raise ValueError("steps: none of the record counts beside the first and the traced one; record 4 or more")
    return steps, timed


class RecordedClock:
    """What a record says of the time of operations and messages.

    Args:
        records: with the run.
        config: of the run alone.
        strategy: its name.
    """

    def __init__(self, records: Records, config: CompareConfig, strategy: str) -> None:
        steps, timed = _steps_of(records, strategy)
        messages = in_steps(records.collectives[records.collectives["phase"] != str(Phase.METRICS)], timed)
        # Of an emulated link nothing but by how much it is exceeded, for it has a formula.
        self._messages = _transfers(messages) if config.link is None else {}
        self._meets = 0.0 if config.link is None else _beyond(Link.parse(config.link), messages)
        self._scales = dict.fromkeys(KINDS, 1.0)
        self._rest = 0.0
        spans = _seconds_by_kind(in_steps(records.spans, timed), timed)
        usual = self._run(config)
        without = _seconds_by_kind(usual.spans, usual.steps)
        self._scales = {kind: spans[kind] / max(1e-9, without[kind]) for kind in KINDS}
        recorded = seconds_in(steps)
        # What is in no span, and not waited for either: once, by how much the replay falls short.
        self._rest = max(0.0, recorded - self.seconds(config))

    def seconds(self, config: CompareConfig) -> float:
        """Of a step of another configuration."""
        return seconds_in(self._run(config).steps)

    def _run(self, config: CompareConfig) -> Records:
        (strategy,) = config.strategies
        link = None if config.link is None else Link.parse(config.link)

        def of_message(event: CollectiveEvent) -> Costs:
            on_link = 0.0 if link is None else link.ring_time_us(event.op, event.num_bytes, event.group_size) / 1e6
            return Costs(self._moves(event), on_link, self._meets)

        def of_operation(func: Any, args: tuple[Any, ...], result: Any) -> float:
            return self._scales[phase_of_autograd()] * priced(USUAL, func, args, result)[-1]

        clock = ToldClock(Wire(of_message))
        return dry_run(config, strategy, clock, of_operation, host_seconds=self._rest, traces_memory=False)

    def _moves(self, event: CollectiveEvent) -> float:
        if not self._messages:
            return 0.0
        known = event.op if str(event.op) in self._messages else Collective(next(iter(self._messages)))
        line, ranks = self._messages[str(known)]
        sent = ring_wire_bytes(event.op, event.num_bytes, event.group_size)
        usual = ring_wire_bytes(known, event.num_bytes, ranks) or sent
        return line.at(event.num_bytes) * (sent / usual if usual else 1.0)


def _seconds_by_kind(spans: pd.DataFrame, timed: pd.DataFrame) -> Mapping[str, float]:
    """Of a step on a rank, by phase, in spans of the whole model where there are some."""
    steps = timed[["rank", "step"]].drop_duplicates()
    found = {}
    for phase, kinds in KINDS.items():
        rows = spans[spans["kind"].isin([str(kind) for kind in kinds]) & (spans["unit"] == WHOLE_MODEL)]
        us = (rows["end_us"] - rows["start_us"]).groupby([rows["rank"], rows["step"]]).sum()
        found[phase] = float(us.reindex(pd.MultiIndex.from_frame(steps), fill_value=0.0).median()) / 1e6
    return found


def _beyond(link: Link, rows: pd.DataFrame) -> float:
    """Seconds that messages take beyond the time of an emulated link; the last rank of each waits for nobody."""
    sizes = rows[["op", "bytes", "group_size"]].itertuples(index=False, name=None)
    on_link = [link.ring_time_us(Collective(op), num_bytes, size) for op, num_bytes, size in sizes]
    more = rows.assign(us=rows["end_us"] - rows["start_us"] - on_link).groupby(["step", "seq"])["us"].min()
    return max(0.0, float(more.median())) / 1e6 if len(more) else 0.0


def _transfers(rows: pd.DataFrame) -> dict[str, tuple[Line, int]]:
    """By verb, seconds by bytes, and over how many ranks."""
    if rows.empty:
        return {}
    rows = matched_collectives(rows.reset_index(drop=True))
    rows, found = rows.assign(us=rows["end_us"] - rows["last_us"]), {}
    for op, own in rows.groupby("op"):
        times = own.groupby("bytes")["us"].median().clip(lower=1.0) / 1e6
        found[str(op)] = (Line(times.index.astype(float).tolist(), times.tolist()), int(own["group_size"].iloc[0]))
    return found
