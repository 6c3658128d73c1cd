"""Exceptions, deaths and hangs in ranks: the caller hears who, what and where, and can go on."""

import os
import pickle
import re
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from shardlab.comm.events import CollectiveEvent
from shardlab.comm.mesh import Mesh
from shardlab.launch import RankDied, RankError, RankHang, RankPool, current
from shardlab.launch.processes import RankProcesses
from shardlab.vocabulary import Collective
from tests.launch.helpers import gone_within


class NeedsTwoArgumentsError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def works_again(pool):
    return pool.run(lambda rank: rank) == list(range(pool.world_size))


class SaysMoreError(Exception):
    def __init__(self, number):
        super().__init__(f"number {number}")


class HasNoTextError(Exception):
    def __str__(self):
        return self.text


def event(tag):
    return CollectiveEvent(0, Collective.ALL_REDUCE, "data", tag, "float32", 4, 16, 2, "gloo", False, "train.py:31")


def test_error_carries_rank_traceback_and_cause(pools):
    def fail(rank):
        if rank == 1:
            raise KeyError("the key")
        return rank

    with pytest.raises(RankError) as caught:
        pools(2).run(fail)
    error = caught.value
    assert (error.rank, error.exception_type) == (1, "KeyError")
    assert str(error).splitlines()[0] == "rank 1 raised KeyError: 'the key'"
    assert 'raise KeyError("the key")' in error.traceback_text
    assert "worker.py" not in error.traceback_text
    assert isinstance(error.__cause__, KeyError)
    assert works_again(pools(2))


def test_the_message_has_the_users_own_frames_and_says_how_to_see_the_others(pools, monkeypatch):
    def fail(rank):
        try:
            torch.nn.Linear(2, 3)(torch.ones(5))
        except RuntimeError as error:
            raise ValueError("mine") from error

    def caught():
        with pytest.raises(RankError) as caught:
            pools(2).run(fail)
        return caught.value

    error = caught()
    message = str(error)
    assert "torch.nn.Linear(2, 3)(torch.ones(5))" in message
    assert 'raise ValueError("mine") from error' in message
    assert "torch/nn/modules" not in message
    assert "frames of libraries are left out; SHARDLAB_TRACEBACK=full shows them" in message
    in_a_cell = "\n".join(error._render_traceback_())
    assert "pools(2).run(fail)" in in_a_cell
    assert "launch/pool.py" not in in_a_cell
    assert in_a_cell.endswith(message)
    assert "torch/nn/modules" in error.traceback_text
    monkeypatch.setenv("SHARDLAB_TRACEBACK", "full")
    assert "torch/nn/modules" in str(caught())


def test_exception_that_cannot_be_rebuilt_is_told_as_text(pools):
    def fail(rank):
        raise NeedsTwoArgumentsError("this", "that")

    with pytest.raises(RankError, match="NeedsTwoArgumentsError: this and that") as caught:
        pools(2).run(fail)
    assert caught.value.__cause__ is None


def test_an_exception_is_the_cause_only_with_its_own_message(pools):
    def fail(rank, error):
        raise error(rank)

    for error, message in (SaysMoreError, "number [01]"), (HasNoTextError, "<exception str.. failed>"):
        with pytest.raises(RankError, match=f"raised {error.__name__}: {message}\n") as caught:
            pools(2).run(fail, error)
        assert caught.value.__cause__ is None


def test_errors_can_be_sent_to_another_process(pools):
    with pytest.raises(RankError) as caught:
        pools(2).run(lambda rank: 1 / 0)
    died, hang = RankDied(1, -9, "the table"), RankHang("rank 1 waits", (1,), "the table")
    for error in caught.value, died, hang:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_group_of_exceptions_is_shown_by_the_users_own_frames(pools):
    def fail(rank):
        try:
            torch.nn.Linear(2, 3)(torch.ones(5))
        except RuntimeError as error:
            raise ExceptionGroup("of a task", [error]) from None

    with pytest.raises(RankError, match="frames of libraries are left out") as caught:
        pools(2).run(fail)
    assert "torch.nn.Linear(2, 3)(torch.ones(5))" in str(caught.value)
    assert "module.py" in caught.value.traceback_text
    assert "module.py" not in str(caught.value)


def test_sys_exit_in_a_rank_is_an_error(pools):
    for code in (0, "a message"):
        with pytest.raises(RankError) as caught:
            pools(2).run(lambda rank, code: sys.exit(code) if rank == 0 else None, code)
        assert (caught.value.rank, caught.value.exception_type) == (0, "SystemExit")


