"""Several variants of one training, a step of each in turn: what the machine does meanwhile happens to all of them.

A laptop has slow phases of up to a factor of two. Variants that run one after the other meet different ones, and the
order decides which looks fast; variants that take turns meet the same. Each has a mesh, a model, an optimizer and
records of its own; only the ranks are shared.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardlab.comm.mesh import Mesh
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.run import RankRun, now_ns, recorded_run, source_of
from shardlab.launch import RankPool, current
from shardlab.partition.wire import Link
from shardlab.trace.store import Records, RunWriter, load_runs, write_manifest


def run_interleaved(variants: Mapping[str, CompareConfig], pool: RankPool, directory: Path | None = None) -> Records:
    """Train every variant, one step of each in turn, and record all.

    The first step allocates and warms up: leave it out of timings. Memory is sampled at rest only.

    Args:
        variants: by the name that ``run`` gets in the tables; each with one strategy (not 'single'), all with the same
            number of steps and with the pool's number of ranks.
        pool: where they run.
        directory: keeps the records; None forgets them on disk once they are read.

    Raises:
        ValueError: no variants, or one that is not as said above.
        RankError: a rank failed; see ``RankPool.run``.
    """
    _check(variants, pool.world_size)
    with ExitStack() as stack:
        where = directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, config in variants.items():
            write_manifest(
                where / name, {"run": name, "ranks": config.ranks, "config": config.as_dict(config.strategies[0])}
            )
        pool.run(_train_interleaved, dict(variants), where, now_ns())
        return load_runs(where / name for name in variants)


def _train_interleaved(rank: int, variants: dict[str, CompareConfig], directory: Path, origin_ns: int) -> None:
    with ExitStack() as stack:
        turns = [
            stack.enter_context(_turn(name, config, directory / name, rank, origin_ns))
            for name, config in variants.items()
        ]
        for step in range(next(iter(variants.values())).steps):
            for turn in turns:
                turn.step(step)


@contextmanager
def _turn(name: str, config: CompareConfig, directory: Path, rank: int, origin_ns: int) -> Iterator[RankRun]:
    link = None if config.link is None else Link.parse(config.link)
    # A mesh of its own, so that the variant's recorder hears of the variant's collectives alone.
    with Mesh({"data": config.ranks}, device=current().device, link=link, transport=config.transport) as mesh:
        writer = RunWriter(directory, rank, name, source_of(mesh))
        with recorded_run(config, config.strategies[0], mesh, writer, origin_ns) as run:
            yield run


def _check(variants: Mapping[str, CompareConfig], num_ranks: int) -> None:
    if not variants:
        raise ValueError("variants: at least one is needed")
    for name, config in variants.items():
        if len(config.strategies) != 1 or config.strategies == ("single",):
            raise ValueError(f"variants: {name!r} needs one strategy that runs on all ranks, not {config.strategies}")
        if config.ranks != num_ranks:
            raise ValueError(f"variants: {name!r} has ranks={config.ranks}, but the pool has {num_ranks}")
    if len({config.steps for config in variants.values()}) > 1:
        raise ValueError("variants: all need the same number of steps, since they take turns")
