"""What a learner sees: a sentence, a table, figures, hints, progress; and exercises of a teacher's own."""

import os
import re
import sys
import threading
import time
from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch

import shardlab.course.exercises
from shardlab.course import LADDER, Case, Exercise, Measured, Verdict, VirtualClock, check, find, hint, task
from shardlab.course.exercises.exercise import Done
from shardlab.course.exercises.judge import Score, examine
from shardlab.course.exercises.mistakes import mistake_in
from shardlab.course.exercises.picture import held, held_table, memory, moved, moved_table, schedule
from shardlab.course.exercises.values import difference, plain
from shardlab.engines import DDP, ZeRO3
from shardlab.launch import RankPool, current
from tests.conftest import Pools
from tests.course.exercises.right import right_buckets
from tests.course.exercises.wrong import half_a_ring


def test_a_failure_is_a_sentence_a_table_and_two_figures(capsys):
    report = check("collectives.ring_all_reduce", half_a_ring)
    printed = capsys.readouterr().out
    assert "failed. 2 ranks, 8 elements: rank 0, x after the call, element 0 (bytes 0 to 7): 1 is wanted, 0 " in printed
    assert "\nYou get this when the ring is gone around once: every rank then has one finished chunk" in printed
    order = [printed.index(words) for words in ("messages sent", "Who held what", "What moved")]
    assert order == sorted(order)
    assert repr(report) == "collectives.ring_all_reduce: failed"
    values, messages = held_table(find(report.exercise), report), moved_table(report)
    assert values.groupby("rank")["differs"].sum().to_dict() == {0: 4, 1: 4}
    assert messages.groupby("side").size().to_dict() == {"attempt": 4, "wanted": 8}
    assert held(values, "held", "an element").layout.xaxis.dtick == 1, "columns have whole numbers"
    for figure in (held(values, "held", "an element"), moved(messages, "moved")):
        assert {annotation.text for annotation in figure.layout.annotations} == {"your attempt", "wanted"}


def test_a_failure_shows_its_inputs_and_no_picture_without_a_difference(capsys):
    check("fsdp.units", lambda sizes, budget, prefetch: [[index] for index in range(len(sizes))])
    printed = capsys.readouterr().out
    assert "rank 0 sent 6 messages where 2 are enough" in printed
    assert "The inputs of this case: [48, 16, 32, 64, 16, 16], 96, 0" in printed
    assert "What moved" in printed
    assert "Who held what" not in printed, "the layers are right"


def test_a_mistake_is_recognised_by_what_it_comes_to_however_it_is_written(pools):
    def others_way(sizes, capacity):
        """Not a line of it is that of the known mistake; and the numbers are NumPy's."""
        *kept, _ = [list(each) for each in right_buckets(sizes, capacity)] or [[]]
        return np.array(kept)

    report = examine(find("buckets.assign"), others_way, pools(2))
    assert report.mistake.startswith("You get this when a bucket is kept only when it is closed")
    assert not examine(find("buckets.assign"), lambda sizes, capacity: [[0]], pools(2)).mistake, "another one bucket"


def test_a_ratio_is_said_where_all_numbers_have_it(pools):
    wanted = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    exercise = Exercise("class.mean", "", "", lambda: [Case("two", ((), (), ()), ({"part": wanted},) * 3)])
    for factor, words in ((3, "3 times what is wanted, and there are 3 ranks"), (1 / 3, "1/3 of"), (2, "twice"),
                          (0.5, "half of"), (-1, "what is wanted with the other sign"), (1.5, "")):  # fmt: skip
        said = examine(exercise, lambda comm, factor=factor: {"part": wanted * factor}, pools(3)).mistake
        assert said.startswith(f"Found is {words}") if words else said == ""
    counts = Exercise("class.count", "", "", lambda: [Case("two", ((), ()), (3, 3))])
    assert examine(counts, lambda comm: 6, pools(2)).mistake == "", "of what is counted no ratio says anything"
    shape = mistake_in("class.one", "one: shape", Case("one", ((),), (wanted,)), (Done(wanted.view(3, 1)),))
    assert shape == "", "of equal numbers neither"
    right = mistake_in("class.one", "one: rank 0 took 9 us", Case("one", ((),), (wanted,)), (Done(wanted),))
    assert right == "", "of what is right neither, where something else is wrong"


