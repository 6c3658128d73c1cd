"""What an optimizer looks at is found out by trying it: no name is known, nothing of the user's is touched."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlab.engines.optimizer_fit import Cut, check_sliced, fitting_optimizer
from shardlab.engines.optimizer_trial import LooksAt, Stepped, flat_pieces, looks_at, pieces_along
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import Partition
from tests.dist import whole_optimizers as own

SHAPES = {"weight": (24, 20), "bias": (24,), "filter": (6, 4, 3, 3), "scale": (), "small": (1,)}
FLAT, ROWS, COLUMNS = flat_pieces, pieces_along(0), pieces_along(1)
ELEMENT, TENSOR, MODEL = LooksAt
optim = torch.optim

ELEMENTWISE = {
    "SGD": lambda t: optim.SGD(t, lr=0.1),
    "SGD-all": lambda t: optim.SGD(t, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "SGD-dampening": lambda t: optim.SGD(t, lr=0.1, momentum=0.9, dampening=0.5, foreach=True),
    "Adam": lambda t: optim.Adam(t, amsgrad=True, weight_decay=0.1, maximize=True),
    "Adam-tensor-lr": lambda t: optim.Adam(t, lr=torch.tensor(1e-3), foreach=False),
    "AdamW": lambda t: optim.AdamW(t, lr=1e-12, weight_decay=0.5),
    "AdamW-foreach": lambda t: optim.AdamW(t, amsgrad=True, foreach=True),
    "AdamW-fused": lambda t: optim.AdamW(t, fused=True),
    "Adamax": lambda t: optim.Adamax(t, weight_decay=0.1),
    "NAdam": lambda t: optim.NAdam(t, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda t: optim.RAdam(t, weight_decay=0.1),
    "RMSprop": lambda t: optim.RMSprop(t, centered=True, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda t: optim.Adagrad(t, initial_accumulator_value=0.3, lr_decay=0.1),
    "Adadelta": lambda t: optim.Adadelta(t, weight_decay=0.1),
    "ASGD": lambda t: optim.ASGD(t, t0=1, weight_decay=0.1),
    "Rprop": lambda t: optim.Rprop(t),
    "groups": lambda t: optim.AdamW(
        [
            {"params": t.where(lambda name: name.endswith("s")), "weight_decay": 0.0, "lr": 0.0},
            {"params": t.where(lambda name: not name.endswith("s"))},
        ]
    ),
    "names": lambda t: optim.AdamW(t.items()),
    "some": lambda t: optim.SGD(t.where(lambda name: name == "weight"), lr=0.1),
    "scheduled": lambda t: scheduled(optim.SGD(t, lr=0.1)),
    "own": own.Plain,
    "careful": own.Careful,
    "multiplicative": own.Multiplicative,
    "lookahead": lambda t: own.Lookahead(optim.Adam(t)),
}


def scheduled(optimizer):
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # a warm-up: the learning rate is 0 now
    return optimizer


def stepped(shapes=SHAPES):
    tensors = {name: torch.randn(shape, generator=torch.Generator()).requires_grad_() for name, shape in shapes.items()}
    return Stepped(StepTensors(tensors), shapes, torch.device("cpu"))


def tried(make, *cuts, shapes=SHAPES):
    """Also holds that nothing of the user's has been touched."""
    given = stepped(shapes)
    optimizer = make(given.tensors)
    before = [tensor.detach().clone() for tensor in given.tensors]
    state = repr(optimizer.state)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    found = looks_at(optimizer, given, cuts)
    drawn = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == (random.random(), np.random.rand())
    assert all(torch.equal(*pair) for pair in zip(before, given.tensors, strict=True))
    assert all(tensor.grad is None for tensor in given.tensors)
    assert repr(optimizer.state) == state
    return found


def test_steps_of_elements():
    for kind, make in ELEMENTWISE.items():
        for cuts in ((FLAT,), (ROWS, COLUMNS), ()):
            assert tried(make, *cuts) is ELEMENT, kind


@pytest.mark.parametrize("kind", [*own.TENSOR.values(), optim.Adafactor], ids=lambda kind: kind.__name__)
def test_steps_of_tensors(kind):
    for cut in (FLAT, ROWS, COLUMNS):
        assert tried(kind, cut) is TENSOR
    assert tried(kind) is ELEMENT  # whole parameters are enough


def test_an_optimizer_that_projects():
    for cut in (FLAT, ROWS):
        assert tried(own.Projects, cut) is TENSOR


def test_matrices_only():
    make = lambda tensors: optim.Muon(tensors, lr=1e-2)  # noqa: E731
    for cut in (FLAT, ROWS, COLUMNS):
        assert tried(make, cut, shapes={"weight": (24, 20), "other": (8, 40)}) is TENSOR
    assert tried(make, shapes={"weight": (24, 20)}) is ELEMENT


def test_one_of_several_groups_is_enough():
    class Mixed(own.Plain):
        def update(self, param, state):
            return param.grad / param.grad.norm() if id(param) in self.special() else param.grad

        def special(self):
            return {id(param) for group in self.param_groups if group.get("special") for param in group["params"]}

    def make(tensors):
        matrices = tensors.where(lambda name: name == "weight")
        return Mixed([{"params": matrices, "special": True}, {"params": tensors.where(lambda name: name != "weight")}])

    assert tried(make, FLAT) is TENSOR


def test_what_rows_leave_whole():
    assert tried(own.Centred, FLAT) is TENSOR
    assert tried(own.Centred, ROWS) is ELEMENT
    assert tried(own.Centred, ROWS, COLUMNS) is TENSOR
    assert tried(own.DecaysMatrices, FLAT) is TENSOR
    assert tried(own.DecaysMatrices, ROWS) is ELEMENT


