"""Checkpoints across both axes: saved at one mesh, loaded at another, trained on to where one process ends."""

import json
from functools import cache
from math import prod

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.models import GPT, GPTConfig, next_token_loss
from shardlab.tensor_parallel import Column, Row, Vocabulary, gpt_plan, parallelize_module
from tests.dist.every_engine import step_on
from tests.tensor_parallel.test_engines import OPTIMIZERS

CONFIG = GPTConfig(vocab_size=12, seq_len=8, num_layers=2, num_heads=4, hidden=8, tied=False)
ROWS = 12
MESHES = {
    "tp2 x dp2": {"data": 2, "tensor": 2},
    "tp1 x dp3": {"data": 3, "tensor": 1},
    "dp3": {"data": 3},
    "tp4": {"data": 1, "tensor": 4},
    "dp2": {"data": 2},
    "tp2": {"data": 1, "tensor": 2},
    "hybrid": {"replica": 1, "shard": 2, "tensor": 2},
}
STRATEGIES = {
    "bucketed": ("bucketed", {}),
    "zero1": ("zero1", {"bucket_bytes": 512}),
    "zero2": ("zero2", {"partition": "balanced"}),
    "zero3": ("zero3", {"bucket_bytes": 512}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0-small": ("fsdp", {"layout": "dim0", "replicate_below": 20}),
    "hybrid": ("fsdp", {"sharding": "hybrid_shard"}),
}


def build(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(CONFIG).double()
        model.register_buffer("shift", torch.rand(3, dtype=torch.float64))
        return model


def batch(step, rank=0, num_ranks=1):
    tokens = torch.randint(0, 12, (ROWS, 9), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]
    return tokens[:, :-1], tokens[:, 1:]


def engine_on(mesh, strategy, seed, plan=None):
    model = build(seed)
    if "tensor" in mesh.axes:
        parallelize_module(model, gpt_plan(CONFIG, sequence_parallel=True) if plan is None else plan, mesh["tensor"])
    name, options = STRATEGIES[strategy]
    return build_engine(name, model, OPTIMIZERS["adamw"], mesh, **options)


def train(engine, steps):
    for step in steps:
        x, y = batch(step, engine.data_rank, engine.num_data_ranks)
        step_on(engine, next_token_loss(engine(x), y))


def save(rank, mesh_key, strategy, directory):
    with Mesh(MESHES[mesh_key]) as mesh, engine_on(mesh, strategy, 0) as engine:
        train(engine, range(2))
        engine.save(directory, extra="so far")


def load(rank, mesh_key, strategy, directory, plan=None):
    with Mesh(MESHES[mesh_key]) as mesh, engine_on(mesh, strategy, 50 + rank, plan) as engine:
        assert engine.load(directory) == "so far"
        train(engine, range(2, 4))
        return engine.full_state_dict(), engine.full_optimizer_state_dict()


@cache
def reference():
    model = build(0)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    for step in range(4):
        x, y = batch(step)
        next_token_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def assert_same(results):
    state, optimizer_state = reference()
    for found, found_optimizer in results:
        torch.testing.assert_close(found, dict(state), atol=1e-10, rtol=0)
        torch.testing.assert_close(found_optimizer["state"], optimizer_state["state"], atol=1e-10, rtol=0)


PAIRS = [
    ("tp2 x dp2", "zero1", "tp4", "bucketed"),
    ("tp2 x dp2", "zero2", "tp1 x dp3", "zero3"),
    ("tp2 x dp2", "zero3", "tp4", "fsdp-dim0-small"),
    ("tp2 x dp2", "fsdp-dim0-small", "dp3", "zero2"),
    ("dp3", "bucketed", "tp2 x dp2", "fsdp"),
    ("dp2", "fsdp", "tp2 x dp2", "zero1"),
    ("hybrid", "hybrid", "tp2", "bucketed"),
    ("tp2", "fsdp", "hybrid", "hybrid"),
]


@pytest.mark.parametrize(("first", "saved_by", "second", "loaded_by"), PAIRS)
def test_goes_on_at_another_mesh(pools, tmp_path, first, saved_by, second, loaded_by):
    pools(prod(MESHES[first].values())).run(save, first, saved_by, tmp_path)
    assert_same(pools(prod(MESHES[second].values())).run(load, second, loaded_by, tmp_path))


OTHER_PLAN = {
    # Not only sizes but dims differ from what was saved: rows where there were columns, whole where there were slices.
    "token_embedding": Vocabulary(),
    "blocks.*.attention.[qk]_proj": Column(gather_output=True),
    "blocks.0.attention.out_proj": Column(gather_output=True),
    "blocks.*.mlp.fc1": Row(input_is_parallel=False),
    "blocks.1.mlp.fc2": Row(input_is_parallel=False),
}


def test_every_element_is_written_once_and_goes_on_with_another_plan(pools, tmp_path):
    """12 bytes of parameter and Adam state a parameter (twice that in float64), whatever the mesh."""
    pools(4).run(save, "tp2 x dp2", "zero3", tmp_path)
    assert_same(pools(2).run(load, "tp2", "zero1", tmp_path, OTHER_PLAN))
    folder = tmp_path / (tmp_path / "latest").read_text().strip()
    manifest = json.loads((folder / "manifest.json").read_text())
    model = build(0)
    total = sum(param.numel() for param in model.parameters())
    written = {"parameter": 0, "state": 0, "buffer": 0}
    for row in manifest["rows"]:
        if row["key"] != "step":
            written[row["kind"]] += row["stop"] - row["start"]
    assert written == {"parameter": total, "state": 2 * total, "buffer": 3}
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    assert {name: described["shape"] for name, described in manifest["parameters"].items()} == shapes
    assert manifest["num_ranks"] == 4
    assert len(manifest["rng"]) == 2


def with_rng(rank, directory):
    with Mesh(MESHES["tp2 x dp2"]) as mesh:
        torch.manual_seed(rank // 2)
        with engine_on(mesh, "bucketed", 0) as engine:
            engine.save(directory)
            expected = torch.rand(3)
        torch.manual_seed(99 + rank)
        with engine_on(mesh, "bucketed", 0) as engine:
            engine.load(directory)
            return torch.equal(torch.rand(3), expected), expected


def test_random_numbers_go_on_alike_over_the_tensor_axis(pools, tmp_path):
    results = pools(4).run(with_rng, tmp_path)
    assert all(same for same, _ in results)
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], results[2][1])
