"""Functions go to ranks, results come back."""

import functools
import multiprocessing
import os
import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardlab.comm.mesh import Mesh
from shardlab.comm.signed_messages import all_gather_bytes
from shardlab.engines import build_engine
from shardlab.launch import RankError, RankPool, current, launch
from tests.launch.helpers import scaled

OFFSET = 100
LOCK = threading.Lock()  # cannot be pickled: functions that use it have to go by name


@dataclass
class Point:
    x: int


def by_module_code(rank: int, point: Point) -> Point:
    return Point(point.x + scaled(rank) + OFFSET)


def with_lock(rank: int) -> int:
    with LOCK:
        return rank


def test_arguments_closures_partials_and_code_of_a_module_travel(pools, monkeypatch):
    base, pool = 5, pools(2)

    def add(rank, a, *, b):
        return base + rank + a + b

    assert pool.run(add, 1, b=2) == [8, 9]
    assert pool.run(functools.partial(add, b=3), 1) == [9, 10]
    assert pool.run(by_module_code, Point(1)) == [Point(101), Point(103)]
    assert pool.run(with_lock) == [0, 1]
    monkeypatch.setattr("tests.launch.test_rank_pool.OFFSET", 200)  # a warm rank runs the code as it is now
    assert pool.run(by_module_code, Point(1)) == [Point(201), Point(203)]


def test_ranks_are_in_one_group(pools):
    def total(rank):
        x = torch.full((3,), float(rank + 1))
        dist.all_reduce(x)
        return x.tolist(), dist.get_rank(), dist.get_world_size(), all_gather_bytes(b"x" * rank)

    assert pools(3).run(total) == [([6.0] * 3, rank, 3, [b"", b"x", b"xx"]) for rank in range(3)]


def test_ranks_stay_warm_and_restart_on_demand():
    with RankPool(2, device="cpu", threads_per_rank=3) as pool:
        assert pool.pids == ()
        assert pool.run(lambda rank: torch.get_num_threads()) == [3, 3]
        first = pool.run(lambda rank: os.getpid())
        assert pool.run(lambda rank: os.getpid()) == first == list(pool.pids)
        pool.restart()
        assert not set(pool.run(lambda rank: os.getpid())) & set(first)


def test_every_rank_of_every_pool_draws_numbers_of_its_own(pools):
    """Ranks are forked from one process, whose random state they must not keep."""

    def draw(rank):
        return torch.rand(1).item(), np.random.rand(), random.random()

    pools(2).start()  # first: it says what the forkserver preloads, and numpy.random is among it
    for drawn in zip(*launch(draw, 2, device="cpu"), *launch(draw, 2, device="cpu"), strict=True):
        assert len(set(drawn)) == 4


def test_emit_reaches_the_parent_in_order(pools):
    def count(rank):
        for i in range(5):
            current().emit((rank, i))

    seen = []
    pools(2).run(count, on_message=lambda rank, message: seen.append((rank, message)))
    for rank in range(2):
        assert [message for sender, message in seen if sender == rank] == [(rank, i) for i in range(5)]


def test_the_environment_is_the_parents_at_start_and_the_folder_that_of_each_call(monkeypatch, tmp_path):
    """Else what a warm pool's ranks write to a relative path is not where the parent then looks for it."""
    monkeypatch.setenv("SHARDLAB_TEST", "now")
    with RankPool(1, device="cpu") as pool:
        for folder in (tmp_path, tmp_path.parent):
            monkeypatch.chdir(folder)
            assert pool.run(lambda rank: (os.environ["SHARDLAB_TEST"], str(Path.cwd()))) == [("now", str(folder))]
        torch.set_default_dtype(torch.float64)
        try:
            assert pool.run(lambda rank: torch.ones(1).dtype) == [torch.float64]  # as planned in this process
        finally:
            torch.set_default_dtype(torch.float32)
        assert pool.run(lambda rank: torch.ones(1).dtype) == [torch.float32]


def test_loader_with_workers_reads_what_a_cell_defines(pools):
    class Points(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, place):
            return place, current().rank

    def pairs(rank):
        assert multiprocessing.Lock()._semlock.name is None, "what has a name stays in /dev/shm when the rank is killed"
        loader = DataLoader(Points(), 2, num_workers=2, collate_fn=lambda samples: list(samples))
        return [sample for batch in loader for sample in batch]

    expected = [[(place, rank) for place in range(6)] for rank in range(2)]
    assert pools(2).run(pairs) == expected


