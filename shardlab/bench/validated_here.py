"""How far forecasts of step time miss what this machine measures: each configuration predicted, then run.

A forecast knows the calibration and the configuration, and nothing of the run. Beside it stand two toys, which know
the answers: their numbers are fitted to the very runs that they are compared with.

    constant rate    seconds = rows of all ranks, which share the cores / rate, one number
    roofline         seconds = max(rows / rate, bytes sent / bandwidth), two numbers
"""

import tempfile
from collections.abc import Callable
from itertools import groupby, product

import numpy as np
import pandas as pd

from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.comparison import PRELOAD
from shardlab.experiment.planned.forecast import forecast_step, seconds_in
from shardlab.forecast.machine import Machine
from shardlab.forecast.published import fit_constant, fit_roofline
from shardlab.launch import RankPool

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")
SHAPES = ((4, None), (16, None), (8, "2Gbps,200us"), (8, "500Mbps,50us"))  # rows of a rank, and the link
STEPS = 8


def configurations(machine: Machine) -> list[CompareConfig]:
    """What is predicted and run, on as many ranks as a machine was calibrated for."""
    counts = [int(key) for key in machine.ranks if key != "single"]
    return [
        CompareConfig(
            strategies=(strategy,), ranks=ranks, steps=STEPS, model="gpt-1m", text="grammar", seq_len=64,
            batch=rows * ranks, link=link, device="cpu",
        )
        for ranks, (rows, link), strategy in product(counts, SHAPES, STRATEGIES)
    ]  # fmt: skip


def validate_here(machine: Machine, on_progress: Callable[[str], None] = lambda _: None) -> pd.DataFrame:
    """Each configuration, predicted and then run.

    Returns:
        ``strategy``, ``ranks``, ``rows`` (of a rank), ``link``, ``predicted`` and ``measured`` (seconds of a step),
        ``predicted_peak_bytes``, ``measured_peak_bytes``, ``sent_bytes`` (of a rank and step), and the shares of the
        measured seconds by which the forecast and the toys miss them: ``error``, ``constant_rate_error``,
        ``roofline_error``.
    """
    found = []
    for ranks, configs in groupby(configurations(machine), key=lambda config: config.ranks):
        with RankPool(ranks, device="cpu", preload=PRELOAD) as pool, tempfile.TemporaryDirectory() as directory:
            for number, config in enumerate(configs):
                (strategy,) = config.strategies
                on_progress(f"{strategy} on {ranks} ranks")
                forecast = forecast_step(config, strategy, machine)
                done = compare(config, f"{directory}/{number}", pool=pool, on_progress=lambda _: None)
                steps, sent = done.records.steps, done.records.collectives
                found.append({
                    "strategy": strategy, "ranks": ranks, "rows": config.global_batch // ranks, "link": config.link,
                    "predicted": forecast.seconds, "measured": seconds_in(steps),
                    "predicted_peak_bytes": forecast.peak_bytes, "measured_peak_bytes": int(steps["peak_bytes"].max()),
                    "sent_bytes": float(sent.groupby(["rank", "step"])["bytes"].sum().median()),
                })  # fmt: skip
    return with_errors(pd.DataFrame(found))


def with_errors(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with their errors, and those of the toys."""
    columns = table["rows"] * table["ranks"], table["sent_bytes"], table["measured"]
    work, sent, measured = (column.to_numpy(dtype=float) for column in columns)
    rate, bandwidth = fit_roofline(work, sent, measured)
    return table.assign(
        calibration=False, error=table["predicted"] / measured - 1,
        constant_rate_error=work / fit_constant(work, measured) / measured - 1,
        roofline_error=np.maximum(work / rate, sent / bandwidth) / measured - 1,
    )  # fmt: skip


def regret_of(table: pd.DataFrame) -> float:
    """How much slower the strategies that the forecast puts first are than the fastest ones, on average."""
    found = []
    for _, group in table.groupby(["ranks", "rows", "link"], dropna=False):
        chosen = group.sort_values("predicted").iloc[0]
        found.append(float(chosen["measured"] / group["measured"].min() - 1))
    return float(np.mean(found))
