"""Bytes at rest and messages, counted by hand, are those that ranks record, and that the engine's dry run lists.

To the byte, in order, per rank. To put another engine or option under the oracle, add one line to CASES.
"""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import pandas as pd
import pytest
import torch

from shardlab.comm.foretold import ForetoldMesh
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import PRECISIONS
from shardlab.partition.buckets import bucket_layouts
from shardlab.planner import ADAM, SGD, SGD_MOMENTUM, Setup, described, predicted_collectives, predicted_memory
from shardlab.planner.groups import groups_of
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.trace.observed import wire_bytes
from shardlab.units import units_of
from shardlab.vocabulary import Partition, Role
from tests.comm.test_communicator import Log
from tests.dist import cases, test_buffers
from tests.oracle.collectives import counted_collectives

BUCKET_BYTES = 512  # several buckets in each of the models
UNUSED = {"Unused": ("spare.weight", "spare.bias", "sometimes.weight", "sometimes.bias")}  # in step 0
OPTIMIZERS = {
    "adamw": (lambda tensors: torch.optim.AdamW(tensors, lr=1e-2), ADAM),
    "momentum": (lambda tensors: torch.optim.SGD(tensors, lr=1e-2, momentum=0.9), SGD_MOMENTUM),
    "sgd": (lambda tensors: torch.optim.SGD(tensors, lr=1e-2), SGD),
}
COLUMNS = ["op", "axis", "tag", "dtype", "numel", "bytes", "wire_bytes", "group_size"]


