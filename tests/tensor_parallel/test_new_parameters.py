"""Parameters that are new in a divided model: on parts of the sequence their gradients are summed like the others."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.launch import RankError
from shardlab.tensor_parallel import Column, OnSequence, Row, copy, parallelize_module
from tests.comm.test_communicator import Log
from tests.dist.every_engine import step_on
from tests.tensor_parallel.test_layers import merged_gradients


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Sequential(nn.Linear(4, 3))

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


PLAN = {
    "norm": OnSequence(),
    "up": Column(sequence_dim=1),
    "down": Row(sequence_dim=1),
    "head": OnSequence(gather_along=1),
}


def fill(name, module):
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, generator=torch.Generator().manual_seed(len(name)))


def build(device="cpu"):
    model = Block().double() if device == "cpu" else Block().to(device, torch.float64)
    for name, module in model.named_modules() if device == "cpu" else ():
        fill(name, module)
    return model


def keep(model):
    pass


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def one(model):
    model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())


def thawed(model):
    for layer in (model.norm, model.head[0]):
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        layer.weight.requires_grad_(True)


def batch():
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def gradients(rank, change, device="cpu"):
    with Mesh({"tensor": 2}) as mesh:
        comm = mesh["tensor"]
        model = parallelize_module(build(device), PLAN, comm, init_fn=fill)
        change(model)
        log = Log()
        with comm.observed_by(log):
            model(batch().chunk(2, 1)[rank]).square().sum().backward()
        hooks = {name: len(param._backward_hooks or {}) for name, param in model.named_parameters()}
        sent = [(str(event.op), event.tag, event.numel) for event in log.events]
        return merged_gradients(model, comm), sent, hooks


def test_gradients_of_new_parameters_are_whole(pools):
    """On the meta device the module has the style, and its layer is made after the module was divided."""
    model = build()
    model(batch()).square().sum().backward()
    unchanged = pools(2).run(gradients, keep)
    for change, device in ((assign, "cpu"), (one, "cpu"), (thawed, "cpu"), (keep, "meta")):
        changed = pools(2).run(gradients, change, device)
        for (found, *sent_and_hooks), (_, *expected) in zip(changed, unchanged, strict=True):
            assert sent_and_hooks == expected
            expected_gradients = {name: param.grad for name, param in model.named_parameters()}
            torch.testing.assert_close(found, expected_gradients, atol=1e-10, rtol=0)


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def trained_in_units(rank, change, device, options):
    """With an FSDP unit inside of the module that has the style: sharded before the first forward."""
    with Mesh({"data": 2, "tensor": 2}) as mesh:
        comm = mesh["tensor"]
        model = parallelize_module(build(device), PLAN, comm, init_fn=fill)
        change(model)
        with build_engine("fsdp", model, sgd, mesh, wrap=("head.*",), **options) as engine:
            for _ in range(2):
                x = batch().chunk(2)[engine.data_rank].chunk(2, 1)[comm.rank]
                step_on(engine, engine(x).square().sum())
            return engine.full_state_dict()


@pytest.mark.parametrize(
    ("change", "device", "options"), [(assign, "cpu", {}), (keep, "meta", {"layout": "dim0"}), (assign, "meta", {})]
)
def test_new_parameters_of_an_inner_unit_are_summed_too(pools, change, device, options):
    model = build()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        model(batch()).square().sum().div(2).backward()  # the engine divides by its two data ranks
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(4).run(trained_in_units, change, device, options):
        torch.testing.assert_close(state, dict(model.state_dict()), atol=1e-10, rtol=0)


def hooked(rank):
    """What a hook that is registered after the division sees."""
    with Mesh({"tensor": 2}) as mesh:
        model, seen = parallelize_module(build("meta"), PLAN, mesh["tensor"], init_fn=fill), []
        model.head[0].weight.register_hook(seen.append)
        model(batch().chunk(2, 1)[rank]).square().sum().backward()
        return seen


def test_hooks_registered_afterwards_see_whole_gradients(pools):
    model = build()
    model(batch()).square().sum().backward()
    for (seen,) in pools(2).run(hooked):
        torch.testing.assert_close(seen, model.head[0].weight.grad, atol=1e-10, rtol=0)


def computed(rank, kind):
    """Gradients of what a forward's parameters are computed from."""
    with Mesh({"tensor": 2}) as mesh:
        comm = mesh["tensor"]
        model = parallelize_module(build(), PLAN, comm)
        values = {name: param * 2 for name, param in model.named_parameters() if kind == "own"}
        other = {name: dict(model.named_parameters())[name].detach().clone().requires_grad_() for name in REPLICATED}
        if kind != "own":
            values = {name: param * 2 if kind == "bare" else copy(param * 2, comm) for name, param in other.items()}
        y = torch.func.functional_call(model, values, (batch().chunk(2, 1)[rank],))
        y.square().sum().backward()
        leaves = other if kind != "own" else dict(model.named_parameters())
        return {name: leaves[name].grad for name in REPLICATED}


REPLICATED = ("norm.weight", "norm.bias", "down.bias", "head.0.weight", "head.0.bias")


def test_parameters_that_are_computed_have_whole_gradients_or_are_refused(pools):
    for kind in ("own", "copied"):
        model = build()
        values = {name: param * 2 for name, param in model.named_parameters() if kind == "own" or name in REPLICATED}
        torch.func.functional_call(model, values, (batch(),)).square().sum().backward()
        for found in pools(2).run(computed, kind):
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=1e-10, rtol=0, msg=name)
    with pytest.raises(RankError, match=r"norm\.weight: it is computed .*copy\(tensor, comm\)"):
        pools(2).run(computed, "bare")
