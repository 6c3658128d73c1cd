"""Rounds of random scenarios until the time is up; what fails is made small and kept."""

import contextlib
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from shardlab.launch import RankPool
from tests.fuzzing.pipelines import pipe_scenarios
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


class Hunt:
    """With the options of ``tests/fuzz.py``."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.strategies, self.operations, self.refused = Counter[str](), Counter[str](), Counter[str]()
        self.finds: list[tuple[Scenario, Verdict]] = []
        self._pools: dict[int, RankPool] = {}
        self._known: set[tuple[str, str, str]] = set()
        self._until = time.monotonic() + 60 * options.minutes

    def run(self) -> None:
        round_ = 0
        while time.monotonic() < self._until and (self.options.keep_going or not self.finds):
            num_ranks = self.options.ranks[round_ % len(self.options.ranks)]
            self._round(num_ranks, self.options.seed + round_)
            sys.stderr.write(f"\r{self.strategies.total()} sequences")
            round_ += 1

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def pool_of(self, num_ranks: int) -> RankPool:
        if num_ranks not in self._pools:
            self._pools[num_ranks] = RankPool(
                num_ranks, device=self.options.device, timeout_s=self.options.timeout, threads_per_rank=1,
                preload=["torch._dynamo"],
            )  # fmt: skip
        return self._pools[num_ranks]

    def _round(self, num_ranks: int, seed: int) -> None:
        menu = Menu(num_ranks, self.options.strategies, self.options.features, pipes=self.options.pipes)
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
        self.strategies[scenario.engine.name] += 1
        if verdict.kind == "refused":
            self.refused[verdict.text[:70]] += 1
        for name, answer in verdict.steps:
            self.operations[f"{name} {answer.split(':')[0]}" if answer != "equal" else name] += 1
        return verdict

    def summary(self) -> str:
        done = f"{self.strategies.total()} sequences, {self.operations.total()} operations, {len(self.finds)} finds"
        lines = [
            f"{done} (seed {self.options.seed})",
            "strategies: " + _counted(self.strategies),
            "operations: " + _counted(self.operations),
            f"refused: {self.refused.total()} sequences",
            *(f"    {number} x {text}" for text, number in self.refused.most_common()),
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
            max_examples=number, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        )  # fmt: skip
        @given(pipe_scenarios(menu) if menu.pipes else scenarios(menu))
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
