"""The ZeRO paper's published numbers, as printed, and what the formulas give at the same number of decimals.

Source: Rajbhandari et al., arXiv 1910.02054, table 1 (54 numbers) and figure 1 (4), in ``data/zero_paper.json``. The
paper rounds the 7.5B column and the figure, and truncates the columns of 128B and 1T.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

from shardlab.data_files import data_path
from shardlab.planner.model_states import model_states

_ROUNDING = {"half_up": ROUND_HALF_UP, "truncated": ROUND_DOWN}


@dataclass(frozen=True)
class PaperNumber:
    """One published number: ``printed`` GB (10^9 bytes) per rank, as the paper writes it, in ``where``."""

    where: str
    num_params: int
    num_ranks: int
    strategy: str
    printed: str
    rounding: str

    @property
    def computed(self) -> str:
        """The formula's value with the paper's decimals and rounding."""
        states = {row.strategy: row for row in model_states(self.num_params, self.num_ranks, "mixed")}
        gigabytes = Decimal(states[self.strategy].total_bytes) / 10**9
        return str(gigabytes.quantize(Decimal(self.printed), rounding=_ROUNDING[self.rounding]))


def zero_paper_numbers() -> tuple[PaperNumber, ...]:
    """All 58, table 1 first."""
    paper = json.loads(data_path("zero_paper.json").read_text(encoding="utf-8"))
    return (*_table_1(paper), *_figure_1(paper["figure_1"]))


def _table_1(paper: dict[str, Any]) -> Iterator[PaperNumber]:
    strategies = paper["setting"]["strategies"]
    for column in paper["table_1"]["columns"].values():
        for num_ranks, printed in column["by_ranks"].items():
            for strategy, number in zip(strategies, printed, strict=True):
                yield PaperNumber("table 1", column["num_params"], int(num_ranks), strategy, number, column["rounding"])


def _figure_1(figure: dict[str, Any]) -> Iterator[PaperNumber]:
    for strategy, printed in figure["by_strategy"].items():
        yield PaperNumber("figure 1", figure["num_params"], figure["ranks"], strategy, printed, figure["rounding"])
