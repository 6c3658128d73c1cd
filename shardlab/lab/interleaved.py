"""Several variants of one training, interleaved step by step, so that slow moments of the machine hit all of them.

A laptop has slow phases of up to a factor of two. If variants run one after the other, their order decides which looks
fast; if they are interleaved, the phases affect all alike. Each variant has its own mesh, model, optimizer and records;
only the ranks are shared.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.run import RankRun, mesh_of, now_ns, recorded_run, source_of
from shardlab.launch import RankPool
from shardlab.launch.checks import check_pool
from shardlab.trace.store import Records, RunWriter, load_runs, write_manifest


def run_interleaved(variants: Mapping[str, CompareConfig], pool: RankPool, directory: Path | None = None) -> Records:
    """Train every variant, one step of each in turn, and record all of them.

    The first step allocates and warms up, so leave it out of timings. Memory is sampled at rest only.

    Args:
        variants: configurations by the name of their run in the tables. Each has one strategy (not 'single') and the
            pool's ranks and device, and neither resumes nor saves; all have the same number of steps.
        pool: the ranks.
        directory: where the records stay; None uses a temporary directory.

    Raises:
        ValueError: there are no variants, or one is not as described above.
        RankError: a rank failed; see ``RankPool.run``.
    """
    _check(variants, pool)
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
        # Every rank makes the meshes and engines in the same order, because making them is collective.
        turns = [
            stack.enter_context(_turn(name, config, directory / name, rank, origin_ns))
            for name, config in variants.items()
        ]
        for step in range(next(iter(variants.values())).steps):
            for turn in turns:
                turn.step(step)


@contextmanager
def _turn(name: str, config: CompareConfig, directory: Path, rank: int, origin_ns: int) -> Iterator[RankRun]:
    # Each variant has its own mesh, so that its recorder sees its collectives only.
    with mesh_of(config, config.strategies[0]) as mesh:
        writer = RunWriter(directory, rank, name, source_of(mesh))
        with recorded_run(config, config.strategies[0], mesh, writer, origin_ns) as run:
            yield run


def _check(variants: Mapping[str, CompareConfig], pool: RankPool) -> None:
    if not variants:
        raise ValueError("variants: none given; at least one is needed")
    for name, config in variants.items():
        if len(config.strategies) != 1 or config.strategies == ("single",):
            raise ValueError(f"variants: {name!r} needs one strategy that runs on all ranks, not {config.strategies}")
        for field in ("resume", "save_every"):
            if (given := getattr(config, field)) is not None:
                raise ValueError(f"variants: {name!r} has {field}={given!r}, but here are no checkpoints; leave it out")
        check_pool(pool, config.ranks, config.device, by=f"variants[{name!r}]")
    if len({config.steps for config in variants.values()}) > 1:
        raise ValueError("variants: different numbers of steps; all need the same, since they are interleaved")
