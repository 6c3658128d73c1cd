r"""Strategies of your own beside ours and torch's: what each is worth, in points that a sentence explains.

    scores = score({MyBuckets: "bucketed", SixteenBits: "bucketed"})     # your class, and which of ours it is beside
    scores.table
    print(*scores.said(), sep="\n")
    print(scores.gained("my_buckets", "sixteen_bits"))

Whether a strategy is right, ``check_strategy`` says, and then one ``compare`` of all: it counts the bytes too. What of
messages is exposed is played on the virtual clock of the lessons (``on_a_clock``), on the engine itself: one rank takes
two steps without values. So no number here depends on the machine. Torch's own engines cannot be played.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.comm.events import CollectiveEvent
from shardlab.course.exercises.weighing import NUM_LOOPS
from shardlab.course.on_a_clock import two_steps
from shardlab.engines import Strategy
from shardlab.experiment.comparison import compare
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.directory import new_directory
from shardlab.experiment.told.saved_runs import Comparison
from shardlab.launch import RankError, RankHang, RankPool
from shardlab.partition.ring_cost import Link
from shardlab.planner.setup import STRATEGIES
from shardlab.records.store import Records
from shardlab.testing import check_strategy
from shardlab.testing.loops import LOOPS

LINK = "1Gbps,50us"  # backward of the built-in GPT can hide about a third of its gradients
TORCHS = {"ddp": "torch_ddp", "bucketed": "torch_ddp", "zero1": "torch_zero1", "fsdp": "torch_fsdp2"}
ENOUGH = 1.01  # times what ours takes: padding costs no point
# Columns of bytes and of time in the table, and their words in a sentence.
COSTS = {"at rest (MB)": "at rest", "peak (MB)": "at the peak", "sent (MB)": "sent", "exposed (ms)": "exposed"}
FULL_MARKS = 1 + len(COSTS)

Make = Callable[[], Strategy]


@dataclass(frozen=True)
class Scores:
    """What strategies are worth.

    Attributes:
        table: a row for each that was run, by name: whether it is right, MB on the rank that holds or sends most, ms of
            a step that are exposed on the virtual clock (missing where it cannot be played), and points of your own.
        comparison: the run behind it.
        played: the records of each on the virtual clock; its second step is what counts.
        against: of your own, which of ours each is measured against.
        wrong: of those that are not right, what differs first.
    """

    table: pd.DataFrame
    comparison: Comparison
    played: Mapping[str, Records]
    against: Mapping[str, str]
    wrong: Mapping[str, str]

    def said(self) -> list[str]:
        """A sentence for each of your own: its points, and where it loses one."""
        return [self._said(name, ours) for name, ours in self.against.items()]

    def _said(self, name: str, ours: str) -> str:
        if name in self.wrong:
            return f"{name}: 0 of {FULL_MARKS} points, it is not right: {self.wrong[name]}"
        theirs, row = _row(self.table, ours), _row(self.table, name)
        lost = _more(theirs, row)
        whys = (
            f"{_told(row, column)}, where {ours} takes {theirs[column]:.4g}"
            if pd.notna(row[column]) and pd.notna(theirs[column])
            else f"what is {COSTS[column]} is not known of both: a step of one cannot be played without values"
            for column in lost
        )
        return "; ".join([f"{name}: {FULL_MARKS - len(lost)} of {FULL_MARKS} points", *whys])

    def gained(self, before: str, after: str) -> str:
        """A sentence on what a change has gained, and what it has cost.

        Args:
            before: a strategy of the table.
            after: the one with the change.
        """
        one, other = _row(self.table, before), _row(self.table, after)
        known = [column for column in COSTS if pd.notna(one[column]) and pd.notna(other[column])]
        changed = [column for column in known if column in {*_more(one, other), *_more(other, one)}]
        parts = [
            f"{_told(other, column)} and not {one[column]:.4g}"
            + (f" ({other[column] / one[column] - 1:+.0%})" if one[column] else "")
            for column in changed
        ]
        same = [COSTS[column] for column in known if column not in changed]
        return "; ".join([
            f"{after} instead of {before}: {', '.join(parts) or 'no number changes'}",
            *([f"the same {' and '.join(same)}"] if parts and same else []),
            *(["it rounds"] if (one["right"], other["right"]) == ("yes", "rounds") else []),
        ])  # fmt: skip


def score(
    own: Mapping[Make, str], directory: Path | None = None, *, link: str = LINK, inside: str = "", pool: RankPool | None
    = None, **options: Any,
) -> Scores:  # fmt: skip
    """Train your strategies beside ours and torch's, and say what each is worth.

    What is right has a point, and one more for each of four costs that is no higher than that of the strategy of ours
    beside it: bytes at rest, at the peak and sent, and time exposed. What is not right has none, and is not run. One
    that ``rounds`` is judged by its losses alone: ``check_strategy`` says more of it, unrounded.

    Args:
        own: by class, or by a function that makes one, the name of the strategy that it is beside.
        directory: of the records; by default runs/DATE.
        link: of the virtual clock: bandwidth and latency.
        inside: the same inside a host, which is where the inner of two groups sends; by default ``link``.
        pool: ranks that are there.
        options: other fields of ``CompareConfig``.

    Raises:
        ValueError: a strategy is beside none of ours, two have one name, or an option has an invalid value.
    """
    known = STRATEGIES[1:]
    if unknown := [name for name in own.values() if name not in known]:
        raise ValueError(f"own: {unknown[0]!r} is no strategy to be beside; take one of {', '.join(known)}")
    links = Link.parse(link), Link.parse(inside or link)
    ours = [name for name in known if name in own.values()]
    torchs = dict.fromkeys(TORCHS[name] for name in ours if name in TORCHS)
    made = {make: make() for make in own}
    mine: list[Any] = [*made.values()]
    beside: list[Any] = ["single", *ours, *torchs]
    config = CompareConfig(strategies=(*beside, *mine), **options)
    against = {strategy.name: own[make] for make, strategy in made.items()}
    wrong = {one.name: said for make, one in made.items() if (said := _wrong(make, one, own[make], config.ranks))}
    right = [one for one in mine if one.name not in wrong]
    config = replace(config, strategies=(*beside, *right))
    comparison = compare(config, directory or new_directory(), pool=pool)
    # What fails or differs only here, with this model.
    rows = comparison.summary.set_index("strategy")
    wrong |= {name: said for name, said in comparison.failed.items() if name in against}
    differ = rows.index[rows["losses_equal"].eq(False)]
    wrong |= {name: "its losses differ from those of one process" for name in differ if name in against}
    played = _play(config, [name for name in rows.index if name in {*ours, *against}], *links)
    table = _table(rows, played, {one.name for one in right if one.rounds})
    points = {name: 0 if name in wrong else FULL_MARKS - len(_more(_row(table, one), _row(table, name)))
              for name, one in against.items()}  # fmt: skip
    table["points"] = pd.array([points.get(name) for name in table.index], "Int64")
    return Scores(table, comparison, played, against, wrong)


def _wrong(make: Make, strategy: Strategy, ours: str, num_ranks: int) -> str:
    """What differs first from one process, as ``check("whole...")`` trains it; empty if nothing does, or it rounds."""
    if strategy.rounds:
        return ""
    try:
        # Parameters that some ranks use, or none; of FSDP the exercise asks no such thing.
        check_strategy(make, (num_ranks,), ("MLP" if ours == "fsdp" else "Unused",), loops=LOOPS[:NUM_LOOPS])
    except (AssertionError, RankError, RankHang, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


def _play(config: CompareConfig, names: Iterable[str], link: Link, inside: Link) -> dict[str, Records]:
    """The first two steps of each on the virtual clock."""

    def link_of(event: CollectiveEvent) -> Link:
        return inside if event.axis == "shard" or event.axis.endswith(".inner") else link  # groups inside a host

    found = {}
    for name in names:
        with suppress(RuntimeError):  # a step that depends on values, or needs ranks
            found[name] = two_steps(config, name, link_of)
    return found


def _table(rows: pd.DataFrame, played: Mapping[str, Records], rounding: set[str]) -> pd.DataFrame:
    """What was counted and played."""
    exposed = {name: float(one.steps["exposed_comm_us"].iloc[-1]) / 1e3 for name, one in played.items()}
    numbers = rows[["rest_bytes", "peak_bytes", "wire_bytes_per_step"]] / 1e6
    table = numbers.assign(exposed=[exposed.get(name, nan) for name in rows.index]).astype("float64")
    table = table.set_axis([*COSTS], axis=1)
    right = {True: "yes", False: "no"}
    words = ["rounds" if name in rounding and equal else right.get(equal, "not known")
             for name, equal in rows["losses_equal"].items()]  # fmt: skip
    table.insert(0, "right", words)
    return table


def _row(table: pd.DataFrame, name: str) -> dict[str, Any]:
    return {str(column): value for column, value in table.loc[name].to_dict().items()}


def _more(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The costs of which ``other`` has more than ``one``, or nobody knows."""
    return [column for column in COSTS if not other[column] <= ENOUGH * one[column]]


def _told(row: Mapping[str, Any], column: str) -> str:
    unit = column.partition("(")[2].rstrip(")")
    return f"{row[column]:.4g} {unit} {COSTS[column]}"
