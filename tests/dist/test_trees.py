"""The walk over what modules take and return: which containers, what is kept of them, what is left alone."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shardlab.comm.trees import cast_floating, map_tensors, tensors_in


def ones():
    return torch.ones(2)


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Plain:
    tensor: torch.Tensor = field(default_factory=ones)
    number: int = 3


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    tensor: torch.Tensor = field(default_factory=ones)
    inner: Any = field(default_factory=lambda: [ones()])


class Base(OrderedDict):
    """As Hugging Face's ModelOutput: a dict and a dataclass at once, and the two are kept equal."""

    def __post_init__(self):
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, entry.name) for entry in fields(self)), *rest


@dataclass
class ModelOutput(Base):
    loss: torch.Tensor
    hidden: tuple | None = None
    absent: torch.Tensor | None = None


def default():
    made = defaultdict(list)
    made["x"].append(ones())
    return made


CONTAINERS = {
    "tensor": ones,
    "tuple, list and dict": lambda: ([ones(), "text"], {"x": ones(), "n": None}),
    "OrderedDict": lambda: OrderedDict(b=ones(), a=ones()),
    "defaultdict": default,
    "MappingProxyType": lambda: MappingProxyType({"x": ones()}),
    "namedtuple": lambda: Pair(ones(), (ones(),)),
    "max": lambda: torch.eye(2).max(0),  # torch's own return type
    "deque": lambda: deque([ones()], maxlen=4),
    "set": lambda: {ones()},
    "Plain": Plain,
    "FrozenSlots": FrozenSlots,
    "ModelOutput": lambda: ModelOutput(ones(), (ones(), ones())),
    "nested": lambda: {"x": [Plain(), (FrozenSlots(), default())]},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_floating_tensor_is_cast_and_nothing_else_changes(kind):
    value = CONTAINERS[kind]()
    before = [(tensor.dtype, tensor.clone()) for tensor in tensors_in(value)]
    made = cast_floating(value, torch.float64)
    assert type(made) is type(value)
    assert [tensor.dtype for tensor in tensors_in(value)] == [dtype for dtype, _ in before], "the given is as it was"
    after = list(tensors_in(made))
    for (dtype, given), tensor in zip(before, after, strict=True):
        assert tensor.dtype == (torch.float64 if dtype.is_floating_point else dtype)
        assert torch.equal(tensor, given.to(tensor.dtype))
    assert any(tensor.dtype == torch.float64 for tensor in after)


def test_what_a_container_has_beside_its_tensors_is_kept():
    assert cast_floating(default(), torch.float64).default_factory is list
    assert cast_floating(deque([ones()], maxlen=4), torch.float64).maxlen == 4
    assert list(cast_floating(OrderedDict(b=ones(), a=1), torch.float64)) == ["b", "a"]
    output = cast_floating(ModelOutput(ones(), (ones(),)), torch.float64)
    assert output["loss"] is output.loss
    assert output["hidden"] is output.hidden
    assert list(output) == ["loss", "hidden"]
    assert output.absent is None
    shared = ones()  # a tensor that is there twice is cast once
    first, (second, other) = cast_floating((shared, [shared, ones()]), torch.float64)
    assert first is second
    assert first is not other
    assert map_tensors(lambda tensor: tensor, [shared])[0] is shared
