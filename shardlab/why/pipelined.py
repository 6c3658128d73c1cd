"""The schedule that ranks did in a recorded step: their work on each action, their waits, and what another would take.

    step = pipelined_steps(collectives, spans, axes)[0]
    step.done.bubble, step.foretold().bubble                       # measured, and by the same list with the same times
    step.foretold(make_schedule("zb-h1", 2, 8)).seconds            # another list

From the first action of any rank to the last of all, a rank works or waits for another stage. All else counts as work
of the action that it comes before: Python around it, and time without a core. A message takes as long as from when it
was sent and its receiver was ready until the receiver had it. It is sent when it was issued: the last backward's, of
the gradient of its input, before that action sends gradients over the data axes.

Of another list a rank works as long in all: each of its forwards takes an equal part of what its forwards took, and so
do the backwards. Where they are cut in two and were not, each half takes half. So it is said of other numbers of
micro-batches that half as many rows take half as long, which small ones do not.

From it come two causes of a long step: ranks that wait because of the order of the actions, or for a longer stage.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
import pandas as pd

from shardlab.analysis.intervals import merge, subtract, total
from shardlab.analysis.matching import with_group
from shardlab.analysis.rows import numbers
from shardlab.partition.step_program import Work
from shardlab.schedules import PLANS, Action, Kind, Played, Schedule, make_schedule, play, programs
from shardlab.vocabulary import Collective, MeshAxis
from shardlab.why.judged_steps import Found, Recorded, Steps, in_ms
from shardlab.why.recorded_step import RecordedStep

UNIT = re.compile(r"\d+[FBIW]\d+")
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_OF_INPUT, Kind.BACKWARD_OF_WEIGHTS)
EVEN = 0.1  # relative: by how much ranks' work may differ


@dataclass(frozen=True)
class PipelinedStep:
    """One step of the ranks of one pipeline; times in microseconds.

    Attributes:
        done: what they did.
        transfer_us: of a message, by the action that it brings the result of.
        after_us: of an action with a message to another rank, how long it worked on after that was issued.
        late_us: by rank of the pipeline, how much later than the first it could begin.
        ranks: global ranks, in the order of stages.
    """

    done: Played
    transfer_us: Mapping[Action, float]
    after_us: Mapping[Action, float]
    late_us: Mapping[int, float]
    ranks: tuple[int, ...]

    def foretold(self, schedule: Schedule | None = None) -> Played:
        """The step by its own list of actions, or by another in the place of it."""
        schedule = schedule or self.done.schedule
        us_of = self.work_of(schedule)
        return play(schedule, us_of, self.transfer_of, self.late_us, self.after(schedule, us_of))

    def transfer_of(self, action: Action) -> float:
        """How long a message takes, also one that only another list sends."""
        return self.transfer_us.get(action, self._usual_us)

    @cached_property
    def _usual_us(self) -> float:
        return median(self.transfer_us.values()) if self.transfer_us else 0.0

    def after(self, schedule: Schedule, us_of: Callable[[Action], float]) -> Callable[[Action], float]:
        """How long an action works on after its message was issued: the share of it that it was.

        Of another list it is the share of all of the rank's forwards, or backwards, together.
        """
        if schedule == self.done.schedule:
            return lambda action: us_of(action) * self._share([action])
        shares = {
            (rank, is_forward): self._share([one for one in actions if (one.kind is Kind.FORWARD) is is_forward])
            for rank, actions in enumerate(self.done.schedule.ranks) for is_forward in (True, False)
        }  # fmt: skip
        return lambda one: us_of(one) * shares[schedule.rank_of[one.stage], one.kind is Kind.FORWARD]

    def _share(self, actions: Sequence[Action]) -> float:
        worked = sum(self.done.work[one] for one in actions)
        return sum(self.after_us.get(one, 0.0) for one in actions) / worked if worked else 0.0

    def work_of(self, schedule: Schedule) -> Callable[[Action], float]:
        """How long an action takes; in another list than its own the work of each rank is on equal parts."""
        if schedule == self.done.schedule:
            return self.done.work.__getitem__
        us = {}
        for rank, actions in enumerate(schedule.ranks):
            spent = self.spent(rank)
            is_cut = any(action.kind is Kind.BACKWARD_OF_WEIGHTS for action in actions)
            for kind in Kind:
                count = sum(action.kind is kind for action in actions)
                if count:
                    us[rank, kind] = _of_kind(spent, kind, is_cut=is_cut) / count
        return lambda action: us[schedule.rank_of[action.stage], action.kind]

    def spent(self, rank: int) -> dict[Kind, float]:
        """How long a rank worked on the actions of each kind."""
        actions, work = self.done.schedule.ranks[rank], self.done.work
        return {kind: sum(work[action] for action in actions if action.kind is kind) for kind in Kind}


def _of_kind(spent: Mapping[Kind, float], kind: Kind, *, is_cut: bool) -> float:
    if kind is Kind.FORWARD or (is_cut and spent[kind]):
        return spent[kind]
    every = sum(spent[one] for one in BACKWARDS)
    return every / 2 if is_cut else every


def usual_end(played: Played) -> float:
    """When ranks end, the median of them, as of every step."""
    return median(played.ends[actions[-1]] for actions in played.schedule.ranks)


def _of_actions(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans that are of actions of a schedule."""
    return spans[spans["unit"].str.fullmatch(UNIT.pattern).fillna(False)]


