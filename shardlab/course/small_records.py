"""Records that a cell makes: the collectives of a few lines, trainings in turn, sweeps.

    def ranks_do(rank):
        with Mesh({"data": 2}, device=current().device) as mesh, log_collectives(mesh, rank) as log:
            mesh.data.all_reduce(torch.ones(4)).wait()
        return log.rows()

    table = collectives_table(pool.run(ranks_do))

A laptop has slow phases of up to a factor of two. If variants run one after the other, their order decides which looks
fast; if they are interleaved, the phases affect all alike. Each variant has its own mesh, model, optimizer and records;
only the ranks are shared.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from time import perf_counter_ns

import pandas as pd
import torch

from shardlab.comm import CollectiveEvent, Communicator, Observer
from shardlab.comm.mesh import Mesh
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.run.rank_run import mesh_of, recorded_run, source_of
from shardlab.launch import RankPool, current
from shardlab.launch.cell_bar import cell_bar
from shardlab.launch.pool import check_pool
from shardlab.partition.ring_cost import Link
from shardlab.records.entries import in_us
from shardlab.records.store import Records, RunWriter, load_runs, write_manifest
from shardlab.records.tables import COLLECTIVES
from shardlab.trace.clock import clock_for
from shardlab.trace.observed import Row, collective_columns
from shardlab.vocabulary import Phase, SpanKind

SINCE_BOOT_NS = 0
TIMES = ["issue_us", "start_us", "end_us", "wait_start_us", "wait_end_us"]


class EventLog(Observer):
    """An observer of collectives that keeps every event.

    Args:
        rank: rank in the rows.
        device: device of the tensors; on CUDA the times are those of the stream.
        run: name of the run in the rows.
    """

    def __init__(self, rank: int, device: torch.device | str = "cpu", run: str = "log") -> None:
        self._rank, self._run = rank, run
        self._clock = clock_for(torch.device(device))
        self._events: list[CollectiveEvent] = []

    def rows(self) -> list[Row]:
        """One row per collective so far, in order of issue; all must have ended. Times count from the boot."""
        self._clock.settle()
        events = [(event, Phase.SETUP) for event in self._events]
        columns = in_us(collective_columns(events, 0, self._clock, origin_ns=SINCE_BOOT_NS))
        return [
            {
                "run": self._run, "source": "emulated" if event.emulated else "measured", "rank": self._rank, "step": 0,
                **dict(zip(columns, values, strict=True)),
            }
            for event, *values in zip(self._events, *columns.values(), strict=True)
        ]  # fmt: skip

    def issued(self, event: CollectiveEvent) -> None:
        """Keep the event; its times are filled in later."""
        self._events.append(event)


@contextmanager
def log_collectives(mesh: Mesh, rank: int, run: str = "log") -> Iterator[EventLog]:
    """Log every collective of the mesh inside the ``with`` block; yields the log."""
    log = EventLog(rank, mesh.device, run)
    with mesh.observed_by(log):
        yield log


def collectives_table(rows_of_ranks: Iterable[list[Row]]) -> pd.DataFrame:
    """The rows of all ranks as table ``collectives``; times count from the first issue of any rank."""
    rows = [row for rows in rows_of_ranks for row in rows]
    origin_us = min((row["issue_us"] for row in rows if isfinite(row["issue_us"])), default=0.0)
    return COLLECTIVES.frame([row | {name: row[name] - origin_us for name in TIMES} for row in rows])


Op = Callable[[Communicator, torch.Tensor], object]
NUM_WARM_UPS = 2
ELEMENT_BYTES = 4  # float32


def run_interleaved(variants: Mapping[str, CompareConfig], pool: RankPool) -> Records:
    """Train every variant, one step of each in turn, and record all of them.

    The first step allocates and warms up, so leave it out of timings. Memory is sampled at rest only.

    Args:
        variants: configurations by the name of their run in the tables. Each has one strategy (not 'single') and the
            pool's ranks and device; all have the same number of steps. There are no checkpoints.
        pool: the ranks.

    Raises:
        ValueError: there are no variants, or one is not as described above.
        RankError: a rank failed; see ``RankPool.run``.
    """
    _check(variants, pool)
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        for name, config in variants.items():
            options = config.as_dict(config.strategies[0])
            write_manifest(where / name, {"run": name, "ranks": config.ranks, "config": options})
        steps = next(iter(variants.values())).steps
        with cell_bar(f"training {len(variants)} variant{'s in turn' * (len(variants) > 1)}", steps) as advance:
            began_ns = perf_counter_ns()
            pool.run(_train_interleaved, dict(variants), where, began_ns, on_message=lambda _, said: advance(str(said)))
        return load_runs(where / name for name in variants)


def _train_interleaved(rank: int, variants: dict[str, CompareConfig], directory: Path, origin_ns: int) -> None:
    with ExitStack() as stack:
        turns = []
        # Every rank makes the meshes and engines in the same order, because making them is collective.
        for name, config in variants.items():
            # Each variant has its own mesh, so that its recorder sees its collectives only.
            mesh = stack.enter_context(mesh_of(config, config.strategies[0]))
            writer = RunWriter(directory / name, rank, name, source_of(mesh))
            turns.append(stack.enter_context(recorded_run(config, config.strategies[0], mesh, writer, origin_ns)))
        for step in range(next(iter(variants.values())).steps):
            for turn in turns:
                turn.step(step)
            if rank == 0:
                current().emit(f"step {step}")


def _check(variants: Mapping[str, CompareConfig], pool: RankPool) -> None:
    for name, config in variants.items():
        if len(config.strategies) != 1 or config.is_alone(config.strategies[0]):
            raise ValueError(f"variants: {name!r} needs one strategy that runs on all ranks, not {config.strategies}")
        for field in ("resume", "save_every"):
            if (given := getattr(config, field)) is not None:
                raise ValueError(f"variants: {name!r} has {field}={given!r}, but here are no checkpoints; leave it out")
        check_pool(pool, config.ranks, config.device, by=f"variants[{name!r}]")
    if len({config.steps for config in variants.values()}) != 1:
        raise ValueError("variants: give one or more, all with the same number of steps, since they are interleaved")


def message_sweep(ops: Mapping[str, Op], num_bytes: Sequence[int], pool: RankPool, repeats: int = 10) -> pd.DataFrame:
    """Time each op on float32 tensors of each size over all ranks of the pool.

    A barrier comes before each message, and its time is that of the slowest rank, from the call to the usable result.
    The best of the repetitions is its time: on a shared machine that is reproducible to a few percent, and a mean is
    not. The median stands beside it, and says how busy the machine was.

    Args:
        ops: functions by name, called as ``op(communicator, tensor)``; they return when the result may be used.
        num_bytes: sizes of the tensor, multiples of 4 times the number of ranks.
        pool: the ranks.
        repeats: how often each message is timed, at least 1.

    Returns:
        One row per op and size, as ``analysis.with_fit`` takes them: ``op``, ``bytes``, ``time_us``, ``median_us``,
        ``group_size``.

    Raises:
        ValueError: a size is no such multiple.
    """
    multiple = ELEMENT_BYTES * pool.world_size
    if not num_bytes or any(size < 1 or size % multiple for size in num_bytes):
        raise ValueError(f"num_bytes: {list(num_bytes)} are not all multiples of {multiple} above 0")
    with cell_bar("timing messages", repeats * len(ops) * pool.world_size) as advance:
        found = pool.run(_time_all, dict(ops), list(num_bytes), repeats, on_message=lambda _, name: advance(str(name)))
    times_us = torch.tensor(found, dtype=torch.float64)
    slowest_rank = times_us.amax(dim=0).flatten(start_dim=1)
    table = pd.DataFrame([(name, size) for name in ops for size in num_bytes], columns=["op", "bytes"])
    return table.assign(
        time_us=slowest_rank.amin(dim=0).numpy(),
        median_us=slowest_rank.quantile(0.5, dim=0).numpy(),
        group_size=pool.world_size,
    )


def link_for(config: CompareConfig, pool: RankPool, *, sends_for: float = 0.8, latency: float = 0.005) -> Link:
    """A link to emulate that is neither too fast nor too slow to show anything: relative to what backward takes here.

    A link of fixed speed hides everything on a slow machine and nothing on a fast one. So three steps are trained
    without one, and the median backward of a rank, without its waits, decides.

    Args:
        config: what will be trained, with one strategy; its own link does not count.
        pool: the ranks.
        sends_for: how long the bytes of a step take, in backwards, without latency.
        latency: in backwards.

    Returns:
        Bandwidth and latency to two digits.

    Raises:
        ValueError: ``config`` is refused by ``run_interleaved``.
    """
    records = run_interleaved({"without a link": replace(config, link=None, steps=4)}, pool)
    spans = records.spans.query(f"step > 0 and unit == 'model' and kind == '{SpanKind.BACKWARD}'")
    backward_us = (spans["end_us"] - spans["start_us"]).groupby([spans["rank"], spans["step"]]).sum().median()
    num_bytes = records.steps["wire_bytes"].max()
    gbit_per_s = num_bytes * 8 / (sends_for * backward_us * 1e3)
    return Link(float(f"{latency * backward_us:.2g}"), float(f"{gbit_per_s:.2g}"))


def _time_all(_: int, ops: dict[str, Op], num_bytes: list[int], repeats: int) -> list[list[list[float]]]:
    """Microseconds by repetition, op and size, on this rank."""
    context = current()
    with Mesh({"data": context.world_size}, device=context.device) as mesh:
        tensors = [torch.zeros(size // ELEMENT_BYTES, device=mesh.device) for size in num_bytes]
        for op in ops.values():
            for tensor in tensors:
                for _ in range(NUM_WARM_UPS):
                    op(mesh.data, tensor)

        def timed(name: str) -> list[float]:
            current().emit(name)
            return [_time(ops[name], mesh, tensor) for tensor in tensors]

        return [[timed(name) for name in ops] for _ in range(repeats)]


def _time(op: Op, mesh: Mesh, tensor: torch.Tensor) -> float:
    """Microseconds of one message on this rank."""
    mesh.data.barrier().wait()
    _synchronise(mesh.device)
    began_ns = perf_counter_ns()
    op(mesh.data, tensor)
    _synchronise(mesh.device)
    return (perf_counter_ns() - began_ns) / 1e3


def _synchronise(device: torch.device) -> None:
    """On CUDA ``wait`` only orders the streams, but the time of a message ends when its bytes have arrived."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
