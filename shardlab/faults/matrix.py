"""Every fault under every strategy: what the user is told, how soon, and what is left.

Each case trains on real ranks (``program.py``) with one fault. It ends well in one of two ways: the run is right, or
the user is told; best with the rank. Afterwards the same pool must train as before, and this process must have as many
child processes, temporary folders and open files as before.

NaN makes no loop fail. Its cases run through ``compare``, which says so under its table.
"""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep

import psutil

from shardlab import engines
from shardlab.experiment import compare
from shardlab.experiment.comparison import PRELOAD
from shardlab.experiment.run_verdicts import verdicts
from shardlab.faults.inject import Happened
from shardlab.faults.kinds import (
    AtCollective,
    DeadRank,
    Fault,
    LossyLink,
    MismatchedCollective,
    NaN,
    OutOfMemory,
    SkippedCall,
    SkippedCollective,
    SlowLink,
    StoppedRank,
    Straggler,
)
from shardlab.faults.program import STEPS, train, workload
from shardlab.field_types import check_types
from shardlab.launch import RankError, RankHang, RankPool
from shardlab.launch.checks import check_ranks
from shardlab.launch.placement import torchrun_env
from shardlab.vocabulary import Collective, Phase

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")
QUICK_STRATEGIES = ("bucketed", "fsdp")
UNFIT = {
    "single": "has one process, of which nothing is distributed",
    "torch_tp": "needs a tensor axis, and there is none here",
}
KINDS = (
    Straggler, SlowLink, LossyLink, DeadRank, StoppedRank, OutOfMemory, SkippedCall, SkippedCollective,
    MismatchedCollective, NaN,
)  # fmt: skip
TIMEOUT_S = 2.0  # in one collective
_LIMIT_S = 30.0
_GONE_S = 3.0  # for processes that were killed to disappear
_STEP = 1
_GATHERS_IN_FORWARD = ("fsdp",)  # ZeRO-3 gathers before the module's forward
_LINES = re.compile(r"\b(program|mlp)\.py\W.*\d")  # of the training loop and of its model


class Outcome(StrEnum):
    """How a case ended for the user, the best first."""

    RIGHT = "right"
    NAMED = "rank named"
    TOLD = "told"
    SILENT = "SILENT"


@dataclass(frozen=True)
class MatrixConfig:
    """What to run.

    Attributes:
        strategies: names from ``engines.STRATEGIES``, without those of ``UNFIT``.
        ranks: number of ranks, at least 3: of two that differ nobody can say which is wrong.
        transport: see ``Mesh``.
        quick: only faults in the backward.
        timeout_s: of the pool; a hang takes so long until it is told. More than ranks wait for each other without a
            fault, on a machine that has other work too.
        device: see ``RankPool``.

    Raises:
        ValueError: a field has a value it cannot have; the message names it.
    """

    strategies: tuple[str, ...] = STRATEGIES
    ranks: int = 3
    transport: str | None = None
    quick: bool = False
    timeout_s: float = TIMEOUT_S
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check before a rank starts."""
        check_types(self, besides=("strategies",))
        for strategy in self.strategies:
            if strategy in UNFIT:
                raise ValueError(f"strategies: {strategy!r} {UNFIT[strategy]}; leave it out")
            if strategy not in engines.STRATEGIES:
                allowed = ", ".join(name for name in engines.STRATEGIES if name not in UNFIT)
                raise ValueError(f"strategies: {strategy!r} is not one of {allowed}")
        if len(set(self.strategies)) != len(self.strategies) or not self.strategies:
            given = ", ".join(self.strategies) or "none"
            raise ValueError(f"strategies: {given}; at least one is needed, and each only once")
        if torchrun_env() is not None:
            raise ValueError("ranks: torchrun has started them, and it ends them all once one is killed; run it alone")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not above 0")
        if self.ranks < 3:
            raise ValueError(f"ranks: {self.ranks} is below 3; of two ranks that differ nobody can say which is wrong")
        check_ranks(self.ranks, self.device, self.strategies, self.transport)

    @property
    def cases(self) -> list[tuple[str, Fault]]:
        """Strategies and faults, in the order of the runs."""
        return [(strategy, fault) for strategy in self.strategies for fault in self._faults(strategy)]

    def _faults(self, strategy: str) -> Iterator[Fault]:
        for kind in KINDS:
            for phase in kind.phases:
                if _is_possible(kind, phase, strategy) and (phase == Phase.BACKWARD or not self.quick):
                    yield kind(rank=1, step=_STEP, phase=phase)
            if kind in (DeadRank, StoppedRank) and not self.quick:
                yield kind(rank=0, step=_STEP)  # the rank from which parameters are broadcast


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        fault: its kind.
        phase, rank, strategy: where.
        outcome: for the user.
        error: class of the exception that was raised; empty for none.
        names_collective: whether what was said names a collective.
        names_line: whether it names a line of the training loop or of the model.
        told_s: seconds from the fault to the exception; None where a sentence at the end of the run tells.
        usable: whether the pool trains as before.
        left: what is left behind, in words.
        said: all that the user is told.
    """

    fault: str
    phase: str
    rank: int
    strategy: str
    outcome: Outcome
    error: str
    names_collective: bool
    names_line: bool
    told_s: float | None
    usable: bool
    left: str
    said: str

    @property
    def is_good(self) -> bool:
        """Whether the run was right or the user was told, the pool is usable, and nothing is left."""
        return self.outcome != Outcome.SILENT and self.usable and not self.left


