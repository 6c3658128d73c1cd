"""What an optimizer looks at when it steps an element: that element, the whole tensor, or the whole model.

Adam may step any piece of a parameter; LAMB needs the whole parameter, L-BFGS all of them. A trial finds out: one copy
of the optimizer, with the same options, steps a few small tensors with fixed gradients; another copy steps pieces of
them, a third only some of them. If the results differ, the optimizer looks at more than it would be given. The trial
needs nothing from the optimizer's class, sends nothing, and leaves the user's tensors, generators and hooks alone.

An optimizer that looks at whole tensors only after many steps, or that cannot be copied, declares what it looks at, in
its class or on the instance: ``shardlab_looks_at = "tensor"``. The declaration is believed without a trial.
"""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from math import nan, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardlab.engines.optimizer_copy import StandIn, copy_of, stand_ins
from shardlab.engines.step_tensors import StepTensors

DECLARATION = "shardlab_looks_at"
# These may begin to look at whole tensors only after more steps than a trial has.
LATE = frozenset({"Shampoo", "SOAP"})
STEP_SCALES = (1.0, 1e3, 1e-2, 1.0)  # of the gradients of each step; large ones show clipping by a norm
TOLERANCE = 1e-4  # relative to a step: pieces may round differently from the whole
DTYPES = (torch.float64, torch.float32)  # some optimizers take only the second

Part = Callable[[int, Tensor], Tensor]
"""What a rank has of tensor number i: a piece, the whole, or an empty tensor."""
Cutter = Callable[[Tensor], Sequence[Tensor]]
"""The pieces of a tensor on two ranks."""


class LooksAt(StrEnum):
    """What the step of an element depends on, apart from the options."""

    ELEMENT = "element"
    TENSOR = "tensor"
    MODEL = "model"


@dataclass(frozen=True)
class Stepped:
    """What an optimizer steps.

    Attributes:
        tensors: what it was given, pieces or whole parameters.
        shapes: of the whole parameters, by name.
        device: where the tensors are during a step.
        own: lends the module's own parameters without their values, see ``without_values``: those of the engine, and
            those that it was given if it has allocated others. None if ``tensors`` are no pieces of a module's.
    """

    tensors: StepTensors
    shapes: Mapping[str, tuple[int, ...]]
    device: torch.device
    own: Callable[[], AbstractContextManager[list[StepTensors]]] | None = None


def flat_pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Two pieces of the flattened tensor, cut inside a row. A single element stays whole."""
    if tensor.numel() < 2:
        return tensor, tensor.new_empty(0)
    return tensor.reshape(-1).tensor_split([tensor.numel() * 2 // 5])


def pieces_along(dim: int) -> Cutter:
    """Cuts into two blocks of rows (dim 0) or columns (dim 1); a tensor without that dim is cut along its last."""

    def cut(tensor: Tensor) -> Sequence[Tensor]:
        if tensor.dim() == 0:
            return tensor, tensor.new_empty(0)
        return tensor.tensor_split(2, dim=min(dim, tensor.dim() - 1))

    return cut


def looks_at(optimizer: torch.optim.Optimizer, stepped: Stepped, cuts: Sequence[Cutter]) -> LooksAt:
    """What ``optimizer`` looks at: what it declares, else what a trial of a few milliseconds shows.

    Args:
        optimizer: new; it is neither stepped nor changed.
        stepped: its tensors.
        cuts: ways of cutting to try; without any, ``ELEMENT`` may also mean ``TENSOR``.

    Raises:
        ValueError: it declares something other than 'element', 'tensor' or 'model', or cannot be tried.
    """
    declared = getattr(optimizer, DECLARATION, None)
    if declared is not None:
        return _parse(declared, optimizer)
    if type(optimizer).__name__ in LATE:
        return LooksAt.TENSOR
    with generators_kept(stepped.device), _one_thread(), _hooks_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _tried(optimizer, stepped, cuts)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the random generators that training may draw from: Python's, NumPy's, torch's, the device's."""
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), of_device


@contextlib.contextmanager
def generators_kept(device: torch.device, states: tuple[Any, ...] | None = None) -> Iterator[None]:
    """Inside, drawing from the random generators changes nothing for training; it begins with ``states`` if given."""
    known = generator_states(device)
    if states is not None:
        _set_generators(device, states)
    try:
        yield
    finally:
        _set_generators(device, known)


