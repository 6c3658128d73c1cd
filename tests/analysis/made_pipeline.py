"""Records of ranks that did a schedule exactly as it plays."""

from shardlab.records.tables import COLLECTIVES, SPANS, STEPS
from shardlab.schedules import Kind, play
from tests.analysis.hand_made import NAN, STEP, collective, span

AXES = {"pipe": 2, "data": 1}
AROUND = 500.0  # the optimizer, in microseconds


def recorded(schedule, us_of, transfer_us=0.0, late=(0.0, 0.0), steps=4, left_of=lambda action: 0.0):
    """The tables of ranks that did a schedule as it plays, each from when it begins on.

    ``left_of`` an action is how long it works on after its message has left.
    """
    played = play(schedule, us_of, transfer_us, dict(enumerate(late)), left_of)
    moved, worked, of_steps = [], [], []
    arrived, before = {}, {}  # messages of one way travel one after another
    for action, way in schedule.sent().items():
        left = played.ends[action] - left_of(action)
        arrived[action] = before[way] = max(left, late[way[1]], before.get(way, 0.0)) + transfer_us
    for step in range(steps):
        now = step * 2 * played.seconds
        for rank, actions in enumerate(schedule.ranks):
            keys, last, seq = {"step": step, "axis": "pipe"}, late[rank], 0
            for action in actions:
                kind = "forward" if action.kind is Kind.FORWARD else "backward"
                need, begin, end = schedule.needs(action), played.begins[action], played.ends[action]
                if need is not None and schedule.rank_of[need.stage] != rank:
                    times = (now + late[rank], now + late[rank], now + max(late[rank], arrived[need]))
                    wait = (now + last, now + begin) if begin > last else (NAN, NAN)
                    moved.append(collective(rank, seq, times, wait, op="recv", tag=need.tag, **keys))
                    seq += 1
                for unit in ("model", str(action)):
                    worked.append(span(rank, unit, kind, now + begin, now + end, step=step))
                if action in schedule.sent():
                    times = (now + end - left_of(action),) * 3
                    moved.append(collective(rank, seq, times, op="send", tag=action.tag, **keys))
                    seq += 1
                last = end
            worked.append(span(rank, "model", "optimizer", now + last, now + last + AROUND, step=step))
            times = {"rank": rank, "step": step, "start_us": now, "step_us": last + AROUND}
            of_steps.append({**STEP, "run": "a", "source": "measured", **times})
    return COLLECTIVES.frame(moved), SPANS.frame(worked), STEPS.frame(of_steps)


def even(action):
    return {Kind.FORWARD: 1000.0, Kind.BACKWARD: 2000.0}.get(action.kind, 1000.0)


def uneven(action):
    return even(action) * (1.0 + action.stage)