def pipelined_steps(
    collectives: pd.DataFrame, spans: pd.DataFrame, axes: Mapping[str, int] | None = None
) -> list[PipelinedStep]:
    """Each step of each pipeline of one run.

    Args:
        collectives: table ``collectives``, of steps that count, all ranks.
        spans: table ``spans`` of the same steps.
        axes: sizes of the axes of the mesh, see ``with_group``.

    Raises:
        ValueError: the actions are no schedule, as where spans of a rank are missing.
    """
    sent = collectives[(collectives["axis"] == str(MeshAxis.PIPE)) & collectives["op"].isin(
        [str(Collective.SEND), str(Collective.RECV)]
    )]  # fmt: skip
    sent = with_group(sent.reset_index(drop=True), axes)
    found = []
    for step, own in _of_actions(spans).groupby("step"):
        of_step = sent[sent["step"] == step]
        for group in of_step["group"].dropna().unique():
            ranks = tuple(int(rank) for rank in str(group).split(","))
            found.append(_step(own, of_step[of_step["group"] == group], ranks))
    return found


def _step(spans: pd.DataFrame, sent: pd.DataFrame, ranks: tuple[int, ...]) -> PipelinedStep:
    lists: list[tuple[Action, ...]] = []
    begins, ends, work = dict[Action, float](), dict[Action, float](), dict[Action, float]()
    after, ready = dict[Action, float](), dict[int, float]()
    for place, rank in enumerate(ranks):
        own = spans[spans["rank"] == rank].groupby("unit").agg(start=("start_us", "min"), end=("end_us", "max"))
        own = own.sort_values("end")
        if own.empty:
            raise ValueError(f"spans: rank {rank} has none of an action, so the schedule is not known")
        of_rank = sent[(sent["rank"] == rank) & (sent["wait_end_us"] > sent["wait_start_us"])]
        waits = merge(of_rank[["wait_start_us", "wait_end_us"]].to_numpy(dtype=np.float64))
        last = float(own["start"].min())
        issued = sent[(sent["rank"] == rank) & (sent["op"] == str(Collective.SEND))].set_index("tag")["issue_us"]
        ready[place] = min([last, *waits[:1, 0].tolist()])  # it may have waited before its first action
        for unit, end in own["end"].items():
            action, worked = Action.parse(str(unit)), subtract([(last, float(end))], waits)
            begins[action] = worked[-1, 0] if len(worked) else float(end)  # none where it took no time
            ends[action], work[action] = float(end), total(worked)
            if action.tag in issued.index:
                after[action] = total(worked.clip(min=float(issued[action.tag])))
            last = float(end)
        lists.append(tuple(Action.parse(str(unit)) for unit in own.index))
    start, schedule = min(begins.values()), Schedule(tuple(lists))
    begins, ends = ({action: time - start for action, time in times.items()} for times in (begins, ends))
    late = {place: max(0.0, time - start) for place, time in ready.items()}
    return PipelinedStep(Played(schedule, begins, ends, work), _transfers(schedule, sent), after, late, ranks)


def _transfers(schedule: Schedule, sent: pd.DataFrame) -> dict[Action, float]:
    """Of the messages between stages, which travel one after another on each way."""
    by_tag = {str(tag): rows for tag, rows in sent.groupby("tag")}
    found, last = dict[Action, float](), dict[tuple[int, int], float]()
    for action, way in schedule.sent().items():
        if (rows := by_tag.get(action.tag)) is None:
            raise ValueError(f"collectives: the message {action.tag!r} is missing, so the schedule is not known")
        receiver = rows[rows["op"] == str(Collective.RECV)]
        ended, begun, resumed = (numbers(receiver, name)[0] for name in ("end_us", "wait_start_us", "wait_end_us"))
        has_it = max(ended, resumed if begun < ended else 0.0)
        could_go = max(float(numbers(rows, "issue_us").max()), last.get(way, 0.0))
        found[action], last[way] = max(0.0, float(has_it) - could_go), max(float(has_it), could_go)
    return found


def others(step: PipelinedStep) -> Iterator[tuple[str, dict[str, object], Schedule]]:
    """Lists that leave less idle: what is to be changed, as options of ``CompareConfig`` too, and the list."""
    schedule = step.done.schedule
    num_ranks, number = len(schedule.ranks), schedule.num_micro_batches
    plan = next((name for name in PLANS if _is(schedule, name)), None)
    if plan is not None:
        twice = 2 * number
        change = f"twice as many micro-batches of half the rows (--micro-batches {twice})"
        yield change, {"micro_batches": twice}, make_schedule(plan, num_ranks, twice)
    if plan != "zb-h1" and schedule.num_stages == num_ranks:
        change = "backward in two halves (--schedule zb-h1)"
        yield change, {"schedule": ("zb-h1",)}, make_schedule("zb-h1", num_ranks, number)


