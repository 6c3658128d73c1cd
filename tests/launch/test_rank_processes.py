"""No process, pipe or file of ours stays behind, whatever ends the parent."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from shardlab.launch import RankError, RankPool
from shardlab.launch.processes import hidden_main
from tests.conftest import rank_processes
from tests.launch.helpers import descendants, gone_within, scaled, script_env, start_forked, wait_for_line

# Each rank is busy in a way that is hard to end, and has a child of its own.
BUSY = """
import ctypes, os, signal, subprocess, time
import torch.distributed as dist
from shardlab.launch import launch

def work(rank):
    subprocess.Popen(["sleep", "600"])
    print("ready", flush=True)
    match rank:
        case 0: time.sleep(600)
        case 1: dist.barrier()
        case 2: os.kill(os.getpid(), signal.SIGSTOP)
        case 3: ctypes.PyDLL(None).sleep(600)  # keeps the interpreter lock

launch(work, 4, device="cpu")
"""


def ours(pool):
    return [psutil.Process(pid) for pid in pool.pids]


def test_nothing_left_after_close():
    before = set(Path(tempfile.gettempdir()).glob(f"shardlab-{os.getpid()}-*"))
    pool = RankPool(3, device="cpu")
    pool.start()
    ranks = ours(pool)
    assert len(ranks) == 3
    assert {rank.pid for rank in ranks} <= {rank.pid for rank in rank_processes()}
    pool.close()
    assert gone_within(ranks, 1)
    assert set(Path(tempfile.gettempdir()).glob(f"shardlab-{os.getpid()}-*")) <= before


def test_pool_that_nobody_holds_ends_its_ranks():
    pool = RankPool(2, device="cpu")
    pool.start()
    ranks = ours(pool)
    del pool
    gc.collect()
    assert gone_within(ranks, 2)


def test_interrupt_in_this_process_ends_ranks_and_is_raised():
    with RankPool(2, device="cpu") as pool:
        pool.start()
        ranks = ours(pool)

        def interrupt(rank):
            if rank == 0:
                os.kill(parent, signal.SIGINT)
            time.sleep(600)

        parent = os.getpid()
        with pytest.raises(KeyboardInterrupt):
            pool.run(interrupt)
        assert gone_within(ranks, 0.5)
        assert pool.run(lambda rank: rank) == [0, 1]


def start_busy_script(start_script):
    script = start_script(BUSY)
    for _ in range(4):
        wait_for_line(script, "ready")
    time.sleep(0.3)
    return script


@pytest.mark.parametrize("end", ["terminated", "its forkserver first", "its group"])
def test_parent_killed(start_script, tmp_path, monkeypatch, end):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = start_busy_script(start_script)
    family = descendants(script.pid)
    assert len(family) == 10  # forkserver, resource tracker, four ranks, their four children
    assert list(tmp_path.glob("shardlab-*"))
    # At shutdown ipykernel ends all of its group, and waits for those that ignore it until Jupyter ends the kernel.
    assert script.pid not in {os.getpgid(one.pid) for one in family if one.name() != "sleep"}
    [server] = [one for one in family if one.ppid() == script.pid and one.children()]
    if end == "its forkserver first":  # as when a signal to a process group, or the OOM killer, comes to it first
        server.kill()
    if end == "its group":  # as Jupyter does at restart, here just after a rank was killed, which has a child
        server.children()[0].kill()
        os.killpg(script.pid, signal.SIGKILL)
    else:
        script.send_signal(signal.SIGTERM if end == "terminated" else signal.SIGKILL)
    script.wait()
    assert gone_within(family, 20)
    assert end == "its forkserver first" or not list(tmp_path.glob("shardlab-*"))  # which it would have removed


def test_interrupted_from_the_terminal(start_script):
    script = start_busy_script(start_script)
    family = descendants(script.pid)
    ranks = [process for process in family if process.ppid() != script.pid]
    assert len(ranks) == 8
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert gone_within(ranks, 2)
    output, _ = script.communicate(timeout=20)
    assert gone_within(family, 2)
    assert "KeyboardInterrupt" in output


def test_forkserver_killed(start_script):
    text = """
        import multiprocessing, subprocess, time
        from shardlab.launch import RankPool
        def start_children(rank):
            # The first a fork, as a worker of a data loader is, the second another program.
            multiprocessing.Process(target=time.sleep, args=(600,)).start()
            subprocess.Popen(["sleep", "600"])
        with RankPool(2, device="cpu") as pool:
            pool.run(start_children)
            print("ready", flush=True)
            time.sleep(2.5)
            print(pool.run(lambda rank: rank))
    """
    script = start_script(textwrap.dedent(text))
    wait_for_line(script, "ready")
    [server] = [one for one in descendants(script.pid) if one.ppid() == script.pid and one.children()]
    ranks = server.children(recursive=True)
    assert len(ranks) == 6
    server.kill()
    assert gone_within(ranks, 2)
    output, _ = script.communicate(timeout=20)
    assert output == "[0, 1]\n"


def test_interrupt_while_the_ranks_start(start_script):
    text = "from shardlab.launch import RankPool\nprint('ready', flush=True)\nRankPool(4, device='cpu').start()"
    script = start_script(text)
    wait_for_line(script, "ready")
    time.sleep(0.5)
    family = descendants(script.pid)
    os.killpg(script.pid, signal.SIGINT)
    output, _ = script.communicate(timeout=20)
    assert gone_within(family, 5)
    assert "KeyboardInterrupt" in output
    assert output.count("Traceback") == 1  # the parent's; the forkserver has nothing to say


def test_forgotten_pool_does_not_keep_the_script_from_ending():
    # The finalizer makes weakref's exit function the first registered, that is the last to run: too late for ranks.
    text = """
        import weakref
        holder = weakref.WeakSet()
        finalizer = weakref.finalize(holder, int)
        from shardlab.launch import RankPool
        pool = RankPool(2, device="cpu")
        print(pool.run(lambda rank: rank))
    """
    done = subprocess.run(  # from standard input, where it has no file
        [sys.executable], input=textwrap.dedent(text), capture_output=True, text=True, env=script_env(), timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1]\n", "", 0)


def test_two_threads_that_start_ranks_at_once_keep_the_script_s_main():
    """Without it the ranks run the script again."""
    main, entered, may_leave = sys.modules["__main__"], threading.Event(), threading.Event()

    def other():
        with hidden_main():
            entered.set()
            may_leave.wait(60)

    thread = threading.Thread(target=other)
    with hidden_main():
        thread.start()
        entered.wait(0.2)
    may_leave.set()
    thread.join(60)
    assert sys.modules["__main__"] is main


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of Python 3.12
def test_a_fork_of_this_process_is_told_that_it_cannot_start_ranks(pools):
    pool = pools(2)
    assert pool.run(scaled) == [0, 2]
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            pool.run(scaled)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 4096).startswith(b"RuntimeError: RankPool: this process is a fork of one that has started")
    for end in read, write:
        os.close(end)
    assert pool.run(scaled) == [0, 2]


def test_script_without_a_guard_is_run_once(tmp_path):
    text = """
        print("top of the script")
        from dataclasses import dataclass
        from shardlab.launch import launch

        @dataclass
        class Shard:
            rank: int

        def shard(rank):
            print("here")
            return Shard(rank)

        result = launch(shard, 2, device="cpu")
        print(result == [Shard(0), Shard(1)])
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    script = start_forked(tmp_path / "script.py", cwd=tmp_path, output=tmp_path / "printed.txt")
    script.join(60)
    first, *lines, last = (tmp_path / "printed.txt").read_text().splitlines()
    assert (first, last, script.exitcode) == ("top of the script", "True", 0)
    assert sorted(lines) == ["[rank 0] here", "[rank 1] here"]


def test_descriptors_and_children_stay_constant_over_many_pools():
    def figures():
        gc.collect()
        return psutil.Process().num_fds(), psutil.Process().num_threads()

    for _ in range(2):  # the forkserver and its pipes stay
        RankPool(2, device="cpu").start()
    before = figures()
    for turn in range(6):
        with RankPool(2, device="cpu") as pool:
            pool.start()
            ranks = ours(pool)
            if turn % 3 == 0:
                with pytest.raises(RankError):
                    pool.run(lambda rank: 1 / 0)
        assert gone_within(ranks, 1)
    assert figures() == before


def start_children(rank):
    return [subprocess.Popen(["sleep", "60"], start_new_session=session).pid for session in (False, True)]


def test_ranks_and_what_they_have_started_end_with_an_error_and_with_the_pool():
    with RankPool(2, device="cpu") as pool:
        family = [psutil.Process(pid) for pids in pool.run(start_children) for pid in pids] + ours(pool)
        with pytest.raises(RankError):
            pool.run(lambda rank: 1 / 0)
        assert gone_within(family, 5)
        family = [psutil.Process(pid) for pids in pool.run(start_children) for pid in pids] + ours(pool)
    assert gone_within(family, 5)
