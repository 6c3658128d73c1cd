"""Ranks that skip a backward or a step are named; ranks that do the same are not, whatever the strategy."""

import re

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.course import SkippedCall, inject
from shardlab.engines import STRATEGIES, build_engine
from shardlab.tensor_parallel import Column, OnSequence, Row, Scatter, parallelize_module
from shardlab.testing import check_agreement
from shardlab.testing.agreement_check import Did, did, disagreement
from tests.dist import cases
from tests.dist.every_engine import adamw, one_step, step_on

WRONG = {
    "skips a backward": r"differ in backwards \(2 on most ranks, 1 on rank 1\);",
    "skips a step": r"steps \(2 on most ranks, 1 on rank 1\); sum of the parameters' bits \(rank 1 against 2 equal",
    "writes": r"differ in sum of the parameters' bits \(rank 1 against 2 equal ones\); write parameters alike",
    "another rate": r"differ in group 0's lr \(0\.01 on most ranks, 0\.5 on rank 1\).*; give the optimizer the same",
    "freezes": r"differ in frozen \(nothing on most ranks, 0\.weight on rank 1\).*; give .* and freeze the same",
}


FAULTS = {"skips a backward": [SkippedCall(1, 1, "backward")], "skips a step": [SkippedCall(1, 1, "step")]}


def trains(rank, strategy, wrong, options=None):
    with (
        Mesh({"data": 3}) as mesh,
        build_engine(strategy, cases.build("MLP"), adamw, mesh, guards=wrong is None, **(options or {})) as engine,
        inject(engine, *FAULTS.get(wrong, [])),
    ):
        one_step(engine)
        engine.zero_grad()
        check_agreement(engine)
        if wrong == "another rate" and rank == 1:
            engine.optimizer.param_groups[0]["lr"] = 0.5
        if wrong is not None:
            one_step(engine, step=1)
            engine.zero_grad()
        if wrong == "writes" and rank == 1:
            next(iter(engine.step_tensors())).data[0] += 1
        if wrong == "freezes" and rank == 1:
            engine.params["0.weight"].requires_grad_(False)
        if wrong is not None:
            with pytest.raises(RuntimeError, match="agreement: ranks differ in ") as caught:
                check_agreement(engine)
            return str(caught.value)
        return did(engine).checksum is not None


def test_ranks_that_do_the_same_agree(pools):
    for strategy in sorted(STRATEGIES.keys() - {"single", "torch_tp"}):
        has_sum = strategy not in ("zero3", "fsdp", "torch_fsdp2")
        assert pools(3).run(trains, strategy, None) == [has_sum] * 3


@pytest.mark.parametrize("wrong", WRONG)
def test_the_rank_that_differs_is_named_on_all(pools, wrong):
    strategy, options = ("fsdp", {"sharding": "no_shard"}) if "skips" in wrong else ("ddp", {})
    first, *others = pools(3).run(trains, strategy, wrong, options)
    assert others == [first, first]
    assert re.search(WRONG[wrong], first), first


