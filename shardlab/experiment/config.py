"""The checked configuration of a comparison: an error names the field and its allowed values, before a rank starts."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import nn

from shardlab.data_sets import load_text
from shardlab.engines import STRATEGIES, Strategy, engine_options
from shardlab.engines.guards.model_checks import check_batch_norms, check_optimizer
from shardlab.engines.guards.strategy_checks import check_strategy
from shardlab.engines.peers import TorchFSDP2
from shardlab.engines.step_tensors import StepTensors
from shardlab.experiment.directory import check_resume
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.trained.batches import divide, first_batch
from shardlab.experiment.trained.named_workload import builtin, workload_at
from shardlab.experiment.trained.tensor import TORCH_TP, divided_layers, with_plan
from shardlab.experiment.trained.workload import Workload
from shardlab.field_types import check_types
from shardlab.launch.placement import check_ranks
from shardlab.models import MODELS, GPTConfig
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.partition.ring_cost import Link
from shardlab.schedules import Schedule
from shardlab.units import AUTO, WrapPolicy, parse_wrap, wrap_text, wrapped_modules
from shardlab.vocabulary import MeshAxis, class_of, dtype_name

from shardlab.experiment.trained.pipelined import (  # isort: skip
    AND, MICRO_BATCHES_PER_RANK, Staged, check_pipe, schedules_of, staged,
)  # fmt: skip

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SEQUENCES_PER_RANK = 4
MOST = {"timeout_s": 1e9, "learning_rate": 1e38}  # what a timedelta, and float32, can be
MOST_IN_A_STEP = {"batch": 10**7, "accumulation": 10**7, "micro_batches": 10**4}  # with more one would not end
DATA_AXES = {MeshAxis.DATA, MeshAxis.REPLICA, MeshAxis.SHARD}
# What a workload of one's own says itself.
BUILTIN_FIELDS = ("model", "text", "seq_len", "learning_rate", "sequence_parallel")
# Fields that only some strategies take -> the option of the engine.
ENGINE_FIELDS = {
    "bucket_mib": "bucket_bytes", "partition": "partition", "sharding": "sharding", "shard_group": "sharding",
    "prefetch": "prefetch", "layout": "layout", "precision": "precision", "offload": "offload",
    "replicate_below": "replicate_below",
}  # fmt: skip


@dataclass(frozen=True)
class CompareConfig(CompareOptions):
    """One model, several strategies, the same data; the options are checked.

    The fields are those of ``CompareOptions``.

    Raises:
        ValueError: a field has an invalid value; the message names the field and the allowed values.
    """

    # Set by the checks; the configuration that a record has is made without.
    staged: ClassVar[Mapping[str, Staged]] = {}
    """By name, schedules on the model."""
    own_strategies: ClassVar[Mapping[str, Strategy]] = {}
    """Strategies of the reader's own among ``strategies``, by name."""
    place: ClassVar[str | None] = None
    """Where the workload is, FILE.py:NAME, if it was named so."""

    def __post_init__(self) -> None:
        """Check every field."""
        given: Any = self.model
        if callable(given):
            what = "a class" if isinstance(given, type) else class_of(given)
            raise ValueError(
                f"model: {what} was given, where a built-in model's name belongs; train your own with "
                "workload=Workload(model=lambda: Net(), data=..., loss=...)"
            )
        # First: the other checks compare and divide, and would say less of a wrong type.
        # These are checked where they are parsed.
        check_types(self, besides=("strategies", "schedule", "begins", "workload", "wrap"))
        self._check_numbers()
        self._check_pipe()
        self._check_strategies()
        if self.workload is None:
            _one_of("model", self.model, MODELS)
            _one_of("dtype", self.dtype, DTYPES)
        else:
            self._check_workload()
        check_ranks(self.ranks, self.device, self.strategies, self.transport, self.link)
        self._check_batch()
        # After the batch has been checked: a built-in workload is made from its rows.
        self.__dict__["trained"] = with_plan(self, self.trained)  # in the place of the cached property
        self._check_taken()
        self._check_engines()
        if self.link is not None:
            Link.parse(self.link)
        self._check_peers()
        self._check_stages()
        check_resume(self, self.resumed_rows)
        if self.workload is None:
            load_text(self.text, self.seq_len)

    def _check_numbers(self) -> None:
        whole = ("ranks", "steps", "batch", "seq_len", "accumulation", "shard_group", "tp", "pipe", "micro_batches")
        for field in (*whole, "save_every"):
            if (number := getattr(self, field)) is not None and number < 1:
                raise ValueError(f"{field}: {number} is below 1")
            if number is not None and number > (limit := MOST_IN_A_STEP.get(field, number)):
                raise ValueError(f"{field}: {number} is given; at most {limit} are allowed in a step")
        for field in ("learning_rate", "bucket_mib", "timeout_s", "clip"):
            most = MOST.get(field, math.inf)
            if (value := getattr(self, field)) is not None and not 0 < value < most:
                below = "" if most == math.inf else f" and below {most:g}"
                raise ValueError(f"{field}: {value} is not a finite number above 0{below}")
        for field, value in vars(self).items():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{field}: {value} was given; it must be a whole number of 64 bits")

    def _check_pipe(self) -> None:
        """Make the schedules of the axis of stages."""
        for field in ("schedule", "begins"):
            given: Any = getattr(self, field)
            object.__setattr__(self, field, (given,) if isinstance(given, str) else tuple(given))
        check_pipe(self)
        if self.pipe > 1:
            number = self.micro_batches or MICRO_BATCHES_PER_RANK * self.pipe
            for field in ("micro_batches", "accumulation"):
                object.__setattr__(self, field, number)
            if self.strategies == CompareOptions.strategies:
                object.__setattr__(self, "strategies", ("single", "ddp"))
        self.__dict__["schedules"] = schedules_of(self)

    def _check_strategies(self) -> None:
        given: Any = self.strategies
        if not isinstance(given, str | list | tuple | Strategy | type | NoneType):
            raise ValueError(f"strategies: {given!r:.60} was given; give one or several of {', '.join(STRATEGIES)}")
        all_given = (given,) if isinstance(given, str | Strategy | type) else tuple(given or ())
        if kind := next((one for one in all_given if isinstance(one, type)), None):
            named = next((repr(name) for name, ours in STRATEGIES.items() if ours is kind), "")
            wanted = named or f"one of it, {kind.__name__}()"
            raise ValueError(f"strategies: the class {kind.__name__} was given; give {wanted}")
        own = {one.name: one for one in all_given if isinstance(one, Strategy)}
        if wrong := [name for name in own if not re.fullmatch(r"\w[\w.+-]*", str(name))]:
            raise ValueError(
                f"strategies: a strategy of your own is named {wrong[0]!r}, and its records lie in a folder of that "
                "name; take letters, digits, '_', '-', '+' and '.', beginning with a letter"
            )
        if taken := sorted(own.keys() & STRATEGIES.keys()):
            raise ValueError(f"strategies: a strategy of your own is named {taken[0]!r}, as one of ours; rename it")
        self.__dict__["own_strategies"] = own
        object.__setattr__(
            self, "strategies", tuple(one.name if isinstance(one, Strategy) else one for one in all_given)
        )
        if not self.strategies:
            raise ValueError(f"strategies: none given; at least one is needed of {', '.join(STRATEGIES)}")
        for strategy in self.strategies:
            _one_of("strategies", self.inside(strategy), (*STRATEGIES, *self.own_strategies))
        if self.pipe > 1:
            if peer := next((one for one in self.strategies if one.startswith("torch_")), None):
                raise ValueError(f"strategies: pipe makes no stages of torch's own {peer!r}; leave it out")
            runs: list[str] = []
            for one in self.strategies:  # one process is trained without stages
                is_run = self.inside(one) != one or getattr(STRATEGIES.get(one), "is_alone", False)
                runs += [one] if is_run else [f"{one}{AND}{schedule}" for schedule in self.schedules]
            object.__setattr__(self, "strategies", tuple(runs))
        if len(set(self.strategies)) != len(self.strategies):
            raise ValueError(f"strategies: {', '.join(self.strategies)} repeats one; name each once")

    def _check_workload(self) -> None:
        """Find the workload, if its place was given, and refuse what it says itself."""
        if isinstance(self.workload, str):
            self.__dict__["place"] = self.workload
            object.__setattr__(self, "workload", workload_at(self.workload))
        if not isinstance(self.workload, Workload):
            raise ValueError(f"workload: {self.workload!r:.80} is no Workload, nor the place of one, FILE.py:NAME")
        for field in BUILTIN_FIELDS:
            if getattr(self, field) != getattr(CompareOptions, field):
                raise ValueError(f"{field}: only for the built-in models; {self.workload} says it itself; leave it out")
        dtypes = [dtype_name(param.dtype) for param in self.on_meta.parameters() if param.is_floating_point()]
        if self.dtype not in (CompareOptions.dtype, dtypes[0]):
            _one_of("dtype", self.dtype, DTYPES)
            raise ValueError(
                f"dtype: {self.dtype!r}, but the parameters of {self.workload} are {dtypes[0]}; make the model double "
                "in the workload, as with lambda: Net().double(), and its data too; or leave dtype out"
            )
        object.__setattr__(self, "dtype", dtypes[0])
        self._check_optimizer()
        if self.batch is not None and not self.workload.is_dataset:
            raise ValueError(f"batch: the data of {self.workload} comes in batches already; leave it out")
        if TORCH_TP in self.strategies:
            raise ValueError(f"strategies: {TORCH_TP!r} cuts a built-in GPT, not {self.workload}; leave it out")

    def _check_optimizer(self) -> None:
        """Refuse what no engine can call as an optimizer; of one that cannot be built without ranks they tell."""
        params = dict(self.on_meta.named_parameters())
        try:
            check_optimizer(self.workload.apart("optimizer").optimizer_of(StepTensors(params)), params.values())
        except Exception as error:
            if str(error).startswith("optimizer: "):
                raise

    def _check_batch(self) -> None:
        parts = max(self.data_ranks, 1) * self.accumulation  # with more tensor ranks than ranks, which is refused below
        if self.batch is not None and self.batch % parts:
            nearest = max(parts, round(self.batch / parts) * parts)
            raise ValueError(
                f"batch: {self.batch} sequences do not divide among {self.data_ranks} ranks x {self.accumulation} "
                f"micro-batches; a multiple of {parts} does, for example {nearest}"
            )

    def _check_taken(self) -> None:
        """Refuse options that no strategy takes: a record must not claim what had no effect."""
        for field, option in ENGINE_FIELDS.items():
            is_given = field != "shard_group" and getattr(self, field) != getattr(CompareOptions, field)
            if is_given and not any(self._has_use(field, one) for one in self.strategies):
                takers = ", ".join(filter(takes(option), STRATEGIES))
                raise ValueError(
                    f"{field}: only for {takers}, and the strategies are {', '.join(self.strategies)}; leave it out"
                )

    def _check_engines(self) -> None:
        """Make each strategy, which refuses what it does not take: on a rank it would be too late."""
        if self.wrap_policy != AUTO:
            wrapped_modules(self.on_meta, self.wrap_policy)
        made = [one for one in map(self.strategy, self.strategies) if one is not None]
        saves = "save_every" if self.save_every is not None else "resume" if self.resume is not None else ""
        for one in made:
            if one.precision.compute is not None:
                check_batch_norms(self.on_meta, one.precision)
            check_strategy(one)
            if saves and one.ranks_differ:
                raise ValueError(
                    f"{saves}: ranks of {one.name!r} have parameters of their own (ranks_differ), and a checkpoint "
                    "keeps those of one; leave it out"
                )
            if len(one.axes) > 2 or len({*one.axes} & DATA_AXES) < len(one.axes):
                raise ValueError(
                    f"strategies: the axes of {one.name!r} are {', '.join(one.axes)}; compare makes one or two of "
                    f"{', '.join(sorted(DATA_AXES))}, outer first"
                )
        if over_two := [one.name for one in made if len(one.axes) == 2]:
            self._check_groups(over_two[0])
        elif self.shard_group is not None:
            raise ValueError(
                "shard_group: no strategy here has two axes; take fsdp with sharding=hybrid_shard, or one of your own "
                "that has, or leave shard_group out"
            )

    def _check_groups(self, strategy: str) -> None:
        """The groups of a strategy of two axes."""
        if self.trained.takes_mesh:
            raise ValueError(f"strategies: {strategy!r} has two data axes, and the loss sends over one; leave it out")
        if self.shard_group is None and self.shards == 1:
            raise ValueError(
                f"ranks: {strategy!r} has two axes and needs a group size above 1 that divides the data ranks, and "
                f"{self.data_ranks} has none; take another number of ranks"
            )
        if self.data_ranks % self.shards != 0:
            raise ValueError(
                f"shard_group: groups of {self.shards} do not divide {self.data_ranks} data ranks; take a divisor"
            )

    def _check_peers(self) -> None:
        """Refuse what torch's own engines cannot do."""
        if TorchFSDP2.name in self.strategies:
            TorchFSDP2.check_params(dict(self.on_meta.named_parameters()))
        peers = [name for name in self.strategies if name.startswith("torch_")]
        if self.broadcast_buffers and len(peers) == len(self.strategies):
            raise ValueError(
                f"broadcast_buffers: torch's own engines do as they do; leave it out of {', '.join(peers)}"
            )
        if self.link is not None and peers:
            raise ValueError(f"link: torch's own engines bypass an emulated link; leave out {', '.join(peers)}")
        if TORCH_TP in self.strategies:
            config = MODELS[self.model]
            if not isinstance(config, GPTConfig):
                raise ValueError(f"model: 'torch_tp' cuts a GPT, not {self.model!r}")
            if config.kv_heads % self.ranks:
                raise ValueError(
                    f"ranks: 'torch_tp' gives each rank whole heads, and the {config.kv_heads} of {self.model} do not "
                    f"divide among {self.ranks} ranks"
                )

    def _check_stages(self) -> None:
        """Cut the model, and try on a batch what goes from stage to stage."""
        if self.pipe == 1:
            return
        if self.trained.takes_mesh:
            raise ValueError("loss: it sends over the mesh, and with pipe only the last stage has it; leave pipe out")
        batch = self.first_batch()
        if self.trained.divides_rows:
            batch = divide(batch, 0, self.data_ranks).batch
        rounds = any(one.precision.compute is not None for one in map(self.strategy, self.strategies) if one)
        layers = divided_layers(self, self.trained)
        self.__dict__["staged"] = {
            name: staged(self.trained, self.on_meta, schedule, self.begins, batch, rounds=rounds, divided=layers)
            for name, schedule in self.schedules.items()
        }
        for one in self.staged.values() if self.wrap_policy != AUTO else ():
            for rank in range(self.pipe):
                try:
                    wrapped_modules(one.module_of(self.on_meta, rank), self.wrap_policy)
                except ValueError as error:
                    raise ValueError(f"{error}; said of the stages of rank {rank}") from error

    @cached_property
    def schedules(self) -> dict[str, Schedule]:
        """By name, those of the axis of stages; set by the check of it, and read again of a record's configuration."""
        return schedules_of(self)

    def inside(self, run: str) -> str:
        """The strategy of a run, which with stages is named after its schedule too."""
        return run.rpartition(AND)[0] if run.rpartition(AND)[2] in self.schedules and AND in run else run

    def staged_of(self, run: str) -> Staged | None:
        """The schedule of a run on the model; None of a run without stages."""
        return self.staged[run.rpartition(AND)[2]] if self.inside(run) != run else None

    @cached_property
    def trained(self) -> Workload:
        """What is trained: the workload, or that of the built-in model."""
        return self.workload or builtin(self, self.micro_batch_rows)

    @cached_property
    def on_meta(self) -> nn.Module:
        """The module for its names and shapes, if possible without memory; nobody changes it."""
        return self.trained.on_meta()

    def __getstate__(self) -> dict[str, Any]:
        """What a rank needs: it builds its own module."""
        return {name: value for name, value in self.__dict__.items() if name != "on_meta"}

    @property
    def title(self) -> str:
        """What is trained, in a word."""
        return self.model if self.workload is None else str(self.workload)

    @property
    def wrap_policy(self) -> WrapPolicy:
        """Which modules are units: what was chosen here, or else by the workload."""
        if self.wrap == CompareOptions.wrap:
            return self.trained.wrap
        return parse_wrap(self.wrap) if isinstance(self.wrap, str) else self.wrap

    @property
    def data_ranks(self) -> int:
        """Number of ranks that train on different rows."""
        return self.ranks // self.tp // self.pipe

    @property
    def shards(self) -> int:
        """Ranks in a shard group of hybrid_shard."""
        return self.shard_group if self.shard_group is not None else _largest_divisor(self.data_ranks)

    def strategy(self, name: str, without: tuple[str, ...] = ()) -> Strategy | None:
        """The strategy of a name, with the options that it takes, or ``without`` some; None of torch's own."""
        name = self.inside(name)
        if name in self.own_strategies:
            return self.own_strategies[name]
        kind, options = STRATEGIES[name], [option for option in engine_options(name) if option not in without]
        return kind(**self.engine_options(options)) if issubclass(kind, Strategy) else None

    def is_alone(self, strategy: str) -> bool:
        """Whether a strategy trains in one process, on the rows of all ranks."""
        made = self.strategy(strategy)
        return made is not None and made.is_alone

    def divides(self, strategy: str) -> bool:
        """Whether the layers of the model are divided: not in one process, and not where torch's own engine does it."""
        return self.tp > 1 and strategy != TORCH_TP and not self.is_alone(strategy)

    def mesh_axes(self, strategy: str) -> dict[str, int]:
        """The mesh a strategy needs."""
        if strategy == TORCH_TP:
            return {"data": 1, "tensor": self.ranks}  # every rank trains on the whole batch
        if self.is_alone(strategy):
            return {"data": 1}
        stages = {} if self.pipe == 1 else {MeshAxis.PIPE.value: self.pipe}
        tensor = {} if self.tp == 1 else {"tensor": self.tp}
        *outer, inner = self._axes(strategy)
        size = self.shards if outer else self.data_ranks
        return {**stages, **dict.fromkeys(outer, self.data_ranks // size), inner: size, **tensor}

    def _axes(self, strategy: str) -> tuple[str, ...]:
        """Those over which a strategy averages, outer first."""
        made = self.strategy(strategy, ("wrap",))  # which needs the workload, of which records keep the name alone
        return (MeshAxis.DATA,) if made is None else made.axes

    def has_two_axes(self, strategy: str) -> bool:
        """Whether a strategy averages over two axes, and so needs groups of ranks; one that only a record names may."""
        is_known = self.inside(strategy) in {*self.own_strategies, *STRATEGIES}
        return not is_known or len(self._axes(strategy)) == 2

    def precision_of(self, strategy: str) -> str:
        """In which a strategy computes: 'full' if it takes none, 'rounded' if it is the reader's own and rounds."""
        if (own := self.own_strategies.get(self.inside(strategy))) is not None:
            return "rounded" if own.rounds or own.precision.compute is not None else "full"
        return self.precision if takes("precision")(self.inside(strategy)) else "full"

    def scales_loss(self, strategy: str) -> bool:
        """Whether a strategy computes in float16 and so needs a gradient scaler."""
        return self.precision_of(strategy) == "fp16"

    @property
    def global_batch(self) -> int:
        """Sequences in one step, over all ranks and micro-batches."""
        return self.batch or SEQUENCES_PER_RANK * self.data_ranks * self.accumulation

    @property
    def micro_batch_rows(self) -> int:
        """Sequences in one micro-batch, over all ranks."""
        return self.global_batch // self.accumulation

    def first_batch(self) -> Any:
        """The first batch, see ``batches.first_batch``."""
        return first_batch(self.trained, self.data_ranks, self.seed, self.micro_batch_rows)

    @property
    def resumed_rows(self) -> int | None:
        """Rows of a global batch, which a resumed run must share; None where data come in batches of their own."""
        return self.global_batch if self.workload is None or self.workload.is_dataset else None

    @property
    def bucket_bytes(self) -> int:
        """Capacity of a bucket."""
        return max(1, int(self.bucket_mib * 1024**2))

    def alone(self, strategy: str, **changes: Any) -> "CompareConfig":
        """Of one run, without what its strategy has no use for, and with some fields changed."""
        unused = {name: getattr(CompareOptions, name) for name in ENGINE_FIELDS if not self._has_use(name, strategy)}
        if self.pipe > 1:
            unused["accumulation"] = CompareOptions.accumulation  # micro_batches says it
        one: Any = self.own_strategies.get(strategy, strategy)
        return replace(self, strategies=(one,), **unused | changes)

    def _has_use(self, field: str, strategy: str) -> bool:
        """Whether an option of engines has an effect on a strategy."""
        strategy = self.inside(strategy)
        own = self.own_strategies.get(strategy)
        if own is None:
            return takes(ENGINE_FIELDS[field])(strategy)
        has_buckets = field == "bucket_mib" and takes_buckets(own)
        return has_buckets or (field == "shard_group" and len(own.axes) == 2)

    def ranks_differ(self, strategy: str) -> bool:
        """Whether ranks hold parameters of their own, by design."""
        own = self.own_strategies.get(self.inside(strategy))
        return own is not None and own.ranks_differ

    def broadcasts_buffers(self, strategy: str) -> bool:
        """Whether a strategy is told to broadcast buffers."""
        return self.broadcast_buffers and not strategy.startswith("torch_")

    def engine_options(self, allowed: Collection[str]) -> dict[str, Any]:
        """The engine options among ``allowed`` that a strategy takes."""
        fields_of = {**{option: option for option in ENGINE_FIELDS.values()}, "wrap": "wrap_policy"}
        return {option: getattr(self, field) for option, field in fields_of.items() if option in allowed}

    def as_dict(self, strategy: str) -> dict[str, Any]:
        """The fields for the manifest of one strategy, without options it does not take."""
        ignored = {field for field, option in ENGINE_FIELDS.items() if not takes(option)(self.inside(strategy))}
        if self.workload is not None:
            ignored |= set(BUILTIN_FIELDS)
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ignored}
        if self.broadcast_buffers and not self.broadcasts_buffers(strategy):
            del known["broadcast_buffers"]
        if self.inside(strategy) in self.own_strategies:
            known["precision"] = self.precision_of(strategy)
        known["batch"] = self.resumed_rows  # as decided, here and below: a default may depend on the number of ranks
        if self.has_two_axes(strategy):
            known["shard_group"] = self.shards
        wrap = wrap_text(self.wrap_policy)  # the workload's, if it was not chosen here
        return {**known, "wrap": wrap, "workload": None if self.workload is None else str(self.workload)}


def takes(option: str) -> Callable[[str], bool]:
    """Whether a strategy takes an engine option."""
    return lambda strategy: strategy in STRATEGIES and option in engine_options(strategy)


def takes_buckets(own: Any) -> bool:
    """Whether a strategy of the reader's own has the default size of buckets, in whose place comes ours."""
    return getattr(own, "bucket_bytes", None) == DEFAULT_BUCKET_BYTES


def _largest_divisor(number: int) -> int:
    """The largest divisor below the number; 1 for 1."""
    return next(divisor for divisor in range(max(1, number // 2), 0, -1) if number % divisor == 0)


def _one_of(field: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{field}: {value!r} is not one of {', '.join(allowed)}")