def test_death_wins_over_the_broken_connections_it_causes(pools):
    def die(rank):
        if rank == 2:
            time.sleep(0.5)
            os._exit(7)
        dist.all_reduce(torch.ones(1000))

    with pytest.raises(RankDied, match="exit code 7") as caught:
        pools(3).run(die)
    assert caught.value.rank == 2
    rows = caught.value.table.splitlines()
    assert "dead" in rows[3]
    for row in rows[1:3]:
        assert "all_reduce" in row
        assert "test_rank_failures.py" in row


def test_cause_wins_over_an_effect_that_is_heard_of_first(pools):
    def die(rank):
        if rank == 0:
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(0.2)
        os._exit(7)

    with pytest.raises(RankDied, match="rank 1 died"):
        pools(2).run(die)


def test_rank_killed_between_two_calls(pools):
    pool = pools(2)
    pool.start()
    os.kill(pool.pids[1], signal.SIGKILL)
    time.sleep(0.3)
    assert works_again(pool)


def test_crash_in_c_code_shows_the_python_stack(pools, capsys):
    import faulthandler

    with pytest.raises(RankDied, match="SIGSEGV"):
        pools(1).run(lambda rank: faulthandler._sigsegv())
    assert "[rank 0] Fatal Python error: Segmentation fault" in capsys.readouterr().out


@pytest.mark.parametrize(("verb", "transport"), [("all_gather", "gloo"), ("all_reduce", "shared_memory")])
def test_sizes_that_differ_are_told(verb, transport):
    """Over gloo the ranks of a gather wait for a chunk of the length that they expect."""

    def differ(rank):
        comm = Mesh({"data": 2}, transport=transport).data
        getattr(comm, verb)(torch.ones(100 * (rank + 1)), tag="loss").wait()

    error = RankHang if transport == "gloo" else RankError
    with RankPool(2, device="cpu", timeout_s=1.0) as pool, pytest.raises(error) as caught:
        pool.run(differ)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.endswith(
        "Collective 0 of axis 'data' differs between ranks: "
        f"rank 0 in {verb} 'loss' of 100 float32, rank 1 in {verb} 'loss' of 200 float32"
    )
    if transport == "shared_memory":
        what = rf"{verb} of \d00 float32 \(loss\)"
        assert re.search(rf"{what} on rank \d of the group meets {what} on rank \d", first_line)
    else:
        assert ["100 float32" in row for row in caught.value.table.splitlines()] == [False, True, False]


def test_what_takes_long_and_what_an_earlier_call_left_unfinished_is_no_hang():
    def reduce_for_a_second(rank):
        x = torch.zeros(1)
        while x < 1.0:  # rank 0's clock decides for both
            x.fill_(time.monotonic() - start)
            dist.broadcast(x, 0)

    with RankPool(2, device="cpu", timeout_s=0.3) as pool:
        pool.run(lambda rank: current().board.issued(event("left over")))
        assert pool.run(lambda rank: threading.Event().wait(1.0)) == [False, False]
        start = time.monotonic()
        assert pool.run(reduce_for_a_second) == [None, None]


def test_skipped_collective_of_torch_itself():
    def skip(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(4))

    with RankPool(2, device="cpu", timeout_s=1.0) as pool:
        with pytest.raises(RankHang) as caught:
            pool.run(skip)
        assert caught.value.waiting == (0,)
        assert "rank 0 in all_reduce" in str(caught.value)
        assert "test_rank_failures.py" in str(caught.value)
        assert ": dist.all_reduce(torch.ones(4))" in caught.value.table


def test_mesh_that_not_all_ranks_make():
    def make(rank):
        if rank == 1:
            Mesh({"data": 2})

    with RankPool(2, device="cpu", timeout_s=1.0) as pool:
        with pytest.raises(RankHang, match=r"rank 1 in Mesh at .*failures.py:\d+.*rank 0 \(returned\)") as caught:
            pool.run(make)
        assert caught.value.waiting == (1,)


def test_a_rank_that_skipped_a_collective_is_named_on_gloo():
    def skip(rank):
        with Mesh({"data": 4}, transport="gloo") as mesh:
            if rank != 2:
                mesh.data.all_reduce(torch.ones(100), tag="loss").wait()
            mesh.data.all_reduce(torch.ones(100), tag="next").wait()

    with RankPool(4, device="cpu", timeout_s=1.0) as pool, pytest.raises(RankHang) as caught:
        pool.run(skip)
    # gloo has taken rank 2's 'next' for its 'loss'.
    where = "ranks 0, 1, 3 in 1, rank 2 has come to 0, all_reduce 'next' of 100 float32"
    assert f"Not all are in the same collective of axis 'data': {where}" in str(caught.value)
    assert re.search(r"\nrank +process +seq +collective", str(caught.value))