class Unseen(torch.autograd.Function):
    """A function of the user's own: a divided layer behind it does not see what its input comes from."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Divided(nn.Module):
    """An MLP between a norm and a head that stay whole."""

    def __init__(self, between):
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.enter, self.between = nn.Identity(), between()

    def forward(self, x):
        x = self.enter(x)
        h = Unseen.apply(self.norm(x))
        return self.head(x + self.down(Unseen.apply(self.between(self.up(h)))))


SEQUENCE = {
    "enter": Scatter(1),
    "up": Column(sequence_dim=1),
    "down": Row(sequence_dim=1),
    "head": OnSequence(gather_along=1),
}
APART = {
    **dict.fromkeys(("nothing", "other rows", "norm in the loss"), (nn.ReLU, {"up": Column(), "down": Row()})),
    "no style": (nn.PReLU, {"up": Column(), "down": Row()}),
    "not on the sequence": (nn.ReLU, SEQUENCE),
}
DRIFTED = {
    **dict.fromkeys(("other rows", "norm in the loss"), "norm.weight, down.bias, head.weight, ..."),
    "no style": "between.weight",
    "not on the sequence": "norm.weight, norm.bias",
}


def on_tensor_ranks(rank, wrong, strategy="ddp"):
    torch.manual_seed(0)
    between, plan = APART[wrong]
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).double()
    with Mesh({"data": 2, "tensor": 2}) as mesh:
        model = parallelize_module(Divided(between).double(), plan, mesh["tensor"])
        with build_engine(strategy, model, lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh) as engine:
            for _ in range(3):
                y = engine(x[rank % 2 :: 2] if wrong == "other rows" and rank < 2 else x)
                loss = y.square().mean()
                if wrong == "norm in the loss":
                    loss = loss + torch.cat([param.flatten() for param in model.parameters()]).norm()
                step_on(engine, loss)
            try:
                check_agreement(engine)
            except RuntimeError as error:
                return str(error)
            return ""


def test_tensor_ranks_that_drift_apart_are_named(pools):
    for wrong in APART:
        first, *others = pools(4).run(on_tensor_ranks, wrong)
        assert others == [first] * 3
        if wrong == "nothing":
            assert first == ""
        else:
            assert f"parameters that no rank divides (ranks 0, 1: {DRIFTED[wrong]})" in first
            assert "what the loss takes of the parameters themselves, which are slices" in first
            assert first.endswith("a style")
    for strategy in ("zero1", "zero3", "fsdp"):  # where a rank keeps pieces
        for wrong, words in (("nothing", "^$"), ("no style", r"no rank divides \(.*between\.weight")):
            assert all(re.search(words, said) for said in pools(4).run(on_tensor_ranks, wrong, strategy))


class Marked(Divided):
    """With a large embedding that stays whole, and a mask among its parameters."""

    def __init__(self):
        super().__init__(nn.ReLU)
        self.words = nn.Embedding(20000, 32)
        self.mask = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)


def one_write(rank, axes, writer, name):
    with Mesh(axes) as mesh:
        model = parallelize_module(Marked(), {"up": Column(), "down": Row()}, mesh["tensor"])
        with build_engine("ddp", model, lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh) as engine:
            check_agreement(engine)
            if rank == writer:
                with torch.no_grad():
                    model.get_parameter(name).view(-1)[0] += 0.01
            with pytest.raises(RuntimeError, match="agreement: ranks differ in ") as caught:
                check_agreement(engine)
            return str(caught.value)


@pytest.mark.parametrize(
    ("axes", "differ", "name"),
    [({"data": 2, "tensor": 2}, "ranks 1, 3", "up.weight"), ({"tensor": 2, "data": 2}, "ranks 0, 1", "norm.weight")],
)
def test_ranks_are_those_of_the_mesh_in_whatever_order_it_has_its_axes(pools, axes, differ, name):
    for found in pools(4).run(one_write, axes, 1, name):
        assert f"differ in sum of the parameters' bits ({differ})" in found
        assert found.endswith("write parameters alike on all ranks, for example after a broadcast")


def test_the_fewest_differ_from_the_others_among_tensor_ranks_too():
    same, other = Did(4, 2, 17), Did(4, 2, 18)
    assert disagreement([same, same]) == disagreement([same, other], num_tensor_ranks=2) == ""
    assert disagreement([same, Did(3, 2, 17)], ranks=[5, 3]).endswith("3 on rank 3)")
    assert "bits (rank 4 against 2 equal ones)" in disagreement([same, same, same, same, other, same], 2)
    sizes = [Did(4, 2, 17, whole={"norm": (size, 1e-5)}) for size in (1.0, 1.0 + 1e-9, 1.0, float("nan"))]
    assert disagreement(sizes, 2, [0, 2, 3, 1]).endswith("parameters that no rank divides (ranks 1, 3: norm)")
    own = [Did(4, 2, 17, buffers={"book": place, "same": 5}) for place in (1, 2, 1, 2, 1, 3)]
    assert disagreement(own, 2).endswith("differ in buffer book (rank 5 against 2 equal ones)")
