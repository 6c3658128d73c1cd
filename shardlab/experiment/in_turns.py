"""Several variants of one training, a step of each in turn: what the machine does meanwhile happens to all of them.

A laptop has slow phases of up to a factor of two. Variants that run one after the other meet different ones, and the
order decides which looks fast; variants that take turns meet the same. Each has a model, an optimizer and records of
its own; the ranks, the mesh and the rows of each step are shared.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardlab.comm import Mesh
from shardlab.data_sets import batch, load_text
from shardlab.engines import build_engine
from shardlab.experiment.config import DTYPES, CompareConfig
from shardlab.experiment.run import now_ns
from shardlab.experiment.step import StepResult, TrainStep
from shardlab.launch import RankPool, current
from shardlab.models import build_model, next_token_loss
from shardlab.partition.wire import Link
from shardlab.trace.clock import clock_for
from shardlab.trace.recorder import Recorder
from shardlab.trace.store import Records, RunWriter, load_runs, write_manifest
from shardlab.trace.units import watch_units
from shardlab.vocabulary import Phase, SpanKind


@dataclass(frozen=True)
class Variant:
    """One way to train: a strategy of ``engines.STRATEGIES`` and the options its class takes."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)


def run_in_turns(
    variants: Mapping[str, Variant], config: CompareConfig, pool: RankPool, directory: Path | None = None
) -> Records:
    """Train every variant for ``config.steps`` steps, one step of each in turn, and record all.

    The first step allocates and warms up: leave it out of timings. Memory is sampled at rest only.

    Args:
        variants: by the name that ``run`` gets in the tables.
        config: model, data, link and steps; its strategies, bucket size and accumulation are not used.
        pool: ``config.ranks`` ranks.
        directory: keeps the records; None forgets them on disk once they are read.

    Raises:
        ValueError: no variants, a pool of another size, or an option that a strategy does not take.
        RankError: a rank failed; see ``RankPool.run``.
    """
    if not variants:
        raise ValueError("variants: at least one is needed")
    if pool.world_size != config.ranks:
        raise ValueError(f"pool: it has {pool.world_size} ranks, but config.ranks is {config.ranks}")
    with ExitStack() as stack:
        where = directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, variant in variants.items():
            options = {"strategy": variant.strategy, "options": dict(variant.options)}
            manifest = {"run": name, "ranks": config.ranks, "config": config.as_dict() | options}
            write_manifest(where / name, manifest | {"devices": pool.placement.devices})
        pool.run(_train_in_turns, dict(variants), config, where, now_ns())
        return load_runs(where / name for name in variants)


def _train_in_turns(
    rank: int, variants: dict[str, Variant], config: CompareConfig, directory: Path, origin_ns: int
) -> None:
    link = None if config.link is None else Link.parse(config.link)
    with ExitStack() as stack:
        mesh = stack.enter_context(Mesh({"data": config.ranks}, device=current().device, link=link))
        turns = [
            stack.enter_context(_Turn(name, variant, config, mesh, RunWriter(directory / name, rank), origin_ns))
            for name, variant in variants.items()
        ]
        for step in range(config.steps):
            for turn in turns:
                turn.take(step)


class _Turn:
    """One variant on one rank."""

    def __init__(
        self, name: str, variant: Variant, config: CompareConfig, mesh: Mesh, writer: RunWriter, origin_ns: int
    ) -> None:
        self._config, self._mesh, self._writer = config, mesh, writer
        self._data = load_text(config.text, config.seq_len)
        model = build_model(config.model, config.seq_len, DTYPES[config.dtype], config.seed).to(mesh.device)
        self._engine = build_engine(
            variant.strategy,
            model,
            lambda tensors: torch.optim.AdamW(tensors, lr=config.learning_rate),
            mesh,
            **variant.options,
        )
        self._recorder = Recorder(
            writer, name, mesh.data.ranks[mesh.data.rank], clock_for(mesh.device), origin_ns,
            device=mesh.device, emulated=mesh.data.emulated, live_tensors=self._engine.live_tensors,
        )  # fmt: skip
        self._hooks = watch_units(model, self._recorder)
        self._train_step = TrainStep(self._engine, next_token_loss, max_norm=config.clip, recorder=self._recorder)

    def take(self, step: int) -> None:
        """Train one step, and tell this variant's recorder alone."""
        with self._mesh.observed_by(self._recorder), self._recorder.step(step):
            result = self._step(step)
        num_tokens = self._num_rows * self._config.seq_len
        self._recorder.finish_step(result.loss, result.grad_norm, result.learning_rate, num_tokens)

    @property
    def _num_rows(self) -> int:
        return self._config.global_batch // self._config.ranks

    def _step(self, step: int) -> StepResult:
        config, first = self._config, self._mesh.data.rank * self._num_rows
        rows = range(first, first + self._num_rows)
        with self._recorder.phase(Phase.DATA, SpanKind.DATA):
            inputs, targets = batch(self._data, step, 0, rows, config.global_batch, config.seq_len, config.seed)
        result = self._train_step(inputs.to(self._mesh.device), targets.to(self._mesh.device))
        assert result is not None
        return result

    def __enter__(self) -> "_Turn":
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._engine.close()
        self._writer.close()
