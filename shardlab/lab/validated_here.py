"""How far forecasts of step time miss what this machine measures: each configuration predicted, then run.

A forecast knows the calibration and the configuration, and nothing of the run. Beside it stand two toys, which know
the answers: their numbers are fitted to the very runs that they are compared with.

    constant rate    seconds = FLOPs x the most that a rank computes / rate, one number
    roofline         seconds = max(FLOPs / rate, bytes sent / bandwidth), two numbers
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.forecast import forecast_step, seconds_in
from shardlab.launch import RankPool
from shardlab.planner.machine import Machine

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")
RANKS = (2, 4)
SHAPES = ((4, None), (16, None), (8, "2Gbps,200us"), (8, "500Mbps,50us"))  # rows of a rank, and the link
STEPS = 8


@dataclass(frozen=True)
class Validated:
    """One configuration: seconds of a step, predicted and measured, and bytes at the peak."""

    strategy: str
    ranks: int
    rows: int
    link: str | None
    predicted: float
    measured: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    flops: float
    sent_bytes: float

    @property
    def error(self) -> float:
        """Share of the measured time."""
        return self.predicted / self.measured - 1


def configurations(ranks: int) -> Iterator[CompareConfig]:
    """What is predicted and run on so many ranks."""
    for (rows, link), strategy in product(SHAPES, STRATEGIES):
        yield CompareConfig(
            strategies=(strategy,), ranks=ranks, steps=STEPS, model="gpt-1m", text="grammar", seq_len=64,
            batch=rows * ranks, link=link, device="cpu",
        )  # fmt: skip


def validate_here(
    machine: Machine, ranks: Sequence[int] = RANKS, on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[Validated]:
    """Each configuration, when it has been predicted and run."""
    for count in ranks:
        with RankPool(count, device="cpu") as pool, tempfile.TemporaryDirectory() as directory:
            for number, config in enumerate(configurations(count)):
                (strategy,) = config.strategies
                on_progress(f"{strategy} on {count} ranks")
                forecast = forecast_step(config, strategy, machine)
                done = compare(config, f"{directory}/{number}", pool=pool, on_progress=lambda _: None)
                steps, sent = done.records.steps, done.records.collectives
                yield Validated(
                    strategy, count, config.global_batch // count, config.link, forecast.seconds, seconds_in(steps),
                    forecast.peak_bytes, int(steps["peak_bytes"].max()), float(config.global_batch // count),
                    float(sent.groupby(["rank", "step"])["bytes"].sum().median()),
                )  # fmt: skip


def table_of(rows: Sequence[Validated]) -> pd.DataFrame:
    """The rows with their errors, and those of the toys."""
    table = pd.DataFrame([asdict(row) for row in rows])
    table["error"] = table["predicted"] / table["measured"] - 1
    table["constant_rate_error"] = _constant(table) / table["measured"] - 1
    table["roofline_error"] = _roofline(table) / table["measured"] - 1
    return table


def _work(table: pd.DataFrame) -> NDArray[np.float64]:
    """Rows of a rank times the ranks that share a core."""
    return (table["rows"] * table["ranks"]).to_numpy(dtype=float)


def _constant(table: pd.DataFrame) -> NDArray[np.float64]:
    work = _work(table)
    rate: float = float(np.exp(np.median(np.log(work / table["measured"].to_numpy()))))
    return work / rate


def _roofline(table: pd.DataFrame) -> NDArray[np.float64]:
    work, sent, measured = _work(table), table["sent_bytes"].to_numpy(), table["measured"].to_numpy()
    best, answer = np.inf, measured
    for rate in np.geomspace(work.min() / measured.max() / 10, work.max() / measured.min() * 10, 200):
        for bandwidth in np.geomspace(1e6, 1e11, 200):
            found = np.maximum(work / rate, sent / bandwidth)
            miss = float(np.abs(np.log(found / measured)).sum())
            if miss < best:
                best, answer = miss, found
    return answer


def summary_of(table: pd.DataFrame) -> pd.DataFrame:
    """Median, 90th percentile and worst of the absolute errors."""
    errors = table[["error", "constant_rate_error", "roofline_error"]].abs()
    return pd.DataFrame({"median": errors.median(), "p90": errors.quantile(0.9), "worst": errors.max()})


def regret_of(table: pd.DataFrame) -> float:
    """How much slower the strategies that the forecast puts first are than the fastest ones, on average."""
    found = []
    for _, group in table.groupby(["ranks", "rows", "link"], dropna=False):
        chosen = group.sort_values("predicted").iloc[0]
        found.append(float(chosen["measured"] / group["measured"].min() - 1))
    return float(np.mean(found))
