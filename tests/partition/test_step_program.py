"""Programs of a step whose times follow from arithmetic."""

from math import inf

import pytest

from shardlab.partition.step_program import (
    Contention,
    Issue,
    Message,
    Wait,
    Work,
    path_to_end,
    run_programs,
)  # fmt: skip
from shardlab.vocabulary import Collective, Phase


def message(us, tag="m", axis="data", **more):
    return Message(Collective.ALL_REDUCE, tag, Phase.BACKWARD, 8, (axis, False), us, **more)


def ends(programs, **more):
    return {rank: host.end_us for rank, host in run_programs(programs, **more).items()}


def pieces(hosts, rank):
    return [(one.rank, one.kind, one.start_us, one.end_us) for one in path_to_end(hosts, rank)][::-1]


def test_a_message_moves_when_its_last_rank_has_started_it_and_the_path_crosses_to_that_rank():
    one = message({0: 10.0, 1: 12.0}, dispatch_us={1: 2.0})
    programs = {0: (Work(5), Issue(one), Work(3), Wait(one, 1.0)), 1: (Work(20), Issue(one), Wait(one), Work(4))}
    hosts = run_programs(programs, {0: 0.0, 1: 7.0})
    assert {rank: host.end_us for rank, host in hosts.items()} == {0: 29 + 10 + 1, 1: 29 + 12 + 4}
    behind = [(1, "work", 7, 27), (1, "queued", 27, 29), (0, "all_reduce", 29, 39), (0, "wake-up", 39, 40)]
    assert pieces(hosts, 0) == behind


def test_what_is_too_short_to_be_added_to_the_time_ends_too():
    one = message({0: 2e-5})
    assert ends({0: (Issue(one), Work(1e-5), Wait(one))}, begin_us={0: 1e12}) == {0: pytest.approx(1e12)}


def test_messages_of_a_queue_take_turns_and_one_behind_another_waits_for_it_on_its_own_queue():
    first, second = message({0: 10.0}), message({0: 5.0})
    behind = message({0: 7.0}, axis="replica", after=second)
    hosts = run_programs({0: (Work(1), Issue(first), Issue(second), Issue(behind), Work(2), Wait(behind))})
    assert hosts[0].end_us == 1 + 10 + 5 + 7
    moving = [(start, end) for _, kind, start, end in pieces(hosts, 0) if kind == "all_reduce"]
    assert moving == [(1, 11), (11, 16), (16, 23)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_work_and_a_message_beside_it_both_take_longer(ranks):
    one = message(dict.fromkeys(range(ranks), 10.0))
    programs = dict.fromkeys(range(ranks), (Issue(one), Work(8), Wait(one)))
    # Work takes 12 us beside it, in which it moves for 6.
    assert ends(programs, contention=Contention(0.5, 1.0)) == pytest.approx(dict.fromkeys(range(ranks), 16.0))
    late = {**programs, 0: (Work(8), Issue(one), Wait(one))}
    if ranks > 1:  # nothing moves before the last rank has come, and nobody works beside it
        assert ends(late, contention=Contention(0.5, 1.0)) == pytest.approx(dict.fromkeys(range(ranks), 18.0))


def test_ranks_that_wait_for_each_other_never_end():
    a, b = message({0: 1.0, 1: 1.0}), message({0: 1.0, 1: 1.0})
    programs = {0: (Issue(a), Wait(a), Issue(b), Wait(b)), 1: (Issue(b), Wait(b), Issue(a), Wait(a))}
    assert ends(programs) == {0: inf, 1: inf}


def test_what_a_rank_sends_to_two_others_keeps_its_order():
    # As in a pipeline of three: rank 1 hands activations on, and later a gradient back, of which alone rank 0 knows.
    on, back = message({1: 1.0, 2: 1.0}, axis="pipe from 1"), message({1: 2.0, 0: 2.0}, axis="pipe from 1")
    programs = {
        0: (Issue(back), Wait(back)),
        1: (Issue(on), Wait(on), Issue(back), Wait(back)),
        2: (Issue(on), Wait(on)),
    }
    assert ends(programs) == {0: 3, 1: 3, 2: 1}
