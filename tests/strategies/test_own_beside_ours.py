"""A strategy of the reader's own beside ours: it gets their options, and what it sends is counted wherever it sends."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardlab.comm import Pending
from shardlab.comm.autograd_collectives import exchange
from shardlab.comm.mesh import Mesh
from shardlab.engines import DDP, FSDP, Bucketed, Engine, Strategy, TorchDDP, ZeRO1, ZeRO3, build_engine
from shardlab.experiment import CompareConfig, Workload, compare, plan
from shardlab.experiment.told.answer import answer
from shardlab.launch import RankError
from shardlab.testing import check_agreement
from shardlab.vocabulary import FLAG

SMALL = {"model": "mlp", "text": "grammar", "seq_len": 8}


class Hierarchical(Bucketed):
    """Reduce-scatter inside pairs, all-reduce across them, all-gather inside."""

    name = "hierarchical"

    def lay_out(self, given):
        self.outer, self.inner = self.groups(given)
        return super().lay_out(given)

    def groups(self, given):
        return given.mesh.split("data", inner=2)

    def reduce(self, bucket):
        buffer, tag = bucket.buffer, f"gradients of bucket {bucket.index}"
        bounds = (0, buffer.numel() // 2, buffer.numel())
        self.inner.reduce_scatter(buffer, bounds=bounds, tag=tag).wait()
        mine = buffer[bounds[self.inner.rank] : bounds[self.inner.rank + 1]]
        self.outer.all_reduce(mine, tag=tag).wait()
        return self.inner.all_gather(buffer, bounds=bounds, tag=tag)


class OnItsOwnMesh(Hierarchical):
    name = "on_its_own_mesh"

    def groups(self, given):
        ranks = given.comms[0].ranks
        self.grid = Mesh({"hosts": len(ranks) // 2, "inside": 2}, ranks=ranks, device=given.device)
        return self.grid.communicators


class LocalSGD(Strategy):
    """Gradients are never sent; every second step parameters are averaged."""

    name, ranks_differ = "local_sgd", True

    def lay_out(self, given):
        self.num_steps = 0
        return super().lay_out(given)

    @contextlib.contextmanager
    def stepping(self, *, loads=False):
        yield
        self.num_steps += not loads
        if self.num_steps % 2 == 0:
            with torch.no_grad():
                for name, param in self.params.items():
                    self.comm.all_reduce(param.data, tag=f"average of {name}").wait()
                    param.div_(self.num_ranks)


class Groups(FSDP):
    name = "groups"


class OwnBuckets(Bucketed):
    name = "own_buckets"


def sent(records, run):
    """Operations of the last step in order on rank 0, without flags and the loss."""
    rows = records.collectives.query("run == @run and rank == 0 and step == step.max() and phase != 'metrics'")
    return list(
        rows[rows["tag"] != "whether a rank refuses"].sort_values("seq")[["op", "tag", "bytes"]].itertuples(index=False)
    )


def test_what_travels_in_groups_of_its_own_is_counted(tmp_path, pools):
    strategies = ("bucketed", Hierarchical(), OnItsOwnMesh())
    comparison = compare(CompareConfig(strategies, ranks=4, steps=2, **SMALL), tmp_path / "run", pool=pools(4))
    rows = comparison.summary.set_index("strategy")
    # Both send 3/2 of the gradients; compare makes buckets of a MiB for all of them.
    assert rows.wire_bytes_per_step.nunique() == 1
    assert len(sent(comparison.records, "hierarchical")) == 3 * len(sent(comparison.records, "bucketed"))
    assert sent(comparison.records, "hierarchical") == sent(comparison.records, "on_its_own_mesh")
    assert rows.as_planned.tolist() == [True, True, None]  # a mesh of its own needs ranks


class Owners(ZeRO1):
    name = "owners"


def test_its_bytes_and_messages_are_planned_where_steps_are_alike(tmp_path, pools):
    strategies = (Owners(partition="balanced"), Groups(sharding="hybrid_shard", partition="round_robin"), LocalSGD())
    config = CompareConfig(strategies, ranks=4, steps=3, accumulation=2, clip=1.0, **SMALL)
    comparison = compare(config, tmp_path / "run", pool=pools(4))
    rows = comparison.summary.set_index("strategy")
    assert re.search(r"; groups: [\d.]+ MB over replica and [\d.]+ MB over shard; of", dict(answer(comparison))["COST"])
    assert rows.as_planned.tolist() == [True, True, None]
    assert rows.not_planned["local_sgd"] == "what it sends differs from step to step"
    assert (rows.planned_rest_bytes == rows.rest_bytes).all()
    planned = plan(config.trained, 8, strategies[:2], bucket_mib=1.0, shard_group=4).set_index("strategy")
    assert (planned.messages_per_step > 0).all()


class Experts(nn.Module):
    """Each rank computes the rows of its own expert, and so uses no other."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, comm):
        parts = x.view(2, -1, 8)
        if comm.num_ranks == 1:
            return torch.stack([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return exchange(self.experts[comm.rank](exchange(parts, comm)), comm)


class WholeGradients(DDP):
    name = "whole_gradients"


def test_what_ranks_use_together_is_planned_where_each_uses_its_own_expert():
    def loss(model, batch, mesh):
        return model(batch, mesh.data).square().mean()

    planned = plan(Workload(Experts, [torch.ones(8, 8)] * 4, loss), 2, ["ddp", WholeGradients()]).set_index("strategy")
    assert planned.gradient_bytes.tolist() == [2 * (64 + 8) * 4] * 2
    assert planned.rest_bytes.nunique() == 1


class PastAll(Bucketed):
    name = "past_all"

    def reduce(self, bucket):
        torch.distributed.all_reduce(bucket.buffer)
        return Pending()


def test_what_travels_past_every_communicator_is_refused(tmp_path, pools):
    with pytest.raises(RankError, match=r"'past_all' sends by torch.distributed itself, which nobody counts"):
        compare(CompareConfig((PastAll(),), ranks=2, steps=2, **SMALL), tmp_path / "run", pool=pools(2))


def test_over_an_emulated_link_a_mesh_of_its_own_is_refused(tmp_path, pools):
    config = CompareConfig((OnItsOwnMesh(),), ranks=4, steps=1, link="10Gbps,50us", **SMALL)
    with pytest.raises(
        RankError, match="'gradients of bucket 0' is sent over axis 'inside' of another mesh, on which no"
    ):
        compare(config, tmp_path / "own", pool=pools(4))
    config = replace(config, strategies=(Hierarchical(),))
    assert compare(config, tmp_path / "given", pool=pools(4)).summary["wire_bytes_per_step"].item() > 12


def test_a_tensor_axis_and_groups_reach_it(tmp_path, pools):
    small = {**SMALL, "ranks": 4, "steps": 2}
    config = CompareConfig(("bucketed", OwnBuckets()), tp=2, **small)
    comparison = compare(config, tmp_path / "tensor", pool=pools(4))
    one, own = (comparison.summary.set_index("strategy").loc[name] for name in ("bucketed", "own_buckets"))
    for column in ("parameter_bytes", "gradient_bytes", "wire_bytes_per_step"):
        assert own[column] == one[column]
    assert own.losses_equal
    assert comparison.summary["as_planned"].all()
    config = CompareConfig(("fsdp", Groups(sharding="hybrid_shard")), sharding="hybrid_shard", **small)
    comparison = compare(config, tmp_path / "groups", pool=pools(4))
    assert sent(comparison.records, "groups") == sent(comparison.records, "fsdp")
    assert comparison.records.manifests["groups"]["mesh"] == {"replica": 2, "shard": 2}


def test_it_has_the_buckets_that_ours_have_or_those_of_its_own(tmp_path, pools):
    strategies = ("bucketed", OwnBuckets(), type("Small", (Bucketed,), {"name": "small"})(bucket_bytes=2**17))
    comparison = compare(
        CompareConfig(strategies, ranks=2, steps=1, bucket_mib=2.5, **SMALL), tmp_path / "run", pool=pools(2)
    )
    assert sent(comparison.records, "own_buckets") == sent(comparison.records, "bucketed")
    assert len(sent(comparison.records, "small")) > len(sent(comparison.records, "bucketed"))
    with pytest.raises(ValueError, match="bucket_mib: only for bucketed, zero1"):
        CompareConfig((type("Other", (DDP,), {"name": "other"})(),), ranks=2, bucket_mib=2.0)


def agrees(rank):
    with (
        Mesh({"data": 2}) as mesh,
        Engine(nn.Linear(3, 2), lambda t: torch.optim.SGD(t, lr=0.1), mesh, LocalSGD()) as engine,
    ):
        engine.backward(engine(torch.full((1, 3), rank + 1.0)).sum())
        engine.step()
        check_agreement(engine)
        return float(engine.module.weight[0, 0])


def test_ranks_that_differ_by_design_are_no_disagreement_and_bytes_are_a_mean(tmp_path, pools):
    undeclared = type("Undeclared", (LocalSGD,), {"name": "undeclared", "ranks_differ": False})()
    apart = type("Apart", (Strategy,), {"name": "apart", "ranks_differ": True})()
    config = CompareConfig(("single", "ddp", LocalSGD(), undeclared, apart), ranks=2, steps=4, **SMALL)
    comparison = compare(config, tmp_path / "run", pool=pools(2))
    rows = comparison.summary.set_index("strategy")
    sent = comparison.records.collectives.query("step == 2 and rank == 0 and run == 'ddp'")
    flags = sent.loc[sent["tag"] == FLAG, "wire_bytes"].sum()
    # In every second step what ddp sends in each: after the last as well.
    assert rows.wire_bytes_per_step["local_sgd"] - flags == (rows.wire_bytes_per_step["ddp"] - flags) / 2
    assert rows.losses_equal["local_sgd"] is None
    assert rows.max_loss_difference["local_sgd"] > 0
    said = {line.title: line.text for line in answer(comparison)}
    assert "in undeclared after step 0" in said["CAN I TRUST IT"]
    assert "where undeclared means that, set ranks_differ = True" in said["CAN I TRUST IT"]
    assert "in local_sgd after" not in said["CAN I TRUST IT"]
    assert "ranks of local_sgd and apart differ by design, and so do the losses" in said["CAN I TRUST IT"]
    assert "of local_sgd and undeclared means over all steps" in said["COST"]
    assert "of apart" not in said["COST"]  # whose steps send alike
    assert len(set(pools(2).run(agrees))) == 2


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "", ".hidden", "a b", "\\up"])
def test_a_name_is_no_path(name):
    with pytest.raises(ValueError, match=r"is named .* and its records lie in a folder of that name"):
        CompareConfig((type("Named", (DDP,), {"name": name})(),), ranks=2)


