"""Rounds of random scenarios until the time is up; what fails is made small and kept."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from shardlab.launch import RankPool
from tests.fuzzing.features import ON
from tests.fuzzing.run import Scenario, Verdict, run_scenario
from tests.fuzzing.scenarios import Menu, scenarios
from tests.fuzzing.script import script_of
from tests.fuzzing.shrink import reduced

ROUND = 100  # scenarios that one seed draws
SHRINK_S = 25.0  # for Hypothesis, and as long again for the rest


class Found(AssertionError):  # noqa: N818 - nothing has gone wrong in here
    """A scenario that is neither equal nor refused as documented."""


class SmallEnough(BaseException):
    """The time to make a find small is up. No ``Exception``, after which Hypothesis would go on for minutes."""


@dataclass(frozen=True)
class HuntConfig:
    """How long, with which ranks, strategies and features; the rest as in ``tests/fuzz.py``."""

    minutes: float
    seed: int
    ranks: tuple[int, ...]
    strategies: tuple[str, ...]
    features: frozenset[str] = ON
    keep_going: bool = False
    timeout_s: float = 10.0
    device: str = "cpu"


@dataclass
class Statistics:
    """What has been done."""

    scenarios: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)

    def add(self, scenario: Scenario, verdict: Verdict) -> None:
        self.scenarios += 1
        self.strategies[scenario.engine.name] += 1
        if verdict.kind == "refused":
            self.refused[verdict.text[:70]] += 1
        for name, answer in verdict.steps:
            self.operations[f"{name} {answer.split(':')[0]}" if answer != "equal" else name] += 1


class Hunt:
    """See ``tests/fuzz.py``."""

    def __init__(self, config: HuntConfig) -> None:
        self.config, self.statistics = config, Statistics()
        self.finds: list[tuple[Scenario, Verdict]] = []
        self._pools: dict[int, RankPool] = {}
        self._known: set[tuple[str, str, str]] = set()
        self._until = time.monotonic() + 60 * config.minutes

    def run(self) -> None:
        round_ = 0
        while time.monotonic() < self._until and (self.config.keep_going or not self.finds):
            num_ranks = self.config.ranks[round_ % len(self.config.ranks)]
            self._round(num_ranks, self.config.seed + round_)
            sys.stderr.write(f"\r{self.statistics.scenarios} scenarios")
            round_ += 1

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def pool_of(self, num_ranks: int) -> RankPool:
        if num_ranks not in self._pools:
            self._pools[num_ranks] = RankPool(
                num_ranks, device=self.config.device, timeout_s=self.config.timeout_s, threads_per_rank=1,
                preload=["torch._dynamo"],
            )  # fmt: skip
        return self._pools[num_ranks]

    def _round(self, num_ranks: int, seed: int) -> None:
        menu = Menu(num_ranks, self.config.strategies, self.config.features)
        if all(name == "single" for name in menu.strategies) and num_ranks > 1:
            return
        session = _Session(self._judge, lambda: time.monotonic() > self._until, self._known)
        find = session.search(menu, seed, ROUND)
        if find is not None:
            find = session.reduced(find[0])
            self.finds.append(find)
            self._known.add(_key(*find))
            sys.stdout.write(f"\n# seed {seed}, {num_ranks} ranks\n{script_of(*find)}\n")

    def _judge(self, scenario: Scenario) -> Verdict:
        verdict = run_scenario(self.pool_of(scenario.num_ranks), scenario)
        self.statistics.add(scenario, verdict)
        return verdict

    def summary(self) -> str:
        done = self.statistics
        lines = [
            f"{done.scenarios} sequences, {sum(done.operations.values())} operations, {len(self.finds)} finds "
            f"(seed {self.config.seed})",
            "strategies: " + _counted(done.strategies),
            "operations: " + _counted(done.operations),
            f"refused: {sum(done.refused.values())} sequences",
            *(f"    {number} x {text}" for text, number in done.refused.most_common()),
            *(f"find: {scenario.engine.name}: {verdict.kind}: {verdict.text}" for scenario, verdict in self.finds),
        ]
        return "\n".join(lines) + "\n"


class _Session:
    """One seed's scenarios. Each is done once: Hypothesis asks for the same again while it shrinks."""

    def __init__(
        self, judge: Callable[[Scenario], Verdict], is_over: Callable[[], bool], known: set[tuple[str, str, str]]
    ) -> None:
        self._judge, self._is_over, self._known = judge, is_over, known
        self._seen: dict[Scenario, Verdict] = {}
        self._wanted: tuple[str, str, str] | None = None
        self._last: tuple[Scenario, Verdict] | None = None
        self._shrink_until = 0.0

    def search(self, menu: Menu, seed: int, number: int) -> tuple[Scenario, Verdict] | None:
        """The smallest find, or None."""

        @hypothesis.seed(seed)
        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(scenarios(menu))
        def check(scenario: Scenario) -> None:
            if self._fails(scenario):
                raise Found

        try:
            check()
        except (Found, SmallEnough):
            return self._last
        return None

    def reduced(self, scenario: Scenario) -> tuple[Scenario, Verdict]:
        """A find, with whatever else can be left out."""
        self._shrink_until = time.monotonic() + SHRINK_S
        with contextlib.suppress(SmallEnough):
            reduced(scenario, self._fails)
        assert self._last is not None
        return self._last

    def _fails(self, scenario: Scenario) -> bool:
        if self._wanted is not None and time.monotonic() > self._shrink_until:
            raise SmallEnough
        verdict = self._seen.get(scenario)
        if verdict is None:
            if self._wanted is None and self._is_over():
                return False
            verdict = self._seen[scenario] = self._judge(scenario)
        if not verdict.is_find or _key(scenario, verdict) in self._known:
            return False
        if self._wanted is None:
            self._wanted = _key(scenario, verdict)
            self._shrink_until = time.monotonic() + SHRINK_S
        if _key(scenario, verdict) != self._wanted:
            return False
        self._last = (scenario, verdict)
        return True


def _key(scenario: Scenario, verdict: Verdict) -> tuple[str, str, str]:
    """What finds of one fault have in common, roughly."""
    return (scenario.engine.name, *verdict.signature)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counter.most_common())