def test_who_is_missing_is_looked_for_in_the_group_alone():
    def half(rank):
        with Mesh({"data": 2}, ranks=range(2), transport="gloo") as mesh:
            if rank == 0:
                mesh.data.all_reduce(torch.ones(1)).wait()

    with (
        RankPool(3, device="cpu", timeout_s=1.0) as pool,
        pytest.raises(RankHang, match=r"Not in it: rank 1 \(") as caught,
    ):
        pool.run(half)
    assert "rank 2" not in str(caught.value).partition("\nrank ")[0]


def spin(rank):
    while rank == 1:
        pass


def test_a_rank_in_a_loop_after_the_others_returned_is_named_and_ended(capsys):
    with RankPool(2, device="cpu", limit_s=1.5, notice_s=0.4) as pool:
        with pytest.raises(
            RankHang, match=r"longer than limit_s=1\.5 s\n  rank 0: returned\n  rank 1: computing"
        ) as caught:
            pool.run(spin)
        assert caught.value.waiting == ()
        assert re.search(r"at .*test_rank_failures\.py:\d+ in spin", str(caught.value))
        assert works_again(pool)
    notice = capsys.readouterr().err
    assert "no rank has printed, sent a message, or begun or ended a collective:\n  rank 0: returned\n" in notice
    assert notice.count("shardlab: for") == 2, "after 0.4 s and 0.8 s"


def test_a_rank_that_is_ended_in_a_finalizer_says_nothing_of_it(capsys):
    class Slow:
        def __del__(self):
            current().emit("here")
            time.sleep(30)

    def interrupt(*_):
        raise KeyboardInterrupt

    with RankPool(1, device="cpu") as pool, pytest.raises(KeyboardInterrupt):
        pool.run(lambda rank: Slow() and None, on_message=interrupt)
    assert "ignored" not in capsys.readouterr().out


def test_ranks_that_do_not_come_up_in_time_are_named_and_ended(monkeypatch):
    class OneStops(RankProcesses):
        def __init__(self, config):
            super().__init__(config)
            os.kill(self.ranks[1].process.pid, signal.SIGSTOP)
            if self.ranks[1].control.poll(0.2):  # on a busy machine it was up already
                self.end(0.0)
                self.__init__(config)

    with RankPool(2, device="cpu", start_s=1.0) as pool:
        monkeypatch.setattr("shardlab.launch.pool.RankProcesses", OneStops)
        with pytest.raises(RankHang, match=r"the ranks did not come up within start_s=1 s\n  rank 0: [^\n]*") as caught:
            pool.run(abs)
        assert "rank 1: stopped by a signal" in str(caught.value)
        assert pool.pids == ()


def test_time_counts_where_a_rank_takes_no_more_than_its_pipe_holds():
    with RankPool(2, device="cpu", limit_s=2) as pool:
        pool.start()
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(RankHang, match=r"limit_s=2 s(\n.*)*rank 1: stopped by a signal"):
            pool.run(lambda rank, tensor: rank, torch.ones(1_000_000))
        assert works_again(pool)


def test_a_pool_that_another_thread_closes_during_a_call_says_so():
    def talk(rank):
        current().emit("hello")
        time.sleep(60)

    pool = RankPool(2, device="cpu")
    pool.start()
    ranks = [psutil.Process(pid) for pid in pool.pids]
    with pytest.raises(RuntimeError, match="closed during this call"):
        pool.run(talk, on_message=lambda *_: threading.Thread(target=pool.close).start())
    assert gone_within(ranks, 10)


def test_ended_ranks_run_their_finally_clauses(pools, tmp_path):
    def fail(rank):
        if rank == 0:
            time.sleep(0.3)
            raise ValueError("x")
        try:
            time.sleep(60)
        finally:
            (tmp_path / "saved").write_text("yes")

    with pytest.raises(RankError):
        pools(2).run(fail)
    assert (tmp_path / "saved").read_text() == "yes"


def test_exception_in_on_message_ends_the_run(pools):
    def refuse(rank, message):
        raise LookupError(message)

    def talk(rank):
        current().emit("hello")
        time.sleep(60)

    with pytest.raises(LookupError, match="hello"):
        pools(2).run(talk, on_message=refuse)
    assert works_again(pools(2))
