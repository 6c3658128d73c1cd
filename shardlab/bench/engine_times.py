"""What engines take beside operations and messages: trainings of two small models, held against their forecasts."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.bench.operation_times import Effort
from shardlab.experiment import CompareConfig
from shardlab.experiment.comparison import run_strategies
from shardlab.experiment.directory import run_directory
from shardlab.experiment.planned.forecast import forecast_step, seconds_in, steered_by
from shardlab.experiment.trained.workload import Workload
from shardlab.forecast.machine import Machine, RankCosts
from shardlab.launch import RankPool
from shardlab.planner.setup import STRATEGIES
from shardlab.records.store import load_run

TRIED = 0.2  # by which operations are made slower, to see how much a forecast moves
# Fields of ``RankCosts`` that ``engine_time`` measures, with the names in them; 'pace' needs 'host'.
ENGINE_PARTS = tuple((field, name) for field in ("host", "pace") for name in STRATEGIES if name != "single")
# Where there is little time: the others of these engines take about as long by parameter as 'bucketed'.
FEW_PARTS = tuple((field, name) for field, name in ENGINE_PARTS if name in ("bucketed", "fsdp"))


def engine_time(field: str, strategy: str, pool: RankPool, costs: RankCosts, effort: Effort) -> float:
    """One of ``ENGINE_PARTS``, with what was measured before it."""
    return (_host if field == "host" else _pace)(strategy, pool, costs, effort)


def _tiny_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(12)))


def _tiny_batches(rank: int, ranks: int, seed: int) -> Iterator[Tensor]:  # noqa: ARG001
    while True:
        yield torch.ones(4, 16)


def _tiny_loss(model: Any, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


TINY = Workload(_tiny_model, _tiny_batches, _tiny_loss, wrap="*")


def _layers() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(160, 4, 640, 0.0, nn.functional.gelu, batch_first=True) for _ in range(4))
    return nn.Sequential(*layers)


def _rows(rank: int, ranks: int, seed: int) -> Iterator[Tensor]:  # noqa: ARG001
    while True:
        yield torch.ones(6, 48, 160)


LAYERS = Workload(_layers, _rows, _tiny_loss)


def _host(strategy: str, pool: RankPool, costs: RankCosts, effort: Effort) -> float:
    """Seconds of the engine's own code: of a tiny model, what its forecast without that falls short by."""
    config = _config(strategy, pool, TINY, effort.short_steps)
    short = _seconds(config, pool) - _forecast(config, replace(costs, host={}))
    return max(0.0, short) / steered_by(config, strategy)


def _pace(strategy: str, pool: RankPool, costs: RankCosts, effort: Effort) -> float:
    """How much longer operations take in a step, where memory was freed and others have the caches."""
    config = _config(strategy, pool, LAYERS, effort.long_steps)
    alone, slower = (
        _forecast(config, replace(costs, pace={strategy: pace})) for pace in (1.0, 1.0 + TRIED)
    )  # fmt: skip
    return max(0.5, 1 + TRIED * (_seconds(config, pool) - alone) / (slower - alone))


def _config(strategy: str, pool: RankPool, workload: Workload, steps: int) -> CompareConfig:
    return CompareConfig(
        strategies=(strategy,), ranks=pool.world_size, steps=steps, workload=workload, device="cpu"
    )  # fmt: skip


def _seconds(config: CompareConfig, pool: RankPool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        found, failed = run_strategies(config, Path(directory) / "run", pool, lambda _: None)
        for error in failed.values():
            raise error
        return seconds_in(load_run(run_directory(found, config.strategies[0])).steps)


def _forecast(config: CompareConfig, costs: RankCosts) -> float:
    machine = Machine("", {}, 0, {str(config.ranks): costs})
    return forecast_step(config, config.strategies[0], machine, traces_memory=False).seconds
