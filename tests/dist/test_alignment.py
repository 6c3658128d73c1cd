"""A parameter of an odd size shifts none of the others: what a kernel reads begins at a multiple of 16 bytes."""

import torch
from torch import nn

from tests.dist.every_engine import KINDS, engine_of, sgd


class OddSizes(nn.Module):
    """An odd size first, last and in the middle."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 7), nn.Linear(7, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.inner(x * self.scale))


def addresses(rank, key):
    """Of parameters in forward and of gradients before the step, from the start of a 16-byte word."""
    found = {}
    model = OddSizes()
    seen = [(name, param) for name, param in model.named_parameters() if param.numel() % 8 == 0]
    assert len(seen) == 8

    def look(module, *_):
        for name, param in module.named_parameters(recurse=False):
            if param.numel() % 8 == 0:
                found[f"{id(module)}.{name}"] = param.data_ptr() % 16

    for module in model.modules():
        module.register_forward_hook(look)
    with engine_of(key, 3, model, optimizer_fn=sgd) as engine:
        engine.backward(engine(torch.ones(2, 16)).sum())
        if key == "bucketed":  # under the others the whole gradients are gone
            found |= {name: param.grad.data_ptr() % 16 for name, param in seen}
    return found


def test_odd_sizes_shift_nothing(pools):
    for key in (*KINDS, "fsdp-dim0"):
        for found in pools(3).run(addresses, key):
            assert len(found) >= 8
            assert set(found.values()) == {0}