@pytest.mark.parametrize("axes", [("replcia", "shard"), ("tensor",), ("data", "data"), ("data", "replica", "shard")])
def test_axes_that_compare_does_not_make_are_refused(axes):
    with pytest.raises(ValueError, match=r"the axes of 'named' are .*; compare makes one or two of data, replica"):
        CompareConfig((type("Named", (DDP,), {"name": "named", "axes": axes})(),), ranks=4)


@pytest.mark.parametrize("given", [OwnBuckets, (OwnBuckets,), ("single", TorchDDP), ZeRO1])
def test_a_class_is_told(given):
    with pytest.raises(
        ValueError, match=r"strategies: the class \w+ was given; give (one of it, OwnBuckets\(\)|'torch_ddp'|'zero1')"
    ):
        CompareConfig(given, ranks=2)


def test_an_engine_tells_a_class_and_what_is_none():
    for build in (
        lambda one: Engine(nn.Linear(2, 1), torch.optim.SGD, None, one),
        lambda one: build_engine(one, nn.Linear(2, 1), torch.optim.SGD),
    ):
        with pytest.raises(ValueError, match=r"strategy: the class ZeRO1 was given; give one of it, ZeRO1\(\)"):
            build(ZeRO1)
    with pytest.raises(ValueError, match="strategy: a str was given; give a Strategy"):
        Engine(nn.Linear(2, 1), torch.optim.SGD, None, "zero1")