def matrix(config: MatrixConfig, on_row: Callable[[Row], None] | None = None) -> list[Row]:
    """Run all cases.

    Args:
        config: which.
        on_row: called with each row as soon as it is known.
    """
    rows = []
    with RankPool(
        config.ranks, device=config.device, timeout_s=config.timeout_s, limit_s=_LIMIT_S + config.timeout_s,
        notice_s=None, threads_per_rank=1, preload=PRELOAD,
    ) as pool:  # fmt: skip
        runs = {strategy: _Runs(strategy, config.transport, pool) for strategy in config.strategies}
        for strategy, fault in config.cases:
            rows.append(runs[strategy].row(fault))
            if on_row is not None:
                on_row(rows[-1])
    return rows


@dataclass(frozen=True)
class _Heard:
    """The outcome of a run: its losses, or the message that the user got, and how long after the fault.

    ``blamed`` is the part of the message that names the rank at fault, without the list of all waiting ranks.
    """

    losses: list[list[float]] | None = None
    error: str = ""
    said: str = ""
    blamed: str = ""
    told_s: float | None = None


@dataclass
class _Runs:
    """Runs of one strategy, compared with the one that has no fault."""

    strategy: str
    transport: str | None
    pool: RankPool
    right: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.right = self._without_fault()
        self._compare(())  # what it imports, and the files that stays open for, belong to no fault

    def row(self, fault: Fault) -> Row:
        """Run one case and look at what is left."""
        before = _belongings()
        # gloo ends a process that receives more than it has room for, and that prints the stacks of all its threads.
        with contextlib.redirect_stdout(io.StringIO()):
            heard = self._compare((fault,)) if isinstance(fault, NaN) else self._train(fault)
        # Before what is left is counted: the pool has its ranks again, so one that was left is one too many.
        usable = self._without_fault() == self.right
        return Row(
            fault=type(fault).__name__, phase=str(fault.phase), rank=fault.rank, strategy=self.strategy,
            outcome=self._outcome(fault, heard), error=heard.error,
            names_collective=any(verb in heard.said for verb in Collective),
            names_line=_LINES.search(heard.said) is not None,
            told_s=heard.told_s, usable=usable, left=_left(before), said=heard.said,
        )  # fmt: skip

    def _without_fault(self) -> list[list[float]]:
        try:
            return self.pool.run(train, self.strategy, self.transport, ())
        except RankHang as error:
            waited = str(error).partition("\n")[0]
            raise ValueError(
                f"timeout_s: {self.pool.timeout_s:g} is too short for this machine, as busy as it is; give more. Under "
                f"{self.strategy} without a fault, {waited}"
            ) from error

    def _outcome(self, fault: Fault, heard: _Heard) -> Outcome:
        if not heard.said:
            return Outcome.RIGHT if heard.losses == self.right else Outcome.SILENT
        return Outcome.NAMED if re.search(rf"\brank {fault.rank}\b", heard.blamed) else Outcome.TOLD

    def _train(self, fault: Fault) -> _Heard:
        happened_ns: list[int] = []

        def on_message(_: int, message: object) -> None:
            if isinstance(message, Happened):
                happened_ns.append(message.time_ns)

        try:
            losses = self.pool.run(train, self.strategy, self.transport, (fault,), on_message=on_message)
        except (RankError, RankHang) as error:
            if not happened_ns:
                raise  # the fault had not happened yet, so the error has another cause
            told_s = (perf_counter_ns() - happened_ns[0]) / 1e9
            return _Heard(None, type(error).__name__, str(error), _blame(fault, error), told_s)
        return _Heard(losses)

    def _compare(self, faults: Sequence[Fault]) -> _Heard:
        with tempfile.TemporaryDirectory() as directory:
            comparison = compare(
                workload(faults), directory, pool=self.pool, strategies=self.strategy, ranks=self.pool.world_size,
                steps=STEPS, transport=self.transport,
            )  # fmt: skip
            said = [sentence for sentence in verdicts(comparison) if "NOT" in sentence or "DISAGREE" in sentence]
        return _Heard(said=" ".join(said), blamed=" ".join(said))


def _blame(fault: Fault, error: RankError | RankHang) -> str:
    first_line = str(error).partition("\n")[0]
    # The rank that is reported is at fault if it died or ran out of memory; if a collective fails, any rank may raise.
    if isinstance(fault, DeadRank | OutOfMemory):
        return first_line
    return first_line.partition(". " if isinstance(error, RankHang) else ": ")[2]


def _is_possible(kind: type[Fault], phase: Phase, strategy: str) -> bool:
    if kind in (SlowLink, LossyLink):
        return phase == Phase.BACKWARD and not strategy.startswith("torch_")
    if issubclass(kind, AtCollective):
        return not strategy.startswith("torch_") and (phase != Phase.FORWARD or strategy in _GATHERS_IN_FORWARD)
    return True


def _belongings() -> dict[str, int]:
    """What this process has: processes below it, folders of its pools, open files."""
    own = psutil.Process()
    running = [child for child in own.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    folders = Path(tempfile.gettempdir()).glob(f"shardlab-{os.getpid()}-*")
    return {"processes": len(running), "folders": len(list(folders)), "open files": own.num_fds()}


def _left(before: dict[str, int]) -> str:
    """What there is more of than before, in words; empty if nothing is."""
    deadline = monotonic() + _GONE_S
    while more := {name: number - before[name] for name, number in _belongings().items() if number > before[name]}:
        if monotonic() > deadline:
            return ", ".join(f"{number} {name}" for name, number in more.items())
        sleep(0.05)
    return ""
