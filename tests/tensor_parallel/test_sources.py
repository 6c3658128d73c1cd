"""What is whole, used where features are in parts, and the other way round: refused by the first forward."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.comm.without_ranks import on_threads
from shardlab.engines import build_engine
from shardlab.tensor_parallel import Column, OnSequence, OwnDropout, Row, check_tp_plan, copy, parallelize_module
from tests.dist import cases
from tests.dist.test_agreement_check import Unseen
from tests.tensor_parallel.strangers import attended, heads_of

HIDDEN, HEADS, HEAD_DIM = 8, 4, 2


class OneKeyValueHead(nn.Module):
    """Four query heads and one of key and value; ``shared`` takes what all ranks share."""

    def __init__(self, shared):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.q, self.o = nn.Linear(HIDDEN, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.kv = nn.Linear(HIDDEN, 2 * HEAD_DIM)
        self.q_norm, self.drop, self.shared = nn.LayerNorm(HEAD_DIM), nn.Dropout(0.0), shared
        self.last = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        k, v = heads_of(self.shared(self.kv(h)), HEAD_DIM * 2).chunk(2, -1)
        return self.last(self.drop(self.o(attended(self.q_norm(heads_of(self.q(h), HEAD_DIM)), k, v)))).square()


PLAN = {"q": Column(), "o": Row(), "q_norm": OnSequence()}
SAME, CUT = (lambda x: x), torch.detach  # of the key and value
WRONG = {
    "a whole layer": (SAME, PLAN, "o: it takes an input in parts.*computed with 'kv.weight', which is whole"),
    "a gathered layer": (SAME, PLAN | {"kv": Column(gather_output=True)}, "with 'output of kv', which is whole"),
    "a norm without style": (CUT, {"q": Column(), "o": Row()}, "computed with 'q_norm.bias', which is whole"),
    "a style too many": (CUT, PLAN | {"norm": OnSequence()}, "q: it takes a whole.*with 'norm.bias', whose"),
    "a sum too many": (CUT, PLAN | {"last": OnSequence()}, "last: it takes .*with 'o.bias', which is whole"),
    "dropout of all": (CUT, PLAN | {"drop": OwnDropout()}, "drop: it takes .*with 'o.bias', which is whole"),
}


def build(shared=SAME):
    return cases.seeded(lambda: OneKeyValueHead(shared), 0).double()


def loss(model):
    x = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model(x).square().sum()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_wrong_plan_is_refused_by_name(wrong, device):
    shared, plan, words = WRONG[wrong]
    with pytest.raises(ValueError, match=words):
        check_tp_plan(build(shared).to(device), plan, 2, loss)
    # Without a trial too, and before anything is computed from it.
    with pytest.raises(ValueError, match=words):
        on_threads(2, lambda comm: loss(parallelize_module(build(shared), plan, comm)), "tensor")


def test_what_no_layer_sees_a_trial_finds():
    with pytest.raises(ValueError, match=r"gradient of 'norm\.weight' differs from the whole model's"):
        check_tp_plan(build(Unseen.apply), PLAN, 2, loss)


class Twice(nn.Module):
    """One row for two inputs, of which the second has a factor that is whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(self.up(x)) + self.down(self.up(x) * self.factor)


def test_each_input_of_the_first_step_is_looked_at():
    with pytest.raises(ValueError, match=r"down: .* with 'factor', which is whole"):
        on_threads(
            2, lambda comm: loss(parallelize_module(Twice().double(), {"up": Column(), "down": Row()}, comm)), "tensor"
        )


def assert_whole(shared_over):
    """Each rank's gradients, of what all share, are those of the whole model."""
    whole = build()

    def gradients(comm):
        model = deepcopy(whole)  # threads that draw at once would draw other weights
        model.shared = shared_over(comm)
        loss(parallelize_module(model, PLAN, comm)).backward()
        return {name: param.grad for name, param in model.named_parameters() if name[0] in "kn"}

    found = on_threads(2, gradients, "tensor")
    loss(whole).backward()
    for each in found:
        expected = {name: whole.get_parameter(name).grad for name in each}
        torch.testing.assert_close(each, expected, atol=1e-12, rtol=0)


def test_copied_it_is_right():
    assert_whole(lambda comm: partial(copy, comm=comm))


class Summed(torch.autograd.Function):
    """A border of the user's own."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        ctx.comm.all_reduce(total).wait()
        return total, None


def test_a_function_of_the_users_own_is_not_refused():
    assert_whole(lambda comm: lambda x: Summed.apply(x, comm))


def refused(rank, strategies):
    found = []
    with Mesh({"data": 2, "tensor": 2}) as mesh:
        for strategy in strategies:
            model = parallelize_module(build(), PLAN, mesh["tensor"])
            with build_engine(strategy, model, partial(torch.optim.SGD, lr=0.1), mesh) as engine:
                with pytest.raises(ValueError, match="o: it takes an input in parts") as caught:
                    loss(engine)
                found.append(str(caught.value))
    return found


def test_under_an_engine_all_ranks_refuse_alike(pools):
    (first, *others), *ranks = pools(4).run(refused, ["ddp", "zero3", "fsdp"])
    assert "'kv.weight', which is whole" in first
    assert others == [first] * 2
    assert ranks == [[first] * 3] * 3
