"""How long a schedule takes, who waits for whom, and where it deadlocks: the lists, run on the one simulator.

Each rank's list becomes a program (``partition.step_program``): wait for the message that an action needs, work, issue
the message that another rank needs. On this clock all receives are posted from the start (``Pipeline`` posts one
ahead), and a link carries messages in the order in which they are sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardlab.partition.step_program import Host, Issue, Item, Message, Wait, Work, run_programs
from shardlab.schedules.actions import Action, Kind, Schedule
from shardlab.vocabulary import Collective, Phase

Seconds = Callable[[Action], float]


@dataclass(frozen=True)
class Played:
    """A schedule that has been played, or done by ranks.

    Attributes:
        schedule: which.
        begins: by action, in seconds from the beginning of the step.
        ends: likewise.
        work: how long a rank worked on each, in seconds.
    """

    schedule: Schedule
    begins: Mapping[Action, float]
    ends: Mapping[Action, float]
    work: Mapping[Action, float] = field(repr=False)

    @property
    def seconds(self) -> float:
        """Until the last rank has ended."""
        return max(self.ends.values())

    @property
    def idle(self) -> list[float]:
        """By rank, the seconds of the step in which it does not work."""
        return [self.seconds - sum(map(self.work.__getitem__, actions)) for actions in self.schedule.ranks]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in the step in which they do not work (of the total, not of the ideal time)."""
        return sum(self.idle) / (self.seconds * len(self.schedule.ranks))


def play(
    schedule: Schedule, seconds: Seconds | Mapping[Kind, float], transfer_seconds: Seconds | float = 0.0,
    late: Mapping[int, float] | None = None, after: Seconds | None = None,
) -> Played:  # fmt: skip
    """When each action begins and ends.

    Args:
        schedule: what each rank does.
        seconds: of an action, or by its kind, in any unit.
        transfer_seconds: of one message between two ranks, or by the action that it brings the result of, in the same
            unit.
        late: by rank, when it begins; None for 0.
        after: of an action, how much of its seconds is left when its message leaves; None for nothing.

    Raises:
        ValueError: the ranks wait for each other without end; it says which action waits for which.
    """
    of = seconds if callable(seconds) else lambda action: seconds[action.kind]
    work = {action: of(action) for actions in schedule.ranks for action in actions}
    hosts = run_programs(programs(schedule, work, transfer_seconds, after), late)
    begins, ends = dict[Action, float](), dict[Action, float]()
    is_cut = schedule.sent() if after is not None else ()
    for rank, actions in enumerate(schedule.ranks):
        worked = iter([place for place, item in enumerate(hosts[rank].items) if isinstance(item, Work)])
        for action in actions:
            first = next(worked)
            last = next(worked) if action in is_cut else first
            if last + 1 >= len(hosts[rank].begins_us):
                raise ValueError(f"schedule: it deadlocks: {_stuck(schedule, hosts)}")
            begins[action], ends[action] = hosts[rank].begins_us[first], hosts[rank].begins_us[last + 1]
    return Played(schedule, begins, ends, work)


def in_time(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """``Schedule.sent()``, as the actions end where each takes as long.

    Ranks that send and receive in this order, one message after another, never wait for each other in a circle: what a
    rank needs before it can send stands before.

    Raises:
        ValueError: see ``play``.
    """
    ends = play(schedule, dict.fromkeys(Kind, 1.0)).ends
    return dict(sorted(schedule.sent().items(), key=lambda pair: ends[pair[0]]))


def programs(
    schedule: Schedule, work: Mapping[Action, float], transfer_seconds: Seconds | float, after: Seconds | None
) -> dict[int, tuple[Item, ...]]:
    """What each rank does, for the simulator.

    Args:
        schedule: the lists.
        work: by action, in any unit.
        transfer_seconds: see ``play``.
        after: likewise.
    """
    sent = _sent(schedule, transfer_seconds if callable(transfer_seconds) else lambda _: transfer_seconds)
    return {rank: _program(schedule, rank, work, sent, after) for rank in range(len(schedule.ranks))}


def _sent(schedule: Schedule, transfer_seconds: Seconds) -> dict[Action, Message]:
    """The message of each action whose result another rank needs; a link's messages one after another."""
    messages, last = dict[Action, Message](), dict[tuple[int, int], Message]()
    for action, way in schedule.sent().items():
        phase = Phase.FORWARD if action.kind is Kind.FORWARD else Phase.BACKWARD
        seconds = dict.fromkeys(way, transfer_seconds(action))
        made = Message(Collective.SEND, str(action), phase, 0, (str(action), True), seconds, after=last.get(way))
        messages[action] = last[way] = made
    return messages


def _program(
    schedule: Schedule, rank: int, work: Mapping[Action, float], sent: Mapping[Action, Message], after: Seconds | None
) -> tuple[Item, ...]:  # fmt: skip
    actions = schedule.ranks[rank]
    needs = {action: need for action in actions if (need := schedule.needs(action)) is not None}
    items: list[Item] = [Issue(sent[need]) for need in needs.values() if need in sent]
    for place, action in enumerate(actions):
        need = needs.get(action)
        if need is not None and need in sent:
            items.append(Wait(sent[need]))
        elif need is not None and need in actions[place:]:
            raise ValueError(f"schedule: it deadlocks: {action} stands before {need} on rank {rank}, and needs it")
        left = 0.0 if after is None or action not in sent else after(action)
        items.append(Work(work[action] - left))
        if action in sent:
            items += [Issue(sent[action]), *([] if after is None else [Work(left)])]
    return tuple(items)


def _stuck(schedule: Schedule, hosts: Mapping[int, Host]) -> str:
    """Which action of each rank waits for which."""
    lines = []
    for rank, host in hosts.items():
        if len(host.begins_us) <= len(host.items) and isinstance(item := host.items[len(host.begins_us) - 1], Wait):
            need = Action.parse(item.message.tag)
            action = next(one for one in schedule.ranks[rank] if schedule.needs(one) == need)
            lines.append(f"{action} of rank {rank} waits for {need} of rank {schedule.rank_of[need.stage]}")
    return "; ".join(lines)
