"""A plan tried in one process: does the divided model compute, forward and backward, what the whole one does?

``shapes``: one rank of the divided model without memory (``FakeTensorMode``), so a model of any size takes seconds. It
finds a forward that reshapes by a fixed number of heads, and a layer whose input is whole where a part is needed.

``values``: all ranks as threads, with random parameters: outputs and all gradients are compared with the whole model's.
It also finds what only looks right: a fused projection that is cut the wrong way, a softmax over parts of the features,
a parameter of which each rank has only a part of the gradient, a forward that goes another way without gradients. For
models of at most ``MAX_NUMEL`` elements in all copies. It is done in evaluation mode, and again in training mode if the
module was given in that. Dropout takes the mean of what it would draw, which would be other masks on each rank.

Modules are copied; the given one is not changed.
"""

import contextlib
import copy
import linecache
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from shardlab.comm import Communicator
from shardlab.comm.group import is_library
from shardlab.comm.slices import cut
from shardlab.comm.trees import tensors_in
from shardlab.comm.without_ranks import SilentCommunicator, on_threads
from shardlab.partition.slices import TensorSlice, slices_of
from shardlab.tensor_parallel.dry_run import leave_as_is
from shardlab.tensor_parallel.flow import Flow, Run, flow_of, summed, with_gradients
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
        self.why_no_shapes = self.why_no_training = self.why_unsure = ""
        self._references: list[_Reference] = []

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
        except Exception as error:
            self.why_no_shapes = said(error)
            if not self.has_values:
                raise
            return flow_of(self._copy(_random).eval(), self._run)

    def shapes(self, plan: Plan) -> str:
        """Why a plan fails when it is tried with shapes; empty if it does not."""
        if self.why_no_shapes:
            return ""
        try:
            with _no_memory():
                comm = SilentCommunicator(self.num_ranks, 0, MeshAxis.TENSOR)
                _pass(self._copy(_without_memory).eval(), plan, self._run_divided(comm), comm)
        except Exception as error:
            return said(error)
        return ""

    def values(self, plan: Plan) -> str:
        """Why a plan fails when it is tried with values; empty if it does not. ``why_unsure``: another may be right."""
        self._references = self._references or self._made_references()
        for reference in self._references:
            try:
                differs = partial(_differs, reference=reference, plan=plan, run_divided=self._run_divided)
                whys = on_threads(self.num_ranks, differs, MeshAxis.TENSOR)
            except Exception as error:
                whys = [said(error)]
            if why_not := next(filter(None, whys), ""):
                return f"in training mode: {why_not}" if reference.is_training else why_not
        return ""

    def _made_references(self) -> "list[_Reference]":
        """What the whole module gives in evaluation, and in training if it can be tried in that."""
        whole = self._copy(_random)
        before = generator_states()
        references = [_evaluated(copy.deepcopy(whole).eval(), self._run)]
        if generator_states() != before:
            self.why_unsure = "it draws random numbers"
        elif not all(bool(gradient.isfinite().all()) for gradient in references[0].passed.gradients.values()):
            self.why_unsure = "with random parameters it is not finite"
        if any(module.training for module in whole.modules()):
            before = generator_states()
            try:
                passed = _pass(copy.deepcopy(whole), {}, self._run, None)
            except Exception as error:
                self.why_no_training = f"in training mode it fails: {said(error)}"
            else:
                if generator_states() != before:
                    # Ranks would draw other numbers, and differ although they are right.
                    self.why_no_training = "training draws random numbers, and not only for dropout"
                else:
                    references.append(_Reference(whole, passed, is_training=True))
        return references

    def _copy(self, made: Callable[[Tensor], Tensor]) -> nn.Module:
        """A copy whose parameters all train."""
        # By identity, so that a tied weight stays one parameter in the copy.
        memo: dict[int, object] = {}
        for param in self._module.parameters():
            memo[id(param)] = nn.Parameter(made(param.detach()), requires_grad=param.is_floating_point())
        for buffer in self._module.buffers():
            memo[id(buffer)] = _without_memory(buffer) if made is _without_memory else buffer.detach().cpu().clone()
        return copy.deepcopy(self._module, memo)


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
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: `{line:.90}`: {message}"


@dataclass(frozen=True)
class _Passed:
    """A forward and backward: the sum of the results, and of which tensors of them; and all gradients."""

    total: Tensor
    which: list[int]
    gradients: Mapping[str, Tensor]
    slices: Mapping[str, TensorSlice]


@dataclass(frozen=True)
class _Reference:
    """What the whole module gives, with which each rank of a divided one is compared.

    Attributes:
        whole: with the values that each pass begins with, in the mode in which it is tried.
        passed: with gradients.
        quiet: the sum of the same results without gradients; None if that is not to be had, or not to be tried.
        is_training: in training mode.
    """

    whole: nn.Module
    passed: _Passed
    quiet: Tensor | None = None
    is_training: bool = False


def _evaluated(whole: nn.Module, run: Run) -> _Reference:
    # A copy for each pass: it is divided and gets gradients, and the next pass needs the same values.
    module = copy.deepcopy(whole)
    passed = _pass(module, {}, run, None)
    try:
        # Of the same copy: a divided one has had its pass with gradients too, which may have changed its buffers.
        quiet = _without_gradients(module, run, passed.which)
    except Exception:  # such as a loss that asks for gradients itself
        return _Reference(whole, passed)
    return _Reference(whole, passed, quiet)


def _differs(comm: Communicator, reference: _Reference, plan: Plan, run_divided: RunDivided) -> str:
    """How this rank's results or gradients differ from the whole module's; empty if only by rounding."""
    module, run = copy.deepcopy(reference.whole), run_divided(comm)
    why_not = _difference(_pass(module, plan, run, comm), reference.passed)
    if reference.quiet is None:
        return why_not
    # Also where there is a reason already: other ranks may have none, and wait for this one in a collective.
    quiet = _without_gradients(module, run, reference.passed.which)
    if why_not or _close(quiet, reference.quiet, reference.quiet.abs()):
        return why_not
    return "without gradients the result is another one than the whole model's: it goes another way there"


class _MeanOfDropout(TorchDispatchMode):  # private, but nothing public reaches functional.dropout in a user's code
    """Inside, dropout of any kind scales by the mean of the mask that it would draw, and drops nothing."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:  # of which torch makes every mask on the CPU
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return func(*args, **(kwargs or {}))


def _pass(module: nn.Module, plan: Plan, run: Run, comm: Communicator | None) -> _Passed:
    """One pass of a module, which is divided if there is a communicator."""
    if comm is not None:
        divide(module, checked(plan, module, comm.num_ranks), comm, leave_as_is, torch.device("cpu"))
    with _MeanOfDropout():  # type: ignore[no-untyped-call]
        tensors = list(tensors_in(run(module)))
        which = with_gradients(tensors)
        total = summed(tensors, which)
        total.backward()
    gradients = {
        name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in module.named_parameters()
    }
    return _Passed(total.detach(), which, gradients, slices_of(module))


def _without_gradients(module: nn.Module, run: Run, which: list[int]) -> Tensor:
    """The sum of the same results where torch's modules, and others, may take faster ways."""
    with torch.no_grad(), _MeanOfDropout():  # type: ignore[no-untyped-call]
        return summed(run(module), which)


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