def test_where_memory_is_wrong_it_is_drawn_over_time_beside_a_right_answers(capsys):
    report = check("whole.fsdp", ZeRO3)
    printed = capsys.readouterr().out
    assert re.search(r"Memory over time: whole.fsdp: 6,6\d\d B were held at once, and 6,3\d\d B by a right", printed)
    assert "Your schedule: whole.fsdp: 927 us (640 are allowed); " in printed
    figure = memory(report.done, report.done, 6500, "Memory over time")
    assert [max(trace.y) for trace in figure.data] == [done.peak_bytes for done in report.done] * 2
    drawn = schedule(report.done, replace(report.case, most_time_us=700), "Your schedule")
    assert " us (700 are allowed); " in drawn.layout.title.subtitle.text
    assert {bar.name for bar in drawn.data} == {"compute", "message"}


def test_tasks_and_hints_are_printed(capsys):
    first, *_, last = hints = LADDER[1].hints
    hint("buckets.assign")
    hint("buckets.assign", len(hints))
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"Hint 1 of 3 (the next: hint('buckets.assign', 2)): {first}", f"Hint 3 of 3: {last}"]
    with pytest.raises(ValueError, match=r"number: 4 is given; buckets\.assign has 3 hints, from 1"):
        hint("buckets.assign", 4)
    task("buckets.assign")
    printed = capsys.readouterr().out
    assert LADDER[1].task in printed
    assert LADDER[1].starter in printed
    with pytest.raises(ValueError, match=r"exercise: 'ring' is not known; there are collectives\.ring_all_reduce"):
        check("ring", half_a_ring)
    with pytest.raises(ValueError, match="name: 'my exercise' was given; write words with dots"):
        Exercise("my exercise", "", "", list)


def test_ranks_that_do_not_start_block():
    class NoRanks:
        def start(self):
            raise OSError("no more processes")

    report = examine(find("buckets.assign"), right_buckets, NoRanks())
    assert (report.verdict, report.reason) == (Verdict.BLOCKED, "ranks do not start here: no more processes")


def test_a_function_that_does_not_come_to_an_end_fails():
    for function, words in (
        (lambda comm, x: os._exit(3), "2 ranks, 8 elements: the process of rank . ended"),
        (lambda comm, x: sys.exit("enough"), "2 ranks, 8 elements: rank . raised SystemExit: enough"),
        (lambda comm, x, y: None, "2 ranks, 8 elements: rank . raised TypeError: .*missing 1 required"),
        (lambda comm, x: time.sleep(60), r"2 ranks, 8 elements: the run took longer than limit_s=3 s"),
        (lambda comm, x, lock=threading.Lock(): None, "cannot be pickled"),  # noqa: B008
    ):
        report = check("collectives.ring_all_reduce", function, timeout_s=6, limit_s=3)
        assert report.verdict is Verdict.FAILED
        assert re.search(words, report.reason), report.reason


def test_what_is_no_function_or_no_strategy_is_said_to_be_none(pools):
    for name, given, words in (
        ("zero1.owners", {}, "it is a dict, and nothing that can be called; give the function, or the class, by its"),
        ("whole.ddp", DDP(), "it is a DDP, and nothing that can be called"),
        ("whole.ddp", dict, "3 ranks, trained on MLP: rank 0: it is no strategy, but a dict; write a subclass of"),
        ("whole.tensor", lambda block, comm: None, "rank 0: it is no module, but a NoneType; write a subclass of"),
    ):
        report = examine(find(name), given, pools(3))
        assert (report.verdict, report.mistake) == (Verdict.FAILED, "")
        assert words in report.reason


class Arriving:
    """A function for ranks: on rank 1 its coming takes longer than the others may wait, or ends the process."""

    def __init__(self, delay):
        self.delay = delay

    def __call__(self):
        """Never here: ranks get another one."""

    def __reduce__(self):
        return (lambda delay: delay() if current().rank == 1 else max), (self.delay,)


def test_a_function_that_never_ran_has_not_failed():
    exercise = Exercise("class.two", "", "", lambda: [Case("two", ((0,), (0,)), (0, 0))])
    with RankPool(2, device="cpu", timeout_s=1.0) as pool:
        for delay, words in (
            (lambda: os._exit(3), "two: the process of rank 1 ended before it called your function"),
            (lambda: time.sleep(60), "two: rank 0, 1 had no time to call your function; run it again"),
        ):
            report = examine(exercise, Arriving(delay), pool)
            assert (report.verdict, report.reason) == (Verdict.BLOCKED, words)


