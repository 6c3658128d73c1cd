"""A record of a pipeline made by hand: its bubble, what its list foretells, what another list and cut would gain."""

import pytest

from shardlab.schedules import make_schedule, play
from shardlab.why.causes import causes
from shardlab.why.pipelined import pipelined_steps
from shardlab.why.recorded_step import recorded_steps
from tests.analysis.made_pipeline import AXES, even, recorded, uneven


@pytest.mark.parametrize(
    ("plan", "us_of", "transfer_us", "late"),
    [
        ("1f1b", even, 0.0, (0.0, 0.0)), ("gpipe", uneven, 300.0, (0.0, 2500.0)), ("zb-h1", uneven, 0.0, (0.0, 0.0)),
        ("interleaved", even, 1400.0, (0.0, 0.0)),
    ],
)  # fmt: skip
def test_the_bubble_is_that_which_was_played_and_its_list_foretells_it(plan, us_of, transfer_us, late):
    schedule = make_schedule(plan, 2, 4)
    played = play(schedule, us_of, transfer_us, dict(enumerate(late)))
    tables = recorded(schedule, us_of, transfer_us, late)
    step = pipelined_steps(*tables[:2], AXES)[1]
    assert step.done.schedule == schedule
    assert step.done.bubble == pytest.approx(played.bubble)
    assert step.foretold().bubble == pytest.approx(played.bubble)
    assert all(step.done.begins[action] == pytest.approx(begin) for action, begin in played.begins.items())


@pytest.mark.parametrize("plan", ["1f1b", "gpipe", "zb-h1"])
def test_what_an_action_does_after_its_message_has_left_delays_no_other_rank(plan):
    """As the gradients that the last backward sends over the data axis, behind the gradient of its input."""
    schedule = make_schedule(plan, 2, 4)
    last = {actions[-1] for actions in schedule.ranks}
    tail = {action: 5000.0 if action in last else 100.0 for actions in schedule.ranks for action in actions}

    def us_of(action):
        return even(action) + tail[action]

    tables = recorded(schedule, us_of, 300.0, left_of=tail.__getitem__)
    step = pipelined_steps(*tables[:2], AXES)[1]
    assert step.done.bubble == pytest.approx(play(schedule, us_of, 300.0, after=tail.__getitem__).bubble)
    assert step.foretold().bubble == pytest.approx(step.done.bubble)
    assert step.foretold().seconds == pytest.approx(step.done.seconds)
    assert step.foretold(make_schedule(plan, 2, 4)) == step.foretold(), "the same list, made again"
    bubble = next((one for one in causes(*tables, axes=AXES) if one.name == "pipeline bubble"), None)
    idle = 1e-3 * sum(step.done.idle) / 2  # of a rank
    assert bubble is None or bubble.us / 1e3 <= 1.3 * idle, "no more than ranks have waited"


def test_of_another_list_what_is_foretold_is_what_it_plays():
    step = pipelined_steps(*recorded(make_schedule("1f1b", 2, 4), even)[:2], AXES)[0]
    for plan, number in (("zb-h1", 4), ("1f1b", 8), ("interleaved", 4)):
        other = make_schedule(plan, 2, number)
        parts = other.num_stages / 2 * number / 4  # of as many rows in all
        assert step.foretold(other).seconds == pytest.approx(play(other, even).seconds / parts)


def test_a_message_is_one_on_both_ranks_so_that_a_longer_stage_delays_the_other():
    tables = recorded(make_schedule("1f1b", 2, 4), even)
    step = recorded_steps(*tables, AXES)[1]
    assert step.us == pytest.approx(tables[2]["step_us"].median())
    slower = step.with_work(lambda rank, work: work.us * (2 if rank == 1 else 1))
    assert slower.us > step.us + 3 * 3000  # it works three micro-batches longer while the first stage waits


@pytest.mark.parametrize(("us_of", "name"), [(even, "pipeline bubble"), (uneven, "unbalanced stages")])
def test_the_cause_is_named_with_what_its_change_gains(us_of, name):
    schedule = make_schedule("gpipe", 2, 2)
    tables = recorded(schedule, us_of)
    found = {one.name: one for one in causes(*tables, axes=AXES)}
    assert name in found, found
    if us_of is even:
        assert found[name].settings == {"micro_batches": 4}
        assert found[name].gain_us == pytest.approx(
            8000 - 7000
        )  # the median of two ranks that end at 9 and 7, 7.5 and 6.5
        assert "unbalanced stages" not in found
