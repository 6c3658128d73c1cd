"""A parameter of an odd size shifts none of the others: what a kernel reads begins at a multiple of 16 bytes."""

import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine


class OddSizes(nn.Module):
    """An odd size first, last and in the middle."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 7), nn.Linear(7, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.inner(x * self.scale))


def addresses(rank, num_ranks, strategy, options):
    """Of parameters in forward and of gradients before the step, from the start of a 16-byte word."""
    found = {}
    model = OddSizes()
    seen = [(name, param) for name, param in model.named_parameters() if param.numel() % 8 == 0]
    assert len(seen) == 8

    def look(module, *_):
        for name, param in module.named_parameters(recurse=False):
            if param.numel() % 8 == 0:
                found[f"{id(module)}.{name}"] = param.data_ptr() % 16

    with Mesh({"data": num_ranks}) as mesh:
        for module in model.modules():
            module.register_forward_hook(look)
        engine = build_engine(strategy, model, lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh=mesh, **options)
        engine.backward(engine(torch.ones(2, 16)).sum())
        if strategy == "bucketed":  # under the others the whole gradients are gone
            found |= {name: param.grad.data_ptr() % 16 for name, param in seen}
        engine.close()
    return found


def test_odd_sizes_shift_nothing(pools):
    for strategy, options in (
        ("bucketed", {}),
        ("zero1", {}),
        ("zero3", {}),
        ("fsdp", {}),
        ("fsdp", {"layout": "dim0"}),
    ):
        for found in pools(3).run(addresses, 3, strategy, options):
            assert len(found) >= 8
            assert set(found.values()) == {0}
