"""Which cause is named when one is put in: a matrix of causes over strategies, and what the named change then gains.

Each cell trains a small model with one thing wrong, asks ``causes`` for the primary cause, makes the change that it
names, and trains again. So the forecast of its gain can be compared with the gain.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from statistics import median
from time import sleep, thread_time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.analysis.rows import in_steps, timed_steps
from shardlab.course.faults.inject import faulty
from shardlab.course.faults.kinds import Straggler
from shardlab.engines.bucketed import Bucketed
from shardlab.experiment.comparison import PRELOAD, compare
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.forecast import seconds_in
from shardlab.experiment.trained.workload import Workload, adamw
from shardlab.launch import RankPool
from shardlab.partition.ring_cost import Link
from shardlab.records.store import Records
from shardlab.vocabulary import SpanKind
from shardlab.why.causes import causes
from shardlab.why.judged_steps import BALANCED, Cause
from shardlab.why.slow_messages import REPEATED
from shardlab.why.slow_work import OFF_CPU

ENGINES = ("bucketed", "zero1", "zero2", "zero3", "fsdp")
HIDDEN, STEPS = 256, 10
ROWS, MANY_ROWS = 256, 1024  # of a rank: much compute only where it has to hide messages
EFFECT = 0.1  # of a step: what makes it no longer by that is no cause
BUSY = 0.1  # share of a step off the CPU from which other processes have had the cores
EVEN, UNEVEN = "blocks.0,blocks.1,blocks.2.*,blocks.3", "blocks.*"
SLOW_RANK = 1  # which sleeps
FAST = "10Gbps,50us"
HEALTHY = "healthy"
NEAR = 0.2  # of the gain that was measured


class EveryMicroBatch(Bucketed):
    """Buckets that travel after every backward, as without ``no_sync()``, and keep the sum of all means."""

    name = "every_micro_batch"

    @contextlib.contextmanager
    def in_backward(self, *, sends: bool) -> Iterator[None]:
        """As the base, and sent in any case."""
        with super().in_backward(sends=True):
            yield
        if not sends:  # else the engine does so
            self.make_means()

    def grad_ready(self, param: nn.Parameter, *, sends: bool) -> None:
        """As the base, and sent in any case."""
        super().grad_ready(param, sends=True)


class Blocks(nn.Module):
    """Equal blocks, of which all but three are in a block of their own: a unit of many, unless each is one.

    Args:
        recomputes: whether backward computes them again.
        together: how many are in that block.
    """

    def __init__(self, recomputes: bool = False, together: int = 5) -> None:
        super().__init__()
        many = nn.Sequential(*(_block() for _ in range(together)))
        self.blocks = nn.ModuleList([_block(), _block(), many, _block()])
        self.head = nn.Linear(HIDDEN, 1)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 1)."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        head: torch.Tensor = self.head(x)
        return head


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))


def _batches(seconds: float = 0.0, rows: int = ROWS) -> Callable[[int, int, int], Iterator[torch.Tensor]]:
    """Batches of a rank, of ``rows`` rows; each takes ``seconds`` to load."""

    def made(rank: int, ranks: int, seed: int) -> Iterator[torch.Tensor]:  # noqa: ARG001
        generator = torch.Generator().manual_seed(seed + rank)
        while True:
            sleep(seconds)
            yield torch.randn(rows, HIDDEN, generator=generator)

    return made


def _slow_adamw(tensors: Any) -> torch.optim.Optimizer:
    optimizer = adamw(tensors)
    optimizer.register_step_pre_hook(_compute)
    return optimizer


def _compute(*_: object) -> None:
    end = thread_time() + 0.1
    while thread_time() < end:
        pass


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor((model(batch) - 1.0).square().mean())


@dataclass(frozen=True)
class Injected:
    """Something wrong on purpose.

    Attributes:
        cause: what should be named.
        options: of ``CompareConfig``.
        workload: fields of ``Workload`` that are wrong.
        engines: where it can be put in.
        rows: of a rank.
        keeps: which of the options and fields stay where it is taken out.
    """

    cause: str
    options: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = ENGINES
    rows: int = ROWS
    keeps: tuple[str, ...] = ()

    def taken_out(self) -> "Injected":
        """The same without what is wrong."""
        kept = (
            {key: value for key, value in one.items() if key in self.keeps} for one in (self.options, self.workload)
        )
        return replace(self, options=next(kept), workload=next(kept))


LATE = [Straggler(rank=SLOW_RANK, step=step, seconds=0.12) for step in range(STEPS)]
INJECTED: Mapping[str, Injected] = {
    HEALTHY: Injected(BALANCED),
    "slow rank": Injected("straggler", workload={"model": faulty(Blocks, *LATE)}),
    "slow loader": Injected("input wait", workload={"data": _batches(0.12)}),
    "slow optimizer": Injected("optimizer step", workload={"optimizer": _slow_adamw}),
    "every micro-batch": Injected(
        REPEATED, {"link": "1Gbps,50us", "accumulation": 4, "strategies": (EveryMicroBatch(),)}, engines=("bucketed",),
        keeps=("link", "accumulation"),
    ),
    "recomputation": Injected("recomputation", workload={"model": lambda: Blocks(recomputes=True)}, rows=MANY_ROWS),
    "low bandwidth": Injected("bandwidth", {"link": "150Mbps,50us"}),
    "high latency": Injected("latency of many small messages", {"link": "10Gbps,15ms"}),
    "small buckets": Injected(
        "latency of many small messages", {"link": "10Gbps,3ms", "bucket_mib": 0.06}, engines=ENGINES[:-1],
        keeps=("link",),
    ),
    "prefetch 0": Injected(
        "late gather (prefetch too short)", {"link": "600Mbps,50us", "prefetch": 0}, engines=("fsdp",), rows=MANY_ROWS,
        keeps=("link",),
    ),
    "uneven units": Injected(
        "uneven units", {"link": "1Gbps,50us", "wrap": UNEVEN}, {"model": lambda: Blocks(together=13)}, ("fsdp",),
        MANY_ROWS, keeps=("link", "model"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class WhyRow:
    """One cell of the matrix; gains in microseconds a step, NaN where no change was made.

    Attributes:
        named: the primary cause; where ranks were off the CPU for ``BUSY`` or more, the primary one beside that.
        is_right: whether the cause that was put in is named; in a healthy run none, or one whose change was then made,
            and took a tenth off the step.
        has_effect: whether the step is a tenth longer with the cause in it; taken so where the cause is named.
        step_us: the time of a step with the cause in it.
        off_cpu: the share of it that a rank was off the CPU, because other processes had its core.
        predicted_us: by how much the named change would shorten it.
        measured_us: by how much it did.
    """

    engine: str
    ranks: int
    injected: str
    named: str
    is_right: bool
    has_effect: bool
    step_us: float
    off_cpu: float
    predicted_us: float
    measured_us: float
    change: str


def num_cells() -> int:
    """How many there are on a number of ranks."""
    return sum(len(one.engines) for one in INJECTED.values())


def verdict(rows: Sequence[WhyRow]) -> str:
    """In how many cells the cause was right, how often one was named for nothing, and how near the gains were."""
    without = sum(not row.has_effect for row in rows)
    rows = [row for row in rows if row.has_effect]
    ill = [row for row in rows if row.injected != HEALTHY]
    alarms = [row for row in rows if row.injected == HEALTHY and not row.is_right]
    made = [row for row in ill if isfinite(row.measured_us)]
    near = sum(abs(row.predicted_us - row.measured_us) <= NEAR * abs(row.measured_us) for row in made)
    gains = [row.predicted_us / row.measured_us for row in made if row.measured_us]
    said = f"right in {sum(row.is_right for row in rows)} of {len(rows)} cells"
    said += f"; a cause named for nothing in {len(alarms)} of {len(rows) - len(ill)} healthy runs"
    middle = f", {median(gains):.2f} of it in the median" if gains else ""
    said += f"; in {without} others a step was less than a tenth longer with it" if without else ""
    return f"{said}; the gain within {NEAR:.0%} of what the change then gained in {near} of {len(made)}{middle}"


def why_matrix(
    ranks: int, engines: tuple[str, ...] = ENGINES, injected: tuple[str, ...] = tuple(INJECTED)
) -> Iterator[WhyRow]:
    """Each cause in each strategy that it fits; a row when its cell is done.

    Raises:
        ValueError: one rank alone has no messages, and nobody to wait for.
    """
    if ranks < 2:
        raise ValueError(f"ranks: {ranks} is given; at least 2 are needed, for messages and a slow rank")
    with RankPool(ranks, device="cpu", preload=PRELOAD) as pool:
        for name in injected:
            for engine in engines:
                if engine in INJECTED[name].engines:
                    yield _cell(pool, engine, name)


def _cell(pool: RankPool, engine: str, name: str) -> WhyRow:
    wrong = INJECTED[name]
    config = _config(engine, pool.world_size, wrong)
    records = _trained(pool, config)
    step_us, away = _step_us(records), _off_cpu(records, pool.world_size)
    known = (OFF_CPU,) if away >= BUSY else ()
    first, *_ = causes(records.collectives, records.spans, records.steps, besides=known)
    is_right, measured_us, has_effect = first.name == wrong.cause, nan, True
    if is_right != (name == HEALTHY) and (is_right or first.settings):
        measured_us = _gained_us(pool, config, _changed(engine, config, wrong, first), step_us)
        is_right = is_right or measured_us >= EFFECT * step_us  # that step could be shorter
    elif name != HEALTHY:
        healthy_us = _step_us(_trained(pool, _config(engine, pool.world_size, wrong.taken_out())))
        has_effect = step_us - healthy_us >= EFFECT * step_us
    return WhyRow(
        engine, pool.world_size, name, first.name, is_right, has_effect, step_us, away, first.gain_us, measured_us,
        first.change,
    )  # fmt: skip


def _gained_us(pool: RankPool, config: CompareConfig, changed: CompareConfig, step_us: float) -> float:
    """By how much a change shortens a step: it is run twice, and then the other again, so that drift cancels."""
    less_us = [_step_us(_trained(pool, changed)) for _ in range(2)]
    return (step_us + _step_us(_trained(pool, config)) - sum(less_us)) / 2


def _config(engine: str, ranks: int, wrong: Injected) -> CompareConfig:
    fields: dict[str, Any] = {"model": Blocks, "data": _batches(rows=wrong.rows), "loss": _loss, **wrong.workload}
    workload = Workload(**fields, name="blocks")
    options = {"strategies": (engine,), "wrap": EVEN, **wrong.options}
    return CompareConfig(ranks=ranks, steps=STEPS, workload=workload, device="cpu", **options)


def _changed(engine: str, config: CompareConfig, wrong: Injected, cause: Cause) -> CompareConfig:
    """With the change that the cause names really made; one that is no option takes out what was put in."""
    options: dict[str, Any] = dict(cause.settings)
    if not options:
        return _config(engine, config.ranks, wrong.taken_out())
    link = Link.parse(config.link or FAST)
    if factor := options.pop("bandwidth", None):
        options["link"] = str(replace(link, bandwidth_gbps=link.bandwidth_gbps * factor))
    if factor := options.pop("latency", None):
        options["link"] = str(replace(link, latency_us=link.latency_us * factor))
    if "prefetch" in options:
        options["prefetch"] += config.prefetch
    if options.get("wrap", "root") != "root":
        options["wrap"] = EVEN  # each block is a unit
    return replace(config, **options)


def _trained(pool: RankPool, config: CompareConfig) -> Records:
    with tempfile.TemporaryDirectory() as directory:
        return compare(config, directory=f"{directory}/run", pool=pool, on_progress=lambda _: None).records


def _step_us(records: Records) -> float:
    return 1e6 * seconds_in(records.steps)


def _off_cpu(records: Records, ranks: int) -> float:
    """Which share of a step a rank was off the CPU, the slow one apart."""
    timed = timed_steps(records.steps)
    spans = in_steps(records.spans[records.spans["rank"] != SLOW_RANK], timed)
    away = spans[spans["kind"] == str(SpanKind.OFF_CPU)]
    us = float((away["end_us"] - away["start_us"]).sum()) / timed["step"].nunique()
    return us / _step_us(records) / (ranks - 1)