def test_a_misspelt_method_is_refused_and_a_helper_is_not():
    for base, name, meant in (
        (Bucketed, "reduces", "reduce"), (Bucketed, "redcue", "reduce"), (ZeRO1, "devide", "divide"),
        (Strategy, "layout", "lay_out"), (Bucketed, "step", "stepping"),
        (ZeRO3, "backward", "in_backward"), (Strategy, "forward", "in_forward"),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=rf"Typo.{name}\(\) is no method of a strategy, .*; write {meant}\(\), or _{name}"
        ):
            _built(type("Typo", (base,), {name: lambda *_: None}))
    for base, name in ((ZeRO3, "scatter"), (ZeRO1, "reduce"), (Bucketed, "divide")):
        with pytest.raises(ValueError, match=rf"nobody calls Other.{name}\(\), which strategies made from .* may have"):
            _built(type("Other", (base,), {name: lambda *_: None}))
    for name, meant in (
        ("round", "rounds"), ("rank_differ", "ranks_differ"), ("rests_partial", "sends_in_no_sync"),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=rf"Typo.{name} is read by nobody; write {meant}, or _{name} if it is your"
        ):
            _built(type("Typo", (Bucketed,), {name: True}))
    for name in ("bucketed", "zero1", "zero2", "zero3", "fsdp"):  # ours have names that are alike
        build_engine(name, nn.Linear(2, 1), lambda tensors: torch.optim.SGD(tensors, lr=0.1)).close()
    helpers = {name: lambda self: None for name in ("reduce_all", "compress", "_reduces", "send")}
    _built(type("Right", (Bucketed,), {**helpers, "names": ("a",)}))