def test_a_column_hides_nothing():
    """The largest matrix has one column, where what looks at rows looks at elements."""
    for shapes in ({"column": (40, 1), "other": (2, 3)}, {"column": (3, 1), "other": (1, 40)}):
        assert tried(own.Centred, COLUMNS, shapes=shapes) is TENSOR


def test_slices_are_tried_as_the_parameters_they_are_of():
    given = stepped({"weight": (5, 1)})
    whole = {"weight": TensorSlice((5, 3), 1, ((0, 1),), 0, 3)}
    with pytest.raises(ValueError, match="Centred looks at more than one element at a time"):
        check_sliced(own.Centred(given.tensors), given, whole)
    check_sliced(optim.AdamW(given.tensors), given, whole)


@pytest.mark.parametrize("cuts", [(FLAT,), (ROWS,), ()])
def test_steps_of_the_whole_model(cuts):
    for kind in (own.Clipped, lambda tensors: own.Clipped(tensors, max_norm=5e3)):
        assert tried(kind, *cuts) is MODEL
    assert tried(lambda tensors: own.Lookahead(own.Clipped(tensors)), *cuts) is MODEL


def test_a_threshold_is_found_among_constructor_arguments():
    """``max_norm`` is an attribute and no option: a class made anew with the options alone would not have it."""
    assert tried(lambda tensors: own.Clipped(tensors, max_norm=None), FLAT) is ELEMENT


def test_a_threshold_that_only_a_nan_passes():
    assert tried(lambda tensors: own.Clipped(tensors, max_norm=1e30), FLAT) is MODEL


def test_who_says_it_is_believed():
    class Said(own.Normalised):
        shardlab_looks_at = "element"

    assert tried(Said, FLAT) is ELEMENT
    given = stepped()
    optimizer = own.Plain(given.tensors)
    for word in ("tensor", "model"):
        optimizer.shardlab_looks_at = word
        assert looks_at(optimizer, given, (FLAT,)) == word
    optimizer.shardlab_looks_at = "rows"
    with pytest.raises(ValueError, match=r"optimizer: Plain.shardlab_looks_at is 'rows', not one of element, tensor"):
        looks_at(optimizer, given, (FLAT,))


def with_hook(tensors):
    optimizer = own.Plain(tensors)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_step_of_its_own(tensors):
    optimizer = own.Plain(tensors)
    optimizer.step = lambda: None
    return optimizer


class NeedsMore(own.Plain):
    def step(self, loss):
        raise AssertionError


CANNOT = {
    "copies": (own.Backup, "an attribute holds a tensor"),
    "hooks": (with_hook, "it has step hooks"),
    "step": (with_step_of_its_own, "its step has been replaced"),
    "argument": (NeedsMore, "TypeError: .*loss"),
    "sparse": (lambda tensors: optim.SparseAdam(list(tensors)), "does not support dense gradients"),
}


def test_what_cannot_be_tried_is_refused_with_what_to_write():
    for make, reason in CANNOT.values():
        with pytest.raises(ValueError, match=rf"(?s)^optimizer: \w+ cannot be tried .*{reason}.*shardlab_looks_at = "):
            tried(make, FLAT)


class CallsItsBase(optim.SGD):
    def step(self, closure=None):
        super().step(closure)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_on_all_optimizers_are_not_called(register):
    optim.SGD([torch.zeros(1)])  # from here on torch runs hooks at the end of both steps of a subclass
    called = []
    hook = register(lambda *_: called.append(1))
    try:
        assert tried(optim.Adam, FLAT) is ELEMENT
        assert tried(CallsItsBase, FLAT) is ELEMENT
        assert not called
        CallsItsBase([torch.zeros(1)]).step()
        assert len(called) == 2
    finally:
        hook.remove()


def test_no_tensor_with_a_gradient_is_an_error_with_words():
    class Careless(own.Plain):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad)

    with pytest.raises(ValueError, match="Careless fails where a tensor is empty and has no gradient"):
        tried(Careless, FLAT)


def test_a_large_model_costs_no_more():
    """The tensors that are stepped are small, whatever the model's are."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50_000, 4096), nn.Linear(4096, 50_000))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    given = Stepped(StepTensors(dict(model.named_parameters())), shapes, torch.device("cpu"))
    assert looks_at(optim.AdamW(given.tensors), given, (FLAT,)) is ELEMENT


class TwoSteps(optim.SGD):
    """The user calls the first of its steps; the engine's is the second."""

    def first_step(self):
        norm = torch.stack([tensor.grad.norm() for tensor in self.param_groups[0]["params"]]).norm()
        for tensor in self.param_groups[0]["params"]:
            tensor.data.add_(tensor.grad / norm)


class Declared(TwoSteps):
    shardlab_looks_at = "element"


def test_methods_beside_step_are_named_since_nobody_tries_them():
    to_step = stepped()
    with pytest.warns(
        UserWarning, match=r"of TwoSteps only step\(\) was tried on pieces, and not first_step; .* say so"
    ):
        fitting_optimizer(TwoSteps, to_step, Cut(Partition.ELEMENTS, num_ranks=2))
    for silent, cut in (
        (Declared, Cut(Partition.ELEMENTS, num_ranks=2)),
        (optim.Adagrad, Cut(Partition.ELEMENTS, num_ranks=2)),  # with share_memory(), torch's own
        (TwoSteps, Cut(Partition.ELEMENTS, num_ranks=1)),
    ):
        fitting_optimizer(silent, to_step, cut)
