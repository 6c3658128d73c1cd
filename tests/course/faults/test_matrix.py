"""Every kind of fault: what the user is told of it, and that the pool trains as before and nothing is left behind."""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from shardlab.experiment.comparison import PRELOAD

from shardlab.course import (  # isort: skip
    DeadRank, Fault, Happened, LossyLink, MismatchedCollective, OutOfMemory, SkippedCall, SkippedCollective, SlowLink,
    StoppedRank, Straggler,
)  # fmt: skip
from shardlab.launch import RankDied, RankError, RankHang, RankPool
from shardlab.vocabulary import Collective
from tests.course.faults.program import train


@dataclass(frozen=True)
class Told:
    """By which exception the user is told, after which words comes the rank at fault, and what else is named."""

    error: type[Exception]
    rank_after: str
    collective: bool
    line: bool


RIGHT = "the losses of a run without the fault"
DEAD, HANGS = Told(RankDied, "^", True, True), Told(RankHang, r"\. ", True, True)
RAISED, DIFFERS = Told(RankError, "^", False, True), Told(RankError, ": ", True, True)
SKIPPED = Told(RankError, ": ", False, True)
OF_RANK_1 = {
    Straggler: RIGHT, SlowLink: RIGHT, LossyLink: RIGHT, DeadRank: DEAD, StoppedRank: HANGS, OutOfMemory: RAISED,
    SkippedCall: SKIPPED, SkippedCollective: DIFFERS, MismatchedCollective: DIFFERS,
}  # fmt: skip
CASES = [
    *((kind(1, 1), told) for kind, told in OF_RANK_1.items()),
    (DeadRank(0, 1), DEAD),  # the rank from which parameters are broadcast
]


@pytest.fixture(scope="module")
def pool():
    with RankPool(
        3, device="cpu", timeout_s=3.0, limit_s=30.0, notice_s=None, threads_per_rank=1, preload=PRELOAD
    ) as made:  # of two ranks that differ nobody can say which is wrong
        yield made


@pytest.fixture(scope="module")
def right(pool):
    return pool.run(train, "bucketed", None, ())


@pytest.mark.parametrize(("fault", "told"), CASES, ids=lambda value: str(value) if isinstance(value, Fault) else "")
def test_the_user_is_told_and_nothing_is_left(pool, right, fault, told):
    before, happened = belongings(), []
    if told is RIGHT:
        assert pool.run(train, "bucketed", None, [fault]) == right
    else:
        with pytest.raises(told.error) as caught:
            pool.run(train, "bucketed", None, [fault], on_message=lambda _, message: happened.append(message))
        check(told, fault, caught.value, happened)
    # Before what is left is counted: the pool has its ranks again, so one that was left is one too many.
    assert pool.run(train, "bucketed", None, ()) == right
    assert not left(before)


def check(told, fault, error, happened):
    assert type(error) is told.error, error
    assert [type(message) for message in happened] == [Happened], "the error comes of the fault"
    said = str(error)
    assert re.search(rf"{told.rank_after}.*\brank {fault.rank}\b", said.partition("\n")[0]), said
    assert any(verb in said for verb in Collective) == told.collective, said
    assert bool(re.search(r"\b(program|mlp)\.py\W.*\d", said)) == told.line, said
    if told is HANGS:
        assert "for more than timeout_s=3 s" in said


def test_what_ranks_print_as_they_die_is_not_shown(pool, right, capsys):
    """gloo ends a process that receives more than it has room for, and that prints the stacks of all its threads."""
    with pytest.raises(RankDied):
        pool.run(train, "bucketed", "gloo", [SkippedCollective(1, 1, "step")])
    assert pool.run(train, "bucketed", None, ()) == right
    assert "rank 1" not in capsys.readouterr().out


def belongings():
    """What this process has: processes below it, folders of its pools, open files."""
    own = psutil.Process()
    running = [child for child in own.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    folders = Path(tempfile.gettempdir()).glob(f"shardlab-{os.getpid()}-*")
    return {"processes": len(running), "folders": len(list(folders)), "open files": own.num_fds()}


def left(before):
    """What there is more of than before; processes that were killed have three seconds to disappear."""
    deadline = monotonic() + 3.0
    while more := {name: number - before[name] for name, number in belongings().items() if number > before[name]}:
        if monotonic() > deadline:
            return more
        sleep(0.05)
    return {}
