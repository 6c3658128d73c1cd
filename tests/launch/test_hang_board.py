"""The hang board: what a rank writes is what the parent reads."""

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from traceback import walk_stack
from unittest import mock

from shardlab.comm.callers import line_of_caller
from shardlab.comm.events import CollectiveEvent
from shardlab.launch import worker
from shardlab.launch.hang_board import Board, BoardWriter, CallState, mismatch
from shardlab.launch.stack import SeenCall, _call_of
from shardlab.vocabulary import Collective

LINE = "/nowhere/train.py:31"  # no file: its code would be shown beside it


def event(seq, op=Collective.ALL_REDUCE, tag="gradients", source_line=LINE, dtype="float32", numel=4):
    return CollectiveEvent(seq, op, "data", tag, dtype, numel, 16, 2, "gloo", False, source_line)


def shown(board, rank=1):
    row = board.read()[rank]
    return row.state, row.seq


def make(tmp_path, world_size=3, rank=1):
    board = Board(tmp_path / "board", world_size)
    return board, BoardWriter(board.path, rank)


def test_no_stack_is_walked_of_a_thread_that_waits_for_what_is_on_the_board(tmp_path, monkeypatch):
    _, writer = make(tmp_path)
    life, looks = mock.Mock(poll=mock.Mock(side_effect=[False, False, True])), mock.Mock(return_value=None)
    monkeypatch.setattr(worker, "StackWatch", lambda _: mock.Mock(look=looks))
    monkeypatch.setattr(worker, "_cut", lambda: None)
    writer.issued(event(0))
    worker._watch(life, writer)
    assert not looks.called
    writer.clear()
    life.poll.side_effect = [False, True]
    worker._watch(life, writer)
    assert looks.call_count == 1


def call(op="barrier"):
    return SeenCall(op, "cell:1", float(perf_counter_ns()))


def test_calls_past_the_communicator_show_from_the_second_look_and_only_when_it_is_idle(tmp_path):
    board, writer = make(tmp_path)
    barrier = call()
    writer.seen(barrier)
    assert board.read()[1].state is CallState.NONE
    writer.seen(barrier)
    assert (board.read()[1].op, board.read()[1].state) == ("barrier", CallState.ISSUED)
    one = event(4)
    writer.issued(one)
    writer.seen(barrier)
    assert shown(board) == (CallState.ISSUED, 4)
    writer.completed(one)
    writer.seen(barrier)
    assert shown(board) == (CallState.COMPLETED, 4)
    writer.seen(barrier)
    assert (board.read()[1].op, board.read()[1].state) == ("barrier", CallState.ISSUED)
    writer.failed(None)
    writer.seen(None)
    assert (board.read()[1].op, board.read()[1].state) == ("barrier", CallState.COMPLETED)


def test_a_call_that_was_seen_does_not_come_back_over_what_came_after_it(tmp_path):
    board, writer = make(tmp_path)
    mesh, wait = call("Mesh"), call("wait")
    for _ in range(2):
        writer.seen(mesh)
    writer.issued(one := event(4))
    writer.completed(one)
    writer.seen(None)
    assert shown(board) == (CallState.COMPLETED, 4)
    writer.issued(one := event(5))
    writer.seen(wait)  # of the communicator's own code
    writer.completed(one)
    writer.seen(wait)  # done, and its caller not awake yet
    writer.seen(None)
    assert shown(board) == (CallState.COMPLETED, 5)


def test_a_failed_wait_shows_the_collective_that_ended_before_it(tmp_path):
    board, writer = make(tmp_path)
    one = event(3)
    writer.issued(one)
    writer.completed(one)
    writer.failed(SeenCall("wait", "cell:1", float(perf_counter_ns())))
    row = board.read()[1]
    assert (row.state, row.op, row.seq) == (CallState.FAILED, "all_reduce", 3)


def test_ranks_in_different_collectives_are_told_and_of_a_send_and_its_receive_nothing(tmp_path):
    board, writer = make(tmp_path)
    other = BoardWriter(board.path, 2)

    def seen(theirs):
        for one, row in ((writer, event(5)), (other, theirs)):
            one.clear()
            one.issued(row)
        return mismatch(board.read())

    assert seen(event(5)) == ""
    assert "4 float64" in seen(event(5, dtype="float64"))
    writer.clear()
    other.clear()
    writer.issued(event(5, Collective.SEND))
    other.issued(event(5, Collective.RECV))
    assert mismatch(board.read()) == ""


def test_a_line_of_the_standard_library_is_never_named():
    """Where one calls a collective: from a line of this file, and in a thread from none."""
    with ThreadPoolExecutor(1) as threads:
        calls = (lambda what: weakref.finalize(Board, what)(), lambda what: threads.submit(what).result())
        found = [(call(line_of_caller), _call_of(walk_stack(call(sys._getframe))).source_line) for call in calls]
    assert [line.rpartition(":")[0] for line in found[0]] == [__file__] * 2
    assert found[1] == ("", "")
