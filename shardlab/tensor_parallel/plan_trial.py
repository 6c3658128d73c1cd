"""A plan tried in one process: does the divided model compute, forward and backward, what the whole one does?

``shapes``: one rank of the divided model without memory (``FakeTensorMode``), so a model of any size takes seconds. It
finds a forward that reshapes by a fixed number of heads, and a layer whose input is whole where a part is needed.

``values``: all ranks as threads, with random parameters: outputs and all gradients are compared with the whole model's.
It also finds what only looks right: a fused projection that is cut the wrong way, a softmax over parts of the features,
a parameter of which each rank has only a part of the gradient. For models of at most ``MAX_NUMEL`` elements in all
copies. A module in training mode is tried in that, or, if it fails or draws random numbers there, in evaluation mode.
Dropout takes the mean of what it would draw, which would be other masks on each rank.

``first_rank_of`` is what one rank holds, without memory. Modules are copied; the given one is not changed.
"""

import contextlib
import copy
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.comm import Communicator
from shardlab.comm.callers import is_library
from shardlab.comm.foretold import ForetoldMesh
from shardlab.comm.slices import cut
from shardlab.comm.without_ranks import on_threads
from shardlab.partition.slices import TensorSlice, slices_of
from shardlab.tensor_parallel.flow import Flow, Run, flow_of, summed
from shardlab.tensor_parallel.plan import Plan, checked, divide
from shardlab.tensor_parallel.rng import generator_states
from shardlab.vocabulary import MeshAxis

RunDivided = Callable[[Communicator], Run]
MAX_NUMEL = 150_000_000
# Differences by rounding, relative; a layer that is cut wrong is off by its own size.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.05
_PACKAGE = str(Path(__file__).parents[1])