def _is(schedule: Schedule, plan: str) -> bool:
    try:
        return schedule == make_schedule(plan, len(schedule.ranks), schedule.num_micro_batches)
    except ValueError:  # a number that it does not take
        return False


def levelled(step: PipelinedStep, _: Schedule) -> Callable[[Action], float]:
    """The time of each action of its own list if all ranks worked as long as they do on average."""
    spent = [step.spent(rank) for rank in range(len(step.done.schedule.ranks))]
    factors = {
        (rank, kind): float(np.mean([each[kind] for each in spent])) / one[kind]
        for rank, one in enumerate(spent) for kind in Kind if one[kind]
    }  # fmt: skip
    rank_of = step.done.schedule.rank_of
    return lambda action: step.done.work[action] * factors.get((rank_of[action.stage], action.kind), 1.0)


def medians(steps: Sequence[PipelinedStep]) -> tuple[float, float]:
    """The bubble as measured and as foretold by the same list, of a run.

    Raises:
        ValueError: it has no step.
    """
    if not steps:
        raise ValueError("spans: those of no step are whole")
    return median(step.done.bubble for step in steps), median(step.foretold().bubble for step in steps)


BUBBLE, UNBALANCED = "pipeline bubble", "unbalanced stages"


def found(record: Recorded) -> Iterator[Found]:
    """Those of the schedule; none where there is no pipeline."""
    if _of_actions(record.spans).empty:
        return
    every = pipelined_steps(record.collectives, record.spans, record.axes)
    steps = [step for step in every if step.ranks == every[0].ranks]  # of the first pipeline, as long as the others
    if len(steps) < len(record.steps):
        return
    base = _again(record, steps)
    yield from _bubble(record, steps, base)
    yield from _unbalanced(record, steps, base)


def _bubble(record: Recorded, steps: list[PipelinedStep], base: Steps) -> Iterator[Found]:
    measured, foretold = medians(steps)
    most = max(map(steps[0].done.schedule.held, range(len(steps[0].ranks))))
    said = (
        f"ranks wait for other stages for {100 * measured:.0f} % of the schedule's time, by its list "
        f"{100 * foretold:.0f} %; a rank holds at most {most:g} micro-batches"
    )
    without_waits = [step.without_messages(step.messages) for step in base]
    tried = [
        Found(BUBBLE, _again(record, steps, other), said, change, without_waits, settings, base)
        for change, settings, other in others(steps[0])
    ]
    yield from sorted(tried, key=lambda one: -float(np.median(record.gains(one.changed, base))))[:1]


def _unbalanced(record: Recorded, steps: list[PipelinedStep], base: Steps) -> Iterator[Found]:
    spent = [median(sum(step.spent(rank).values()) for step in steps) for rank in range(len(steps[0].ranks))]
    longest = int(np.argmax(spent))
    others_us = float(np.mean([us for rank, us in enumerate(spent) if rank != longest]))
    if spent[longest] < (1 + EVEN) * others_us:
        return
    said = (
        f"the stages of rank {steps[0].ranks[longest]} take {in_ms(spent[longest])} of a step, those of another "
        f"rank {in_ms(others_us)}"
    )
    changed = _again(record, steps, us_of=levelled)
    yield Found(UNBALANCED, changed, said, "stages of equal work, cut elsewhere (--begins),", base=base)


def _again(
    record: Recorded, steps: list[PipelinedStep], other: Schedule | None = None,
    us_of: Callable[[PipelinedStep, Schedule], Callable[[Action], float]] = PipelinedStep.work_of,
) -> Steps:  # fmt: skip
    """The steps by their own list or another, or with other work; what is around the schedule stays as it was."""
    made = []
    for step, recorded_us in zip(steps, record.base.tolist(), strict=True):
        own = step.done.schedule
        around = max(0.0, recorded_us - _programs(record, step, own, step.work_of(own), 0.0).us)
        made.append(_programs(record, step, other or own, us_of(step, other or own), around))
    return made


def _programs(
    record: Recorded, step: PipelinedStep, schedule: Schedule, us_of: Callable[[Action], float], around_us: float
) -> RecordedStep:  # fmt: skip
    work = {action: us_of(action) for actions in schedule.ranks for action in actions}
    items = programs(schedule, work, step.transfer_of, step.after(schedule, us_of))
    ended = {rank: (Work(step.late_us[rank]), *own, Work(around_us)) for rank, own in items.items()}
    return RecordedStep(ended, 0.0, dict.fromkeys(ended, 0.0), {}, record.spans)
