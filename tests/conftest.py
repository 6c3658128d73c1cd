"""One warm pool per world size for the whole session, and a look at the end whether a rank is left."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from shardlab.launch import RankPool

# Before torch is imported, here and in all that tests start. Several processes of tests share the cores, and by default
# the threads of one operation spin while they wait for each other: beside another test one took 31 s, this way 3.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

Pools = Callable[[int], "RankPool"]

# What each rank would import: with any optimizer, with a table, with a function of a test, with a strategy, and the
# text of the grammar, an exercise. What is imported before the fork is also never searched for cycles after a call.
PRELOAD = [
    "torch._dynamo", "pandas", "pytest", "shardlab.experiment.run.rank_run", "shardlab.recording.record",
    "shardlab.same.process", "shardlab.course.exercises.ladder", "shardlab.testing.check", "tests.drawn_grammar",
]  # fmt: skip


gc.disable()  # until all is imported: it stays, so searching it for cycles meanwhile finds none


def pytest_collection_finish() -> None:
    """What was imported stays: searching it for tensors took a tenth of a second in each step without values."""
    gc.freeze()
    gc.enable()


def rank_processes() -> list[psutil.Process]:
    """Ranks of this process: what its forkserver has forked."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    servers = [child for child in children if "multiprocessing.forkserver" in " ".join(child.cmdline())]
    return [rank for server in servers for rank in server.children(recursive=True)]


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """A shell starts its background jobs with SIGINT ignored, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked_with_imports(request: pytest.FixtureRequest, _interrupts_are_heard: None) -> None:
    """From one server, whichever test is the first that asks for ranks."""
    if any("pools" in getattr(item, "fixturenames", ()) for item in request.session.items):
        from shardlab.launch import processes

        processes._forkserver(PRELOAD)


@pytest.fixture(scope="session", autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    _, left = psutil.wait_procs(rank_processes(), timeout=5)
    assert not left, f"ranks left behind: {left}"


@pytest.fixture(scope="session")
def pools(_no_rank_is_left: None) -> Iterator[Pools]:
    """``pools(world_size)`` is a warm RankPool on CPU; after a test that broke it, it starts fresh ranks by itself."""
    from shardlab.launch import RankPool

    warm: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in warm:
            warm[world_size] = RankPool(world_size, device="cpu", timeout_s=30.0)
        return warm[world_size]

    yield pool_of
    for pool in warm.values():
        pool.close()
