"""Bytes at rest by module: of every engine they add up to what its rank holds."""

import pytest
import torch

from shardlab.analysis.held_bytes import NO_MODULE, ROOT
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.experiment.run.shard_rows import modules_table
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role

STRATEGIES = ("ddp", "zero1", "fsdp", "torch_zero1", "torch_fsdp2")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))] * 1)
        self.head = torch.nn.Linear(6, 3)
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.blocks[0](x)) * self.scale


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.1)


def tables(rank, strategy, **options):
    """(by module, by depth 1, live bytes by role), after backward and a step, before gradients go."""
    with Mesh({"data": 2}, device="cpu") as mesh, build_engine(strategy, Model(), adam, mesh, **options) as engine:
        engine.backward(engine(torch.arange(24.0).reshape(4, 6) + rank).square().mean())
        engine.step()
        return modules_table(engine), modules_table(engine, depth=1), bytes_by_role(engine.live_tensors())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_add_up_to_what_a_rank_holds(pools, strategy):
    whole = 0
    for table, shallow, held in pools(2).run(tables, strategy):
        assert table["bytes"].sum() == shallow["bytes"].sum() == sum(held.values())
        assert (table.drop(columns="module") >= 0).all(axis=None)
        own = table[table["module"] != NO_MODULE]
        assert set(own["module"]) <= {"blocks.0.0", "blocks.0.1", "head", ROOT}
        assert set(shallow["module"]) <= {"blocks", "head", ROOT, NO_MODULE}
        whole += own["parameter_bytes"].sum()
        if strategy == "ddp":
            sizes = table.set_index("module")
            assert sizes.loc["head"].tolist() == [84, 84, 168, 0, 0, 336]  # 21 parameters in float32, and Adam's two
            assert sizes.loc[ROOT, "parameter_bytes"] == 12
            # two running means of six and a count in int64, and a step counter for each of seven parameters
            assert sizes.loc[NO_MODULE].tolist() == [0, 0, 0, 0, 84, 84]
    assert whole >= 4 * (42 + 12 + 21 + 3)  # no element is missing


def test_what_is_offloaded_is_named_so(pools):
    whole = [table for table, *_ in pools(2).run(tables, "fsdp")]
    for offload, number in (("parameters", 1), ("all", 3)):
        for (table, _, held), kept in zip(pools(2).run(tables, "fsdp", offload=offload), whole, strict=True):
            assert (table.drop(columns="module") >= 0).all(axis=None)
            assert (table.iloc[:, 1:-1].sum(axis=1) == table["bytes"]).all()
            assert table.sum()["offloaded_bytes"] == held[Role.OFFLOADED]
            assert table["bytes"].tolist() == kept["bytes"].tolist()
            roles = ["parameter_bytes", "gradient_bytes", "optimizer_bytes"][:number]
            own = table["module"] != NO_MODULE
            assert table.loc[own, "offloaded_bytes"].tolist() == kept.loc[own, roles].sum(axis=1).tolist()
            assert table[roles].sum().sum() == 0


def test_a_depth_below_one_is_refused(pools):
    with Mesh.alone("cpu") as mesh, build_engine("single", Model(), adam, mesh) as engine:
        with pytest.raises(ValueError, match="depth: 0 is below 1"):
            modules_table(engine, depth=0)
        assert modules_table(engine)["bytes"].sum() == sum(bytes_by_role(engine.live_tensors()).values())
