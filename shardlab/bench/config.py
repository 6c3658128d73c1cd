"""The checked configuration of a bench: which engines are compared, on which workloads, for how many rounds.

There are three workloads because an engine can lose time in three ways: by slowing compute down, by sending slowly, and
by its cost per message, however small. Torch's engines run at their best: DDP has a static graph,
``ZeroRedundancyOptimizer`` broadcasts whole buckets, and ``fully_shard`` keeps the root gathered after forward, as it
does by default. The pair "itself" is one engine against the same: how far its ratio lies from 1 is what a ratio means
here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardlab.engines import engine_options
from shardlab.field_types import check_types
from shardlab.launch.checks import check_ranks
from shardlab.models import MODELS, GPTConfig

QUICK_ROUNDS, FULL_ROUNDS = 6, 42  # three engines have six orders: one session, or seven


@dataclass(frozen=True)
class Workload:
    """A training that is timed.

    Attributes:
        name: name in the results.
        model: a name from ``models.MODELS``.
        rows: sequences per rank and step.
        seq_len: tokens of a sequence.
        round_factor: factor on the number of rounds: short steps scatter more.
    """

    name: str
    model: str
    rows: int
    seq_len: int
    round_factor: int = 1

    def __post_init__(self) -> None:
        """Check every field."""
        if self.model not in MODELS:
            raise ValueError(f"model: {self.model!r} is not one of {', '.join(MODELS)}")
        for name in ("rows", "seq_len", "round_factor"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name}: {number} is below 1")


@dataclass(frozen=True)
class Contender:
    """An engine and how it is built.

    Attributes:
        name: name in the results.
        strategy: a name from ``engines.STRATEGIES``.
        options: options of that strategy.
        over_tensor: whether the ranks are the mesh's tensor axis, not its data axis.
        parallelized: whether ``parallelize_module`` divides the model first, by the plan for GPTs.
        static_graph: whether torch's DDP is told that every step has the same graph; true of all workloads here.
    """

    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    over_tensor: bool = False
    parallelized: bool = False
    static_graph: bool = False

    def __post_init__(self) -> None:
        """Check strategy and options."""
        if unknown := set(self.options) - set(engine_options(self.strategy)):
            raise ValueError(f"options: {self.strategy!r} does not take {', '.join(sorted(unknown))}")

    def mesh_axes(self, num_ranks: int) -> dict[str, int]:
        """The mesh it trains on."""
        return {"data": 1, "tensor": num_ranks} if self.over_tensor else {"data": num_ranks}


@dataclass(frozen=True)
class Pair:
    """One of our engines and its counterpart in torch, or an engine twice."""

    ours: Contender
    theirs: Contender

    @property
    def name(self) -> str:
        """The name of our side."""
        return self.ours.name

    def check(self, model: str, num_ranks: int) -> None:
        """Check that the ranks can divide the model."""
        config = MODELS[model]
        if self.ours.over_tensor and not (isinstance(config, GPTConfig) and config.kv_heads % num_ranks == 0):
            raise ValueError(f"ranks: {num_ranks} ranks do not divide the heads of {model}; leave out {self.name!r}")


# Torch's engines get torch's plain process groups, so that observing them costs no time.
_UNOBSERVED = MappingProxyType({"observed": False})


def _pair(ours: str, theirs: str, *, static_graph: bool = False, **at_its_best: Any) -> Pair:
    options = {**_UNOBSERVED, **at_its_best}
    return Pair(Contender(ours, ours), Contender(theirs, theirs, options, static_graph=static_graph))


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("compute", "gpt-30m", rows=4, seq_len=128),
            Workload("communication", "gpt-30m", rows=1, seq_len=32),
            Workload("latency", "gpt-1m", rows=4, seq_len=64, round_factor=4),
        )
    }
)
PAIRS: Mapping[str, Pair] = MappingProxyType(
    {
        pair.name: pair
        for pair in (
            _pair("bucketed", "torch_ddp", static_graph=True),
            # One message per owner instead of one per parameter.
            _pair("zero1", "torch_zero1", static_graph=True, parameters_as_bucket_view=True),
            # None is fully_shard's own default: the root, which backward begins with, is not gathered again.
            _pair("fsdp", "torch_fsdp2", reshard_after_forward=None),
            Pair(
                Contender("tensor_parallel", "single", over_tensor=True, parallelized=True),
                Contender("torch_tp", "torch_tp", _UNOBSERVED, over_tensor=True),
            ),
            Pair(Contender("itself", "bucketed"), Contender("bucketed", "bucketed")),
        )
    }
)


@dataclass(frozen=True)
class BenchConfig:
    """A whole bench.

    Attributes:
        ranks: number of ranks; one alone shows what an engine costs apart from communication.
        rounds: timed steps of each engine, at least 2.
        workloads: see ``WORKLOADS``.
        pairs: see ``PAIRS``.
        device: auto, cpu or cuda.
        transport: transport of our engines: 'shared_memory' or 'gloo', not where ranks send by NCCL; None for the
            first that works. Torch's always use gloo or NCCL, so 'gloo' compares the engines alone.
        timeout_s: a collective that takes longer ends the bench.

    Raises:
        ValueError: a field has an invalid value; the message names the field and the allowed values.
    """

    ranks: int = 2
    rounds: int = QUICK_ROUNDS
    workloads: tuple[Workload, ...] = tuple(WORKLOADS.values())
    pairs: tuple[Pair, ...] = tuple(PAIRS.values())
    device: str = "auto"
    transport: str | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, besides=("workloads", "pairs"))
        for name, least in (("ranks", 1), ("rounds", 2)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"{name}: {number} is below {least}")
        for name in ("workloads", "pairs"):
            names = [entry.name for entry in getattr(self, name)]
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{name}: {', '.join(names) or 'none'}; at least one is needed, and each only once")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not above 0")
        check_ranks(self.ranks, self.device, [pair.theirs.strategy for pair in self.pairs], self.transport)
        for workload in self.workloads:
            for pair in self.pairs:
                pair.check(workload.model, self.ranks)

    @property
    def num_rounds(self) -> int:
        """Number of rounds over all workloads and pairs, for a progress bar."""
        return len(self.pairs) * sum(self.rounds * workload.round_factor for workload in self.workloads)


def chosen(field_name: str, names: Sequence[str], known: Mapping[str, Any]) -> tuple[Any, ...]:
    """The named entries of a table.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{field_name}: {unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(known[name] for name in names)