@dataclass(frozen=True)
class Case:
    """A strategy; ``options`` go to the engine and to the setup alike."""

    strategy: str
    options: dict = field(default_factory=dict)
    micro_batches: int = 1
    clip: bool = False
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    wrap: str = "auto"
    shard_group_size: int | None = None
    precision: str | None = None

    def __str__(self) -> str:
        options = [f"{value}" for key, value in self.options.items() if key != "bucket_bytes"]
        more = [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1) + ["clip"] * self.clip
        other = [self.optimizer] * (self.optimizer != "adamw") + [str(self.dtype)] * (self.dtype != torch.float64)
        group = [f"in groups of {self.shard_group_size}"] * (self.shard_group_size is not None)
        mixed = [] if self.precision is None else [self.precision]
        return " ".join([self.strategy, *options, *group, *mixed, *more, *other])

    def setup(self, num_ranks: int, units: dict) -> Setup:
        return Setup(
            self.strategy, num_ranks, units=units, micro_batches=self.micro_batches, clip=self.clip,
            optimizer=OPTIMIZERS[self.optimizer][1], shard_group_size=self.shard_group_size, **self.dtypes(),
            **self.options,
        )  # fmt: skip

    @property
    def kinds(self) -> list[str]:
        """Models; a float32 buffer added to 16-bit activations makes them float32, which no 16-bit layer takes."""
        return [kind for kind in cases.MODELS if self.precision is None or kind != "Frozen"]

    def dtypes(self) -> dict[str, str]:
        if self.precision is None:
            return {}
        precision = PRECISIONS[self.precision]
        dtypes = {"compute_dtype": precision.compute, "reduce_dtype": precision.reduce}
        return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype is not None}

    def axes(self, num_ranks: int) -> dict[str, int]:
        size = self.shard_group_size
        return {"data": num_ranks} if size is None else {"replica": num_ranks // size, "shard": size}

    def wrap_of(self, kind: str) -> str:
        """The policy; where ranks skip modules, all of them are one unit."""
        return "root" if kind == "Unused" else self.wrap

    def engine(self, kind: str, mesh: Mesh):
        options = {"wrap": self.wrap_of(kind)} if self.strategy == "fsdp" else {}
        options |= {} if self.precision is None else {"precision": self.precision}
        model = cases.build(kind).to(self.dtype)
        return build_engine(self.strategy, model, OPTIMIZERS[self.optimizer][0], mesh, **self.options, **options)

    def units_of(self, kind: str) -> dict[str, list[str]]:
        """Names of the parameters of every unit but the root."""
        return units_of(cases.build(kind), self.wrap_of(kind))


SMALL = {"bucket_bytes": BUCKET_BYTES}
CASES = (
    Case("ddp"),
    Case("ddp", micro_batches=2, clip=True),
    Case("bucketed"),
    Case("bucketed", SMALL, micro_batches=3, clip=True),
    *(Case(name, {**SMALL, "partition": str(way)}) for name in ("zero1", "zero2", "zero3") for way in Partition),
    *(Case(name, micro_batches=2, clip=True) for name in ("zero1", "zero2", "zero3")),
    *(Case(name, SMALL, optimizer=optimizer) for name in ("bucketed", "zero1") for optimizer in ("momentum", "sgd")),
    Case("ddp", dtype=torch.float32),
    *(Case(name, SMALL, dtype=torch.float32) for name in ("zero2", "zero3")),
    *(Case("fsdp", {"layout": layout, "prefetch": depth}) for layout, depth in (("flat", 0), ("dim0", 1), ("flat", 2))),
    *(Case("fsdp", {"sharding": name}, 2, clip=True) for name in ("full_shard", "shard_grad_op", "no_shard")),
    Case("fsdp", {"sharding": "shard_grad_op", "layout": "dim0"}, optimizer="sgd", dtype=torch.float32),
    Case("fsdp", {"sharding": "no_shard"}, dtype=torch.float32, precision="bf16"),
    Case("fsdp", {"layout": "dim0"}, 2, dtype=torch.float32, precision="fp16"),
    *(
        Case(name, {**SMALL, "partition": str(way)}, clip=True, dtype=torch.float32, precision="bf16")
        for name in ("zero1", "zero2", "zero3")
        for way in (Partition.ELEMENTS, Partition.BALANCED)
    ),
    *(Case(name, SMALL, 2, optimizer="sgd", precision="fp16") for name in ("zero1", "zero2", "zero3")),
    Case("fsdp", wrap="root"),
    *(Case("fsdp", {"partition": str(way)}, 2, clip=True) for way in Partition if way is not Partition.ELEMENTS),
    Case("fsdp", {"partition": "balanced", "sharding": "shard_grad_op", "replicate_below": 20}, dtype=torch.float32),
    Case("fsdp", {"partition": "contiguous", "offload": "all"}, dtype=torch.float32, precision="bf16"),
    *(Case("fsdp", {"replicate_below": 20, "layout": layout}, 2, clip=True) for layout in ("flat", "dim0")),
    *(Case(name, {"broadcast_buffers": True}, micro_batches=2) for name in ("ddp", "zero2", "zero3", "fsdp")),
    *(Case("fsdp", {"offload": offload}, clip=True) for offload in ("parameters", "all")),
    Case("fsdp", {"offload": "all", "sharding": "no_shard"}, 2),
    Case("fsdp", {"offload": "parameters", "replicate_below": 20}, dtype=torch.float32, precision="bf16"),
)
HYBRIDS = (
    Case("fsdp", {"sharding": "hybrid_shard", "layout": "flat"}, clip=True, shard_group_size=2),
    Case("fsdp", {"sharding": "hybrid_shard", "layout": "dim0"}, 2, clip=True, shard_group_size=2),
    Case("fsdp", {"sharding": "hybrid_shard", "layout": "flat"}, clip=True, shard_group_size=1),
    Case("fsdp", {"sharding": "hybrid_shard", "layout": "dim0"}, clip=True, shard_group_size=4),
    Case("fsdp", {"sharding": "hybrid_shard", "replicate_below": 20}, 2, clip=True, shard_group_size=2),
    *(Case("fsdp", {"sharding": "hybrid_shard", "broadcast_buffers": True}, shard_group_size=2) for _ in range(2)),
    *(
        Case("fsdp", {"sharding": "hybrid_shard", "partition": str(way)}, 2, clip=True, shard_group_size=2)
        for way in Partition
        if way is not Partition.ELEMENTS
    ),
)


def observe(engine, case, kind, log, rank, num_ranks):
    """One step, its events, and what is held before the gradients are forgotten."""
    for micro_batch in range(case.micro_batches):
        x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, 0, micro_batch, num_ranks))
        x, y = (part.to(case.dtype) if part.is_floating_point() else part for part in (x, y))
        with engine.no_sync() if micro_batch < case.micro_batches - 1 else nullcontext():
            engine.backward(cases.loss_of(engine(x), y))
    if case.clip:
        engine.clip_grad_norm_(1.0)
    engine.step()
    held = bytes_by_role(engine.live_tensors())
    events = [
        (str(e.op), str(e.axis), e.tag, e.dtype, e.numel, e.num_bytes, wire_bytes(e), e.group_size) for e in log.events
    ]
    return {str(role): held[role] for role in Role}, events


def recorded(rank, todo, num_ranks):
    """What ``rank`` holds and issues in each case."""
    found, meshes = [], {}
    with ExitStack() as stack:
        for case, kind in todo:
            log, size = Log(flags=True), case.shard_group_size
            if size not in meshes:
                meshes[size] = stack.enter_context(Mesh(case.axes(num_ranks)))
            with case.engine(kind, meshes[size]) as engine:
                with meshes[size].observed_by(log):
                    found.append(observe(engine, case, kind, log, rank, num_ranks))
                engine.zero_grad()
    return found


def planned(kind, case, num_ranks):
    """The model and the setup of a case."""
    model = described(cases.build(kind).to(case.dtype), unused=UNUSED.get(kind, ()))
    return model, case.setup(num_ranks, case.units_of(kind) if case.strategy == "fsdp" else {})