def test_where_every_wanted_result_is_0_nothing_is_said(pools):
    gradients = (torch.zeros(2, dtype=torch.float64),) * 2
    dead = Exercise("class.dead", "", "", lambda: [Case("two", ((0,), (0,)), gradients)])
    report = examine(dead, lambda comm, place: torch.zeros(2, dtype=torch.float64), pools(2))
    assert (report.verdict, report.reason[:25]) == (Verdict.BLOCKED, "every wanted result is 0,")


def test_what_differs_is_told_apart_and_what_is_equal_passes():
    close = [torch.tensor([value], dtype=torch.float64) for value in (0.1419359999, 0.1419361002)]
    for wanted, found, words in (
        (*close, "0.141936 is wanted, 0.1419361 was found"),
        (torch.tensor([1.0, nan]), torch.tensor([1.0, nan]), ""),
        (nan, nan, ""),
        (0.1, np.float32(0.1), "result: 0.1 is wanted, 0.10000000149011612 was found"),
        ([1.5, 2.0], np.array([1.5, 2]), ""),
        ([1, 2], torch.tensor([1, 2]), ""),
        (3, torch.tensor([1, 2]), "result: 3 is wanted, tensor([1, 2]) was found"),
        (True, np.bool_(True), ""),
    ):
        assert words in difference(wanted, plain(found))
        assert bool(words) == bool(difference(wanted, plain(found)))


def holds(function, comm, peak_bytes, time_us):
    return Measured(function(comm), peak_bytes, time_us)


def test_what_is_held_and_the_virtual_clock_are_limits_and_scores(pools: Pools):
    case = Case("two", ((8, 3), (16, 5)), (0, 0), most_peak_bytes=16, most_time_us=5)
    exercise = Exercise("class.held", "", "", lambda: [case, case], attempt=holds)
    report = examine(exercise, lambda comm: 0, pools(2))
    assert (report.verdict, report.score) == (Verdict.PASSED, Score(peak_bytes=16, time_us=10))
    assert str(report.score) == "At most 16 B were held at once. All cases together took 10 us on the virtual clock."
    for limit, words in (
        ({"most_peak_bytes": 15}, "two: rank 1 held 16 B at once, and 15 B are allowed"),
        ({"most_time_us": 5 - 1e-8}, "two: rank 1 took 5 us on the virtual clock, and 4.99999999 are enough"),
        ({"most_time_us": 4.5}, "two: rank 1 took 5 us on the virtual clock, and 4.5 are enough"),
    ):
        strict = [replace(case, **limit)]
        assert examine(replace(exercise, cases=lambda strict=strict: strict), lambda comm: 0, pools(2)).reason == words


def test_a_case_with_axes_gets_a_mesh_and_refuses_another_number_of_ranks(pools: Pools):
    axes = {"data": 1, "tensor": 2}
    case = Case("mesh", ((), ()), ([0, 0], [0, 1]), axes=axes)
    exercise = Exercise("class.mesh", "", "", lambda: [case])
    report = examine(exercise, lambda mesh: [mesh["data"].rank, mesh["tensor"].rank], pools(2))
    assert (report.verdict, report.reason) == (Verdict.PASSED, "")
    with pytest.raises(ValueError, match="case 'mesh': 1 inputs and 1 wanted results for 2 ranks; give one of each"):
        Case("mesh", ((),), (0,), axes=axes)


def test_a_message_waits_on_the_virtual_clock_for_the_one_before_it():
    clock = VirtualClock(latency_us=10, bytes_per_us=2)
    first, second = clock.send(20), clock.send(40)
    assert (first, second) == (20, 50)
    clock.compute(30)
    clock.wait(first)  # it has ended long ago
    clock.wait(second)
    assert (clock.now_us, clock.exposed_us) == (50, 20)
    assert clock.send(2) == 61


def test_a_teachers_own_exercise_as_the_room_shows_it(capsys):
    lines = shardlab.course.exercises.__doc__.split("Ten lines are enough:\n\n")[1].split("\n\n``Case")[0]
    source = "\n".join(line[4:] for line in lines.splitlines())
    *definition, call = source.strip().splitlines()
    assert len([line for line in definition if line]) <= 10
    exec(compile("\n".join(definition), "teacher", "exec"), namespace := {})
    mean = namespace["mean"]
    exec(compile(mean.starter, "starter", "exec"), namespace)
    exec(call, namespace)
    assert "class.mean: failed. 3 ranks: rank 0, result: 1.0 is wanted, 0.0 was found" in capsys.readouterr().out

    def solution(comm, value):
        total = torch.tensor([value])
        comm.all_reduce(total).wait()
        return total / comm.num_ranks

    assert check(mean, solution).verdict is Verdict.PASSED
