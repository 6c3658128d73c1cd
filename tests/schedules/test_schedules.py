"""Schedules against the formulas of the papers and against torch's own check."""

import pytest

from shardlab.schedules import PLANS, Action, Kind, Schedule, make_schedule, play

F, B, I, W = Kind  # noqa: E741
SLOTS = {F: 1.0, B: 2.0, I: 1.0, W: 1.0}
CASES = [
    (name, p, m, options)
    for p in (2, 3, 4, 6, 8)
    for m in (1, 2, 3, 5, 8, 12, 24)
    for name, options in [
        ("gpipe", {}), ("1f1b", {}), ("zb-h1", {}), ("interleaved", {"stages_per_rank": 2}),
        ("interleaved", {"stages_per_rank": 3}),
    ]
    if name != "interleaved" or m % p == 0
]  # fmt: skip


def in_flight(name, p, m, rank, v=1):
    """By the table of shardlab/schedules/actions.py; None where it says nothing."""
    if name == "gpipe":
        return m
    if name == "1f1b":
        return min(m, p - rank)
    if name == "zb-h1":
        return min(m, p) if m >= p else None
    return min(2 * (p - 1 - rank) + (v - 1) * p + 1, m * v)


def idle(name, p, m):
    if name == "zb-h1":
        return p - 1 if m >= p else None
    return 3 * (p - 1)  # interleaved: v stages take v slots a rank, so that this is (p-1)(F+B)/v of them


def test_idle_time_and_micro_batches_in_flight_are_those_of_the_papers():
    for name, p, m, options in CASES:
        schedule = make_schedule(name, p, m, **options)
        v = options.get("stages_per_rank", 1)
        played = play(schedule, SLOTS)
        if (wanted := idle(name, p, m)) is not None:
            assert played.idle == [wanted] * p, (name, p, m)
            assert played.seconds == 3 * m * v + wanted
        for rank in range(p):
            if (wanted := in_flight(name, p, m, rank, v)) is not None:
                assert schedule.in_flight(rank) == v * schedule.held(rank) == wanted, (name, p, m, rank)


def test_what_has_arrived_was_needed_before_the_message_that_says_so():
    for name, p, m, options in CASES:
        schedule = make_schedule(name, p, m, **options)
        sent = schedule.sent()
        for rank in range(p):
            arrived = schedule.confirmed_by(rank)
            assert set(arrived) == {action for action, (_, to) in sent.items() if to == rank}
            all_arrived = [one for each in arrived.values() for one in each]
            assert len(set(all_arrived)) == len(all_arrived)
            for message, each in arrived.items():
                there = schedule.ranks[sent[message][0]]
                needed = {schedule.needs(action) for action in there[: there.index(message) + 1]}
                assert all(sent[one] == (rank, sent[message][0]) and one in needed for one in each)


def test_torch_takes_every_list():
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _validate_schedule

    for name, p, m, options in CASES:
        schedule = make_schedule(name, p, m, **options)
        actions = {
            rank: [_Action(action.stage, _ComputationType(str(action.kind)), action.micro_batch) for action in actions]
            for rank, actions in enumerate(schedule.ranks)
        }
        _validate_schedule(actions, p, schedule.num_stages, m)
        assert [list(map(str, actions[rank])) for rank in range(p)] == [list(map(str, line)) for line in schedule.ranks]


def test_known_lengths():
    assert play(make_schedule("1f1b", 4, 8), {F: 1.0, B: 1.0}).seconds == 22
    assert play(make_schedule("1f1b", 4, 8), SLOTS).seconds == play(make_schedule("gpipe", 4, 8), SLOTS).seconds == 33
    assert play(make_schedule("zb-h1", 4, 8), SLOTS).seconds == 27
    assert play(make_schedule("1f1b", 4, 8), SLOTS).bubble == 9 / 33


def test_messages_lengthen_the_way_through_and_one_link_carries_one_at_a_time():
    # Two stages, one micro-batch: forward, message, forward, backward, message, backward.
    assert play(make_schedule("gpipe", 2, 1), SLOTS, 0.5).seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    # The link is slower than a forward: the third message comes three transfers after the first forward.
    assert play(make_schedule("gpipe", 2, 3), SLOTS, 4.0).begins[Action(F, 1, 2)] == 1 + 3 * 4


def test_a_table_of_text_goes_out_and_comes_in():
    schedule = make_schedule("zb-h1", 2, 3)
    assert schedule.to_csv().splitlines()[0] == "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2"
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def of(*ranks):
    return Schedule(tuple(tuple(map(Action.parse, rank.split())) for rank in ranks))


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (["0F0 0B0", "1F0"], "1B0 is missing on rank 1"),
        (["0F0 0B0 0F0", "1F0 1B0"], "0F0 stands twice on rank 0"),
        (["0B0 0F0", "1F0 1B0"], "0B0 stands before 0F0 on rank 0"),
        (["0F0 0I0", "1F0 1B0"], "0W0 is missing on rank 0"),
        (["0F0 0W0 0I0", "1F0 1B0"], "0W0 stands before 0I0 on rank 0"),
        (["0F0 0B0 0I0 0W0", "1F0 1B0"], "0B0 stands beside 0I0 and 0W0"),
        (["0F0 0B0", "0F1 0B1"], "stage 0 is on ranks 0 and 1"),
        (["0F0 0B0", "2F0 2B0"], r"stages are \[0, 2\]"),
        ([], "stages are none"),
        (["0F0 0B0", ""], r"stages are \[0\]; number them 0, 1, ... and give each rank one"),
        (["0F0 0X0"], "action: '0X0' is none"),
    ],
)
def test_what_is_no_schedule_is_refused(ranks, told):
    with pytest.raises(ValueError, match=told):
        of(*ranks)


def test_a_schedule_that_stands_still_says_who_waits_for_whom():
    crossed = of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(
        ValueError, match="0B0 of rank 0 waits for 1B0 of rank 1; 1F1 of rank 1 waits for 0F1 of rank 0"
    ):
        play(crossed, SLOTS)
    with pytest.raises(ValueError, match="1F0 stands before 0F0 on rank 0, and needs it"):
        play(of("1F0 0F0 1B0 0B0"), SLOTS)


def test_bad_numbers_and_names_are_refused():
    with pytest.raises(ValueError, match="schedule: 'dapple' is not one of gpipe, 1f1b, interleaved, zb-h1"):
        make_schedule("dapple", 2, 2)
    with pytest.raises(ValueError, match="micro_batches: 0 is too small"):
        make_schedule("1f1b", 2, 0)
    with pytest.raises(ValueError, match="micro_batches: 6; interleaved takes a multiple of 4; use 1f1b"):
        make_schedule("interleaved", 4, 6)
    assert set(PLANS) == {"gpipe", "1f1b", "interleaved", "zb-h1"}


def test_a_schedule_of_the_readers_own():
    def all_for_one(num_ranks, num_micro_batches, rank):
        return [Action(kind, rank, number) for number in range(num_micro_batches) for kind in (F, B)]

    schedule = make_schedule(all_for_one, 3, 4)
    assert (play(schedule, SLOTS).seconds, schedule.in_flight(0)) == (3 * 3 * 4, 1)