def _set_generators(device: torch.device, states: tuple[Any, ...]) -> None:
    in_python, in_numpy, in_torch, of_device = states
    random.setstate(in_python)
    np.random.set_state(in_numpy)
    torch.set_rng_state(in_torch)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, device)


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Inside, torch runs no hooks on all optimizers of the process: they are for those that train."""
    everywhere: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [(hooks, dict(hooks)) for hooks in everywhere]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, known in kept:
            hooks.update(known)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread: waking a second one takes longer than stepping a few small tensors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _parse(declared: object, optimizer: torch.optim.Optimizer) -> LooksAt:
    if declared not in tuple(LooksAt):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__}.{DECLARATION} is {declared!r}, not one of {', '.join(LooksAt)}"
        )
    return LooksAt(str(declared))


def _tried(optimizer: torch.optim.Optimizer, stepped: Stepped, cuts: Sequence[Cutter]) -> LooksAt:
    trial = _begun(optimizer, stepped)
    try:
        alone = all(trial.agrees(_every_second(rank)) for rank in (0, 1))
    except Exception as error:  # a user's class may raise anything
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} fails where a tensor is empty and has no gradient "
            f"({type(error).__name__}: {error}), as on a rank that holds nothing of a parameter; let its step skip "
            "tensors whose grad is None, as torch's optimizers do"
        ) from error
    if not alone:
        return LooksAt.MODEL
    for cut in cuts:
        for rank in (0, 1):
            try:
                same = trial.agrees(_piece(cut, rank))
            except Exception:  # it accepts only matrices, for example, and that is an answer
                same = False
            if not same:
                return LooksAt.TENSOR
    return LooksAt.ELEMENT


def _begun(optimizer: torch.optim.Optimizer, stepped: Stepped) -> "_Trial":
    """A trial that has already stepped the whole tensors."""
    for dtype in DTYPES:
        try:
            return _Trial(optimizer, stepped, dtype)
        except Exception as error:  # a user's class may raise anything
            reason = error
    raise ValueError(
        f"optimizer: {type(optimizer).__name__} cannot be tried on small tensors ({type(reason).__name__}: {reason}), "
        "which would show whether it may step pieces of a sharded model; declare it in its class: "
        f"{DECLARATION} = 'element', 'tensor' or 'model'"
    ) from reason


class _Trial:
    """Steps of copies of an optimizer, on a few small tensors and on parts of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: Stepped, dtype: torch.dtype) -> None:
        self._optimizer, self._stepped = optimizer, stepped
        self._stand_ins, self._place = stand_ins(optimizer, stepped.tensors, stepped.shapes)
        generator = torch.Generator().manual_seed(0)

        def drawn(number: int, stand_in: StandIn) -> Tensor:
            # No two tensors have the same norm, nor have two pieces of one.
            values = torch.randn(stand_in.shape, generator=generator, dtype=torch.float64)
            slope = torch.linspace(0.25, 4.0, prod(stand_in.shape), dtype=torch.float64)
            return (values * slope.view(stand_in.shape) * (1 + number)).to(stepped.device, dtype)

        self._start = [drawn(number, stand_in) for number, stand_in in enumerate(self._stand_ins)]
        self._gradients = [
            [drawn(number, stand_in) * scale for number, stand_in in enumerate(self._stand_ins)]
            for scale in STEP_SCALES
        ]
        self._gradients.append(self._orthogonal())
        # Last, one NaN, at which an optimizer may leave out the whole step, where its rank sees it.
        self._gradients.append([gradient.clone() for gradient in self._gradients[0]])
        self._gradients[-1][0].view(-1)[-1:] = nan
        try:
            self._whole = self._steps(_whole)
        except Exception:  # it may refuse a NaN
            self._gradients.pop()
            self._whole = self._steps(_whole)

    def agrees(self, part: Part) -> bool:
        """Whether stepping the parts gives the parts of the stepped tensors."""
        before, after = self._start, self._steps(part)
        for whole, parts in zip(self._whole, after, strict=True):
            for number, (old, new, own) in enumerate(zip(before, whole, parts, strict=True)):
                expected = part(number, new)
                # First whether they are equal, which they are as a rule: that takes a tenth of the time.
                if not (torch.equal(own, expected) or _differ_by_rounding(own, expected, part(number, old))):
                    return False
            before = whole
        return True

    def _orthogonal(self) -> list[Tensor]:
        """Gradients of a further step, each row at right angles to that of its tensor: some project only then."""
        gradients = []
        for param, gradient in zip(self._steps(_whole)[-1], self._gradients[0], strict=True):
            if not param.numel():
                gradients.append(gradient)
                continue
            rows, along = (tensor.reshape(len(tensor) if tensor.dim() > 1 else 1, -1) for tensor in (gradient, param))
            length = along.square().sum(1, keepdim=True).clamp(min=torch.finfo(along.dtype).tiny)
            gradients.append((rows - (rows * along).sum(1, keepdim=True) / length * along).view_as(gradient))
        return gradients

    def _steps(self, part: Part) -> list[list[Tensor]]:
        """The parts of all tensors after each step."""
        _seed(self._stepped.device)  # each copy must draw the same numbers; the caller restores the generators
        # An empty part has no gradient, as on a rank that holds nothing of a parameter.
        params = [part(number, start).clone().requires_grad_() for number, start in enumerate(self._start)]
        optimizer = copy_of(self._optimizer, self._stand_ins, self._place, params)
        found = []
        for gradients in self._gradients:
            for number, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
                param.grad = part(number, gradient).clone() if param.numel() else None
            type(optimizer).step(optimizer)  # a scheduler may have replaced the instance's own
            found.append([param.detach().clone() for param in params])
        return found


def _differ_by_rounding(found: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Whether two results of a step from ``before`` are equal but for how they were rounded."""
    # NaN or the same infinity in both is no difference; in one of them it is, and fails the comparison.
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    difference = (found - expected).masked_fill(is_same, 0.0).double().norm()
    step, start = (tensor.nan_to_num(0.0, 0.0, 0.0).double().norm() for tensor in (expected - before, before))
    return bool(difference <= TOLERANCE * step + 64 * torch.finfo(before.dtype).eps * start)


def _seed(device: torch.device) -> None:
    # Not torch.manual_seed: before CUDA has begun, that notes the stack of its caller, for milliseconds and for ever.
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(0)


def _whole(_: int, tensor: Tensor) -> Tensor:
    return tensor


def _every_second(rank: int) -> Part:
    return lambda number, tensor: tensor if number % 2 == rank else tensor.reshape(tensor.shape or (1,))[:0]


def _piece(cut: Cutter, rank: int) -> Part:
    return lambda _, tensor: cut(tensor)[rank]