def has_room(module: nn.Module, num_ranks: int) -> bool:
    """Whether a trial with values fits: of all ranks, and three copies of the whole module."""
    return _numel(module) * (num_ranks + 3) <= MAX_NUMEL


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class PlanTrial:
    """Tries plans for a module.

    Args:
        module: on any device; one on the meta device is tried with shapes only.
        num_ranks: of the tensor axis.
        run: calls a copy of the module, on the CPU, as training does.
        run_divided: of a tensor axis, what calls a divided copy; None for ``run``.
    """

    def __init__(self, module: nn.Module, num_ranks: int, run: Run, run_divided: RunDivided | None = None) -> None:
        self._module, self.num_ranks, self._run = module, num_ranks, run
        self._run_divided = run_divided or (lambda _: run)
        tensors = [*module.parameters(), *module.buffers()]
        self.why_no_values = ""
        if any(tensor.is_meta for tensor in tensors):
            self.why_no_values = "it is on the meta device"
        elif not has_room(module, num_ranks):
            self.why_no_values = f"{_numel(module):,} parameters are too many"
        self.why_no_training = self.why_unsure = ""
        self._reference: tuple[nn.Module, _Passed] | None = None

    @property
    def has_values(self) -> bool:
        """Whether plans can be tried with values."""
        return not self.why_no_values

    def flow(self) -> Flow:
        """The flow of a forward, without memory if that can be had.

        Raises:
            Exception: what ``run`` raises.
        """
        try:
            with _no_memory():
                return flow_of(self._copy(_without_memory).eval(), self._run)
        except Exception:
            if not self.has_values:
                raise
            return flow_of(self._copy(_random).eval(), self._run)

    def fails(self, plan: Plan) -> str:
        """Why a plan fails, tried with values or else with shapes; empty if it does not.

        With ``why_unsure`` it may be right all the same.
        """
        return self._values(plan) if self.has_values else self._shapes(plan)

    def _shapes(self, plan: Plan) -> str:
        try:
            with _no_memory():
                comm = ForetoldMesh({MeshAxis.TENSOR: self.num_ranks}, 0)[MeshAxis.TENSOR]
                _pass(self._copy(_without_memory).eval(), plan, self._run_divided(comm), comm)
        except Exception as error:
            return said(error)
        return ""

    def _values(self, plan: Plan) -> str:
        whole, passed = self._reference = self._reference or self._made_reference()

        def differs(comm: Communicator) -> str:
            return _difference(_pass(copy.deepcopy(whole), plan, self._run_divided(comm), comm), passed)

        try:
            whys = on_threads(self.num_ranks, differs, MeshAxis.TENSOR)
        except Exception as error:
            whys = [said(error)]
        return next(filter(None, whys), "")

    def _made_reference(self) -> "tuple[nn.Module, _Passed]":
        """A module with the values that each pass begins with, in the mode in which plans are tried; and its pass."""
        whole = self._copy(_random)
        if any(module.training for module in whole.modules()):
            try:
                passed, why_unsure = _whole_pass(whole, self._run)
            except Exception as error:
                why_unsure = f"it fails: {said(error)}"
            if not why_unsure:
                return whole, passed
            self.why_no_training = f"in training mode {why_unsure}"
            whole.eval()
        passed, self.why_unsure = _whole_pass(whole, self._run)
        return whole, passed

    def _copy(self, made: Callable[[Tensor], Tensor]) -> nn.Module:
        """A copy whose parameters all train."""

        def param(old: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(made(old.detach()), requires_grad=old.is_floating_point())

        return _copied(self._module, param, made if made is _without_memory else lambda old: old.detach().cpu().clone())


def first_rank_of(module: nn.Module, plan: Plan, num_ranks: int) -> nn.Module:
    """What the first rank of a tensor axis holds: a divided copy, whose parameters have shapes and no memory.

    Args:
        module: on any device.
        plan: how it is divided.
        num_ranks: of the tensor axis.
    """
    comm = ForetoldMesh({MeshAxis.TENSOR: num_ranks}, 0)[MeshAxis.TENSOR]
    with FakeTensorMode(allow_non_fake_inputs=True):
        divided = _copied(
            module,
            lambda old: nn.Parameter(_without_memory(old), requires_grad=old.requires_grad),
            _without_memory,
        )
        divide(divided, checked(plan, module, num_ranks), comm, _leave_as_is, torch.device("cpu"))
    return divided


def _copied(
    module: nn.Module, of_param: Callable[[nn.Parameter], nn.Parameter], of_buffer: Callable[[Tensor], Tensor]
) -> nn.Module:
    """A copy with other parameters and buffers."""
    # By identity, so that a tied weight stays one parameter in the copy.
    memo: dict[int, object] = {id(old): of_param(old) for old in module.parameters()}
    return copy.deepcopy(module, memo | {id(old): of_buffer(old) for old in module.buffers()})


@contextlib.contextmanager
def _no_memory() -> Iterator[None]:
    """Inside, tensors have shapes and no memory, also those that are real outside."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)  # it logs the traceback of what fails here, although that may be the answer
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.setLevel(before)


def said(error: Exception) -> str:
    """An error in a line: where in the user's code it was raised, and the message."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith(_PACKAGE) and not is_library(frame.filename)]
    message = str(error).strip().split("\n")[0] or type(error).__name__
    if "is invalid for input of size" in message:
        message += ": it reshapes by a fixed number of heads or features; write -1 for that"
    if not frames:
        return message
    where = frames[-1]
    return f"{Path(where.filename).name}:{where.lineno}: `{where.line or '':.90}`: {message}"


@dataclass(frozen=True)
class _Passed:
    """A forward and backward: the sum of the results and all gradients."""

    total: Tensor
    gradients: Mapping[str, Tensor]
    slices: Mapping[str, TensorSlice]


class _MeanOfDropout(TorchDispatchMode):  # private, but nothing public reaches functional.dropout in a user's code
    """Inside, dropout of any kind scales by the mean of the mask that it would draw, and drops nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:  # of which torch makes every mask on the CPU
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return func(*args, **(kwargs or {}))


def _pass(module: nn.Module, plan: Plan, run: Run, comm: Communicator | None) -> _Passed:
    """One pass of a module, which is divided if there is a communicator."""
    if comm is not None:
        divide(module, checked(plan, module, comm.num_ranks), comm, _leave_as_is, torch.device("cpu"))
    with _MeanOfDropout():  # type: ignore[no-untyped-call]
        total = summed(run(module))
        total.backward()
    gradients = {
        name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in module.named_parameters()
    }
    return _Passed(total.detach(), gradients, slices_of(module))


def _whole_pass(whole: nn.Module, run: Run) -> tuple[_Passed, str]:
    """One pass of a copy of the whole module, and why another one may differ from it and be right."""
    before = generator_states()
    passed = _pass(copy.deepcopy(whole), {}, run, None)
    if generator_states() != before:
        return passed, "it draws random numbers"  # each rank would draw others
    if not all(bool(gradient.isfinite().all()) for gradient in passed.gradients.values()):
        return passed, "with random parameters it is not finite"
    return passed, ""


def _difference(rank: _Passed, whole: _Passed) -> str:
    """How one rank's result or gradients differ from the whole module's; empty if only by rounding."""
    if not _close(rank.total, whole.total, whole.total.abs()):
        return "the result is another one than the whole model's: the features are not independent of each other"
    scale = torch.stack([gradient.norm().float() for gradient in whole.gradients.values()]).max()
    for name, gradient in whole.gradients.items():
        expected = cut(gradient, rank.slices[name]) if name in rank.slices else gradient
        # Gradients that are zero but for rounding, such as of a key's bias, are compared with the largest one.
        if not _close(rank.gradients[name], expected, expected.norm() + 1e-3 * scale):
            if name in rank.slices:
                return f"the gradient of {name!r} is no part of the whole one: the layer is not cut as it is used"
            return f"the gradient of {name!r} differs from the whole model's: it is used where features are in parts"
    return ""


def _close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    tolerance = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
    return bool((found - expected).norm() <= tolerance * scale)


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


def _random(tensor: Tensor) -> Tensor:
    """Values with which nothing is zero: a layer that begins with zeros would agree with anything."""
    tensor = tensor.cpu()
    if not tensor.is_floating_point():
        return tensor.clone()
    noise = torch.randn(tensor.shape, dtype=torch.float32).to(tensor.dtype)
    return noise / prod(tensor.shape[1:]) ** 0.5 if tensor.dim() > 1 else tensor + 0.1 * noise


def _leave_as_is(name: str, module: nn.Module) -> None:
    """An ``init_fn`` where nothing is to be initialised."""
