"""The planner's tables of the tensor axis are what ranks record and hold, and table 2 is what a layer keeps."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.forecast.peak import Layer, activation_bytes
from shardlab.models import GPT, GPTConfig
from shardlab.planner import ADAM, Setup, described, predicted_collectives, predicted_memory
from shardlab.planner.memory import divided, on_tensor_ranks

from shardlab.tensor_parallel import (  # isort: skip
    Column, OnSequence, OwnDropout, Row, gpt_plan, parallelize_module,
)  # fmt: skip
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import Role
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.oracle.tensor import TensorSetup, counted_tensor_collectives
from tests.tensor_parallel.test_engines import loss_of

CONFIG = GPTConfig(vocab_size=12, seq_len=8, num_layers=2, num_heads=4, hidden=16)
COLUMNS = ["op", "axis", "tag", "dtype", "numel", "bytes", "wire_bytes", "group_size"]
PLANS = {
    "whole": {},
    "logits in parts": {"gather_logits": False},
    "sequence": {"sequence_parallel": True},
    "regather": {"sequence_parallel": True, "regather": True, "gather_logits": False},
}
AXES = {"tp2": {"data": 1, "tensor": 2}, "tp4": {"data": 1, "tensor": 4}, "tp2 x dp2": {"data": 2, "tensor": 2}}


def build(config=CONFIG):
    return cases.seeded(lambda: GPT(config))


def step(engine, comm, micro_batches, clip):
    for micro_batch in range(micro_batches):
        tokens = torch.randint(0, 12, (3, 9), generator=torch.Generator().manual_seed(micro_batch))
        loss = loss_of(engine, tokens[:, :-1], tokens[:, 1:], comm)
        with engine.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
            engine.backward(loss)
    if clip:
        engine.clip_grad_norm_(1.0)
    engine.step()


def recorded(rank, axes, plan, strategy, options, micro_batches=1, clip=False):
    log = Log(flags=True)
    with Mesh(axes) as mesh:
        model = parallelize_module(build(), gpt_plan(CONFIG, **plan), mesh["tensor"])
        described_model = described(model)
        with build_engine(strategy, model, lambda tensors: torch.optim.AdamW(tensors), mesh, **options) as engine:
            with mesh.observed_by(log):
                step(engine, mesh["tensor"], micro_batches, clip)
            held = bytes_by_role(engine.live_tensors())
    events = [
        (str(e.op), str(e.axis), e.tag, e.dtype, e.numel, e.num_bytes, wire_bytes(e), e.group_size) for e in log.events
    ]
    return {str(role): held[role] for role in Role}, events, described_model


def setup_of(axes, plan, micro_batches):
    return TensorSetup(
        axes["tensor"], CONFIG.hidden, CONFIG.num_layers, CONFIG.vocab_size, CONFIG.seq_len, 3, micro_batches,
        data_ranks=axes["data"], **plan,
    )  # fmt: skip


def rows_of(table, rank):
    rows = table[table["rank"] == rank]
    assert list(rows["seq"]) == list(range(len(rows)))
    return [tuple(row[column] for column in COLUMNS) for row in rows.to_dict("records")]


@pytest.mark.parametrize("key", AXES)
def test_recorded_collectives_equal_predicted(pools, key):
    axes, micro_batches = AXES[key], 2 if key == "tp2" else 1
    for plan in PLANS.values():
        table = counted_tensor_collectives(setup_of(axes, plan, micro_batches))
        num_ranks = axes["data"] * axes["tensor"]
        results = pools(num_ranks).run(recorded, axes, plan, "bucketed", {}, micro_batches)
        for rank, (_, events, _) in enumerate(results):
            assert [event for event in events if event[1] == "tensor"] == rows_of(table, rank), plan


STRATEGIES = {
    "ddp": {},
    "bucketed": {"bucket_bytes": 2048},
    "zero1": {"bucket_bytes": 2048},
    "zero2": {"bucket_bytes": 2048},
    "zero3": {"bucket_bytes": 2048},
    "fsdp": {},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_at_rest_and_the_data_axis(pools, strategy):
    """With slices in the place of parameters, every table of the data axis is exact."""
    model = divided(described(build()), 2)
    names = [param.spec.name for param in model.params]
    units = {f"blocks.{i}": [name for name in names if name.startswith(f"blocks.{i}.")] for i in range(2)}
    setup = Setup(strategy, 2, clip=True, units=units, optimizer=ADAM, **STRATEGIES[strategy])
    memory = on_tensor_ranks(predicted_memory(model, setup), 2)
    collectives = on_tensor_ranks(predicted_collectives(model, setup), 2)
    results = pools(4).run(recorded, AXES["tp2 x dp2"], {}, strategy, STRATEGIES[strategy], 1, True)
    for rank, (held, events, found) in enumerate(results):
        assert found == model
        rows = memory[memory["rank"] == rank]
        assert dict(zip(rows["role"], rows["bytes"], strict=True)) == held
        of_engine = [event for event in events if event[1] == "data" or event[2] == "gradient norm"]
        assert of_engine == rows_of(collectives, rank)


class NativeDropout(nn.Dropout):
    """With a mask of one byte an element, which the paper counts, on the CPU too."""

    def forward(self, x):
        return torch.native_dropout(x, self.p, True)[0]


class PaperLayer(nn.Module):
    """The transformer layer that the paper counts: attention that stores its matrix, dropout in three places."""

    def __init__(self, hidden, num_heads):
        super().__init__()
        self.head_dim = hidden // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.matrix_dropout, self.dropout1, self.dropout2 = (NativeDropout(0.1) for _ in range(3))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).contiguous() for part in (self.q, self.k, self.v)
        )
        matrix = self.matrix_dropout((q @ k.transpose(-1, -2) * self.head_dim**-0.5).softmax(-1))
        x = x + self.dropout1(self.out((matrix @ v).transpose(1, 2).flatten(2)))
        return x + self.dropout2(self.down(functional.gelu(self.up(self.norm2(x)))))


def paper_plan(sequence_dim, regather):
    column, row = Column(sequence_dim=sequence_dim, regather=regather), Row(sequence_dim=sequence_dim)
    plan = {"q": column, "k": column, "v": column, "out": row, "up": column, "down": row}
    return plan if sequence_dim is None else {**plan, "norm[12]": OnSequence(), "dropout[12]": OwnDropout()}


PAPER = Layer(hidden=32, num_heads=4, seq_len=16, micro_batch=3)


def saved_bytes(rank, sequence_dim, regather):
    """Bytes that autograd keeps in a forward, weights and LayerNorm's two numbers a token left out."""
    with Mesh({"tensor": torch.distributed.get_world_size()}) as mesh:
        comm = mesh["tensor"]
        layer = PaperLayer(PAPER.hidden, PAPER.num_heads).bfloat16()
        # Replaced dropouts would be torch's own again, whose masks have two bytes on the CPU.
        plan = {name: style for name, style in paper_plan(sequence_dim, regather).items() if "dropout" not in name}
        parallelize_module(layer, plan, comm)
        seq_len = PAPER.seq_len // (1 if sequence_dim is None else comm.num_ranks)
        x = torch.randn(PAPER.micro_batch, seq_len, PAPER.hidden, dtype=torch.bfloat16, requires_grad=True)
        weights = {param.untyped_storage().data_ptr() for param in layer.parameters()}
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tensor.numel() != PAPER.micro_batch * seq_len:
                kept[storage.data_ptr()] = (tensor, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(x)
        found = sum(num_bytes for _, num_bytes in kept.values())
        y.sum().backward()
        return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_keeps_what_table_2_says(pools, num_ranks):
    for sequence_dim, regather in ((None, False), (1, True), (1, False)):
        is_cut = sequence_dim is not None
        expected = activation_bytes(PAPER, num_ranks, sequence_parallel=is_cut, regather=regather or not is_cut)
        assert pools(num_ranks).run(saved_bytes, sequence_dim, regather) == [expected] * num_ranks


def test_table_2():
    """s = 2048, b = 1, h = 12288, a = 96: GPT-3 of the paper, where 5 a s / h is 80."""
    layer = Layer(12288, 96, 2048, 1)
    sbh = 2048 * 12288
    assert activation_bytes(layer) == sbh * (34 + 80)
    assert activation_bytes(layer, 8) == sbh * (10 + 24 / 8 + 80 / 8)
    assert activation_bytes(layer, 8, sequence_parallel=True) == sbh * (34 / 8 + 80 / 8)
    assert activation_bytes(layer, 8, sequence_parallel=True, regather=False) == sbh * (4 + 30 / 8 + 80 / 8)
    assert activation_bytes(layer, 8, recompute="selective") == sbh * (10 + 24 / 8)
    assert activation_bytes(layer, 8, sequence_parallel=True, recompute="selective") == sbh * 34 / 8
    assert activation_bytes(layer, 8, recompute="full") == 2 * sbh
    with pytest.raises(ValueError, match="recompute: 'some' is not one of none, selective, full"):
        activation_bytes(layer, recompute="some")


def test_bad_setups_are_refused():
    with pytest.raises(ValueError, match="hidden: 0 is too small"):
        TensorSetup(2, 0, 1, 12, 8, 1)
    with pytest.raises(ValueError, match="dtype: 'int8' is not one of"):
        TensorSetup(2, 8, 1, 12, 8, 1, dtype="int8")
    with pytest.raises(ValueError, match="regather: True is given without sequence_parallel"):
        TensorSetup(2, 8, 1, 12, 8, 1, regather=True)
    with pytest.raises(ValueError, match=r"dim 0 of .*: 12 does not divide over 5"):
        divided(described(build()), 5)