class Fourth(Bucketed):
    """Every fourth step sends more."""

    name = "fourth"
    num_steps = 0

    @contextlib.contextmanager
    def stepping(self, *, loads=False):
        with super().stepping(loads=loads):
            yield
        self.num_steps += not loads
        if self.num_steps % 4 == 0:
            self.comm.all_reduce(torch.zeros(100_000), tag="more").wait()


@pytest.mark.parametrize("given", [{"save_every": 1}, {"resume": "runs"}])
def test_a_checkpoint_keeps_no_ranks_of_their_own(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))}: ranks of 'local_sgd' have parameters of their own"):
        CompareConfig((LocalSGD(),), ranks=2, **given, **SMALL)


class Half(Bucketed):
    """Every gradient is halved."""

    name, rounds = "half", True

    def finish(self, bucket):
        bucket.pending.wait()
        bucket.buffer.mul_(0.5)
        super().finish(bucket)


def test_unlike_steps_are_averaged_and_no_reference_and_a_factor_is_told(tmp_path, pools):
    strategies = (LocalSGD(), "bucketed", Fourth(), Half())
    comparison = compare(CompareConfig(strategies, ranks=2, steps=5, **SMALL), tmp_path / "run", pool=pools(2))
    rows, said = comparison.summary.set_index("strategy"), dict(answer(comparison))
    assert rows.as_planned.tolist() == [None, True, None, True]  # the last steps are like the planned ones
    assert rows.wire_bytes_per_step["fourth"] == rows.wire_bytes_per_step["bucketed"] + 400_000 / 5
    assert "; of local_sgd and fourth means over all steps" in said["COST"]
    assert "fourth 9.2," in said["COST"]
    assert rows.losses_equal.tolist() == [None, True, True, False]
    assert set(rows.loss_reference.dropna()) == {"bucketed"}
    assert rows.norm_ratio["half"] == pytest.approx(0.5, rel=0.01)
    assert ", and gradients by a factor" in said["CAN I TRUST IT"]
    assert rows.unlike_step["fourth"] == 3  # only steps 0 and 2 were traced


def _built(kind):
    return build_engine(kind(), nn.Linear(2, 1), lambda tensors: torch.optim.SGD(tensors, lr=0.1))