def test_child_of_a_fork_neither_answers_nor_takes_a_call(pools):
    def fork(rank, leave):
        pid = os.fork()
        return leave() if pid == 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    leaves = {lambda: "child": 0, lambda: sys.exit(3): 1, lambda: 1 / 0: 1, lambda: current().emit(1): 1}
    for leave, status in leaves.items():
        assert pools(2).run(fork, leave) == [status] * 2
        assert [pools(2).run(lambda rank: os.getpid()) for _ in range(2)] == [list(pools(2).pids)] * 2


def test_after_the_group_is_destroyed_calls_go_on_and_a_mesh_says_why_not():
    def destroy(rank):
        Mesh({"data": 2})
        dist.destroy_process_group()

    with RankPool(2, device="cpu") as pool:
        pool.run(destroy)
        assert pool.run(lambda rank: rank) == [0, 1]
        with pytest.raises(RankError, match=r"RuntimeError: Mesh: dist\.destroy_process_group\(\) has destroyed"):
            pool.run(destroy)
        pool.run(destroy)


def test_what_cannot_be_pickled_is_named(pools):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pools(2).run(lambda rank, lock: None, threading.Lock())
    with pytest.raises(RankError, match="the result of rank 1 cannot be pickled") as caught:
        pools(2).run(lambda rank: threading.Lock() if rank else None)
    assert caught.value.exception_type == "TypeError"
    with pytest.raises(TypeError, match=r"result of rank 0 was pickled and cannot be unpickled \(TypeError: .*'text'"):
        pools(2).run(lambda rank: NeedsTwo(1, 2))
    assert pools(2).run(lambda rank: rank) == [0, 1]


class NeedsTwo(Exception):  # noqa: N818
    """An exception is made again from its ``args``."""

    def __init__(self, code, text):
        super().__init__(text)


def test_bad_input_names_the_field():
    for field, value in (
        ("world_size", 0), ("timeout_s", 0), ("timeout_s", float("nan")), ("timeout_s", 1e15), ("limit_s", 0),
        ("notice_s", "soon"), ("threads_per_rank", 1.5), ("threads_per_rank", 0), ("device", "tpu"),
        ("preload", "pandas"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=field):
            RankPool(**{"world_size": 2, field: value})


def test_closed_pool_says_so():
    pool = RankPool(1, device="cpu")
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(lambda rank: rank)


def test_a_pool_in_a_rank_and_a_run_in_a_run_are_refused(pools):
    pool = pools(2)
    with pytest.raises(RankError, match="ranks cannot start ranks"):
        pool.run(lambda rank: RankPool(2))
    with pytest.raises(RuntimeError, match="one at a time"):
        pool.run(lambda rank: current().emit(1), on_message=lambda rank, message: pool.run(lambda rank: rank))
    assert pool.run(lambda rank: rank) == [0, 1]


class SlowToPickle:
    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __reduce__(self):
        self.begun.set()
        assert self.may_end.wait(60)
        return int, ()


def test_a_second_thread_is_refused_from_the_first_moment_of_a_call(pools):
    pool, slow, results = pools(2), SlowToPickle(), []
    thread = threading.Thread(target=lambda: results.append(pool.run(lambda rank, _: rank, slow)))
    thread.start()
    assert slow.begun.wait(60)
    for call in (lambda: pool.run(abs), pool.start, pool.restart):
        with pytest.raises(RuntimeError, match="one at a time"):
            call()
    slow.may_end.set()
    thread.join()
    assert results == [[0, 1]]


def test_engines_and_meshes_that_nobody_closed_keep_no_descriptor_in_the_next_call(pools):
    def descriptors(rank):
        return len(list(Path("/proc/self/fd").iterdir()))

    def build(rank):
        for _ in range(6):
            mesh = Mesh({"data": 2})
            build_engine("zero1", nn.Linear(4, 4), lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh)

    pools(2).run(build)  # what torch opens once
    before = pools(2).run(descriptors)
    pools(2).run(build)
    assert pools(2).run(descriptors) == before