def predicted(kind, case, num_ranks):
    """The same by arithmetic, rank by rank."""
    model, setup = planned(kind, case, num_ranks)
    memory = predicted_memory(model, setup).to_dict("records")
    collectives = counted_collectives(model, setup).to_dict("records")
    for rank in range(num_ranks):
        held = {row["role"]: row["bytes"] for row in memory if row["rank"] == rank}
        rows = [row for row in collectives if row["rank"] == rank]
        assert [row["seq"] for row in rows] == list(range(len(rows)))
        yield held, [tuple(row[column] for column in COLUMNS) for row in rows]


STRATEGIES = tuple(dict.fromkeys(case.strategy for case in CASES))
# All at an odd number of ranks, some at an even one; four ranks are those of the hybrids.
PLACES = {
    **{(name, 3): [case for case in CASES if case.strategy == name] for name in STRATEGIES},
    **{(name, 2): [case for case in CASES if case.strategy == name][::3] for name in STRATEGIES},
    ("hybrids", 4): HYBRIDS,
}


@pytest.mark.parametrize(("name", "num_ranks"), PLACES)
def test_recorded_equals_predicted(pools, name, num_ranks):
    """With a quarter of the models, by turns: those that one case leaves out are the next ones'."""
    todo = [(case, kind) for place, case in enumerate(PLACES[name, num_ranks]) for kind in case.kinds[place % 4 :: 4]]
    for (case, kind), *by_rank in zip(todo, *pools(num_ranks).run(recorded, todo, num_ranks), strict=True):
        for rank, (found, (held, events)) in enumerate(zip(by_rank, predicted(kind, case, num_ranks), strict=True)):
            assert found == (held, events), f"{case}: {kind} on rank {rank}"
            assert events


@pytest.mark.parametrize(("name", "num_ranks"), PLACES)
def test_the_dry_run_lists_what_is_counted(name, num_ranks):
    for place, case in enumerate(PLACES[name, num_ranks]):
        for kind in case.kinds[place % 4 :: 4]:
            model, setup = planned(kind, case, num_ranks)
            counted, told = counted_collectives(model, setup), predicted_collectives(model, setup)
            pd.testing.assert_frame_equal(told, counted, obj=f"{case}: {kind}")


# A parameter whose memory is transposed has its bucket's gradient in another order: slower when torch adds to it.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.filterwarnings("ignore:precision. float16 without a GradScaler")
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_one_rank_holds_everything_and_sends_nothing(strategy):
    """However parameters are cut and partitioned: what counts is what is cast, and where it lies."""
    cases = [case for case in CASES if case.precision or "offload" in case.options or case.micro_batches > 1]
    for place, case in enumerate((Case("single"), *cases)):
        if case.strategy == strategy:
            kind, log = ("SmallGPT", "Uneven", "Unused")[place % 3], Log(flags=True)
            with case.engine(kind, Mesh.alone()) as engine, engine.mesh.observed_by(log):
                [expected] = predicted(kind, case, 1)
                assert observe(engine, case, kind, log, 0, 1) == expected, f"{case}: {kind}"
                assert expected[1] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_of_several_dtypes_are_sent_after_the_step(strategy):
    """By an engine without ranks, and in the plan."""
    log, x = Log(flags=True), torch.ones(2, 7, dtype=torch.float64)
    with (
        ForetoldMesh({"data": 3}, 1) as mesh,
        build_engine(strategy, test_buffers.build(), torch.optim.Adam, mesh, broadcast_buffers=True) as engine,
        mesh.observed_by(log),
    ):
        engine.backward(engine(x).sum())
        engine.step()
        events = list(log.events)  # closing gathers
    sent = [(str(e.op), str(e.axis), e.tag, e.dtype, e.numel, e.num_bytes, wire_bytes(e), e.group_size) for e in events]
    setup = Setup(strategy, 3, units=units_of(test_buffers.build(), "auto"), broadcast_buffers=True)
    told = counted_collectives(described(test_buffers.build()), setup, ranks=[1])
    assert sent == list(told[COLUMNS].itertuples(index=False, name=None))
    wanted = [("broadcast", "int64", 2), ("broadcast", "float64", 20), ("broadcast", "bool", 5)]
    assert [(event.op, event.dtype, event.numel) for event in events[-3:]] == wanted


@pytest.mark.parametrize("partition", list(Partition))
def test_buckets_are_the_engines_buckets(partition):
    for kind in cases.MODELS:
        model = cases.build(kind)
        setup = Setup("zero1", 3, bucket_bytes=BUCKET_BYTES, partition=partition)
        params = dict(model.named_parameters())
        layouts = bucket_layouts(params, 3, BUCKET_BYTES, partition)
        groups = groups_of(described(model), setup)
        assert [group.layout for group in groups] == list(layouts)
        assert [tuple(group.params) for group in groups] == [layout.names for layout in layouts]
        assert [group.trainable for group in groups] == [
            any(params[name].requires_grad for name in layout.names) for layout in layouts
        ]
