"""When units compute, told by hooks alone, for modules that are called in uncommon ways."""

import torch
from torch import nn

from shardlab.trace.units import watch_units
from shardlab.vocabulary import SpanKind


class Told:
    """Every beginning and end, in order."""

    def __init__(self):
        self.marks = []

    def begin_span(self, unit, kind):
        self.marks.append(("begin", unit, kind))

    def end_span(self, unit, kind):
        self.marks.append(("end", unit, kind))

    def spent(self, since_ns):
        pass


class Passing(nn.Module):
    """Blocks take keyword arguments, and pass on a bias that the first one makes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(3))

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x=x, bias=bias)
        return x


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, x, bias):
        bias = self.linear.bias * 2 if bias is None else bias
        return self.linear(x) + bias, bias


def test_backward_of_a_unit_begins_once_and_ends_before_the_next():
    told, module = Told(), Passing()
    watch_units(module, told)
    module(torch.ones(2, 4)).sum().backward()
    backward = [(mark, unit) for mark, unit, kind in told.marks if kind is SpanKind.BACKWARD]
    begun = [unit for mark, unit in backward if mark == "begin"]
    assert list(dict.fromkeys(begun)) == ["blocks.2", "blocks.1", "blocks.0"]
    assert begun.count("blocks.2") == begun.count("blocks.1") == 1
    for unit, following in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0")):
        # One tensor leaves the one and enters the other: both marks are made at once, in the order of forward.
        assert backward.index(("end", unit)) == backward.index(("begin", following)) + 1
