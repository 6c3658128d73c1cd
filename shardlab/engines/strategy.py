"""What a strategy is: the part of an engine that says where parameters, gradients and state are, and what is sent.

An ``Engine`` has the user's verbs and the state of the gradients; its strategy has the idea. A strategy never calls its
engine and knows nothing of users: it lays the model out, and is then told what happens. All methods have a default,
which is that of replicated parameters; a strategy of your own overrides the few in which its idea is:

    class OneMessage(Strategy):
        name = "one_message"

        def make_means(self):
            due = [param for param in self.params.values() if self.is_due(param)]
            sent = [torch.zeros_like(param) if param.grad is None else param.grad for param in due]
            means = torch.cat([one.flatten() for one in sent]).div_(self.num_ranks)
            self.comm.all_reduce(means, tag="all gradients").wait()
            for param, mean in zip(due, means.split([param.numel() for param in due]), strict=True):
                param.grad = mean.view_as(param)

(What this rank did not use it sends as zeros. The mean of what no rank used the engine clears afterwards: it must have
no gradient, as in one process, where weight decay and momentum leave it alone. ``testing.check_strategy`` finds what is
forgotten.)

Messages must be the same on all ranks, in number, order and size. So they may depend on what all ranks know (which
parameters train, what forward ran), and never on what this rank's rows have used; ``is_due`` is the question to ask.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm.communicator import Communicator
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.precision import Precision
from shardlab.vocabulary import MeshAxis, Partition, Role, dtype_name

IN_PARTS = (
    "gradient of {}: it comes in parts, and the first part has already been sent; with reentrant checkpointing, write "
    "checkpoint(..., use_reentrant=False); where full_params() or zero_grad() came in between, call backward() before"
)


def check_replaced(param: nn.Parameter, view: Tensor, name: str) -> None:
    """Check what the user has put in the place of ``view`` by ``.data =``.

    Raises:
        RuntimeError: it has another shape, dtype or device.
    """
    if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"parameter {name!r}: its data was replaced by {tuple(param.shape)} of {dtype_name(param.dtype)} on "
            f"{param.device}, and the engine keeps {tuple(view.shape)} of {dtype_name(view.dtype)} on {view.device}; "
            "convert the module before the engine is built"
        )


class MeshParts(Protocol):
    """Communicators of parts and products of a mesh's axes; see ``comm.base_mesh``."""

    def split(self, axis: str, *, inner: int) -> tuple[Communicator, Communicator]:
        """Across groups of ``inner`` neighbours, and inside this rank's own."""

    def flatten(self, *axes: str) -> Communicator:
        """Over all of these axes at once."""


@dataclass(frozen=True)
class Given:
    """What the engine hands to ``Strategy.lay_out``.

    Attributes:
        module: the user's.
        params: of the module by name, in its order; tied ones once.
        comms: the axes of ``Strategy.axes``, in their order.
        device: of the mesh.
        mesh: for communicators of parts and products of its axes (``split``, ``flatten``), which are observed and
            foretold as the axes are.
        is_due: whether any rank may have a gradient of a parameter; the same answer on all ranks.
        note_backward: to be called by a hook of the strategy's that autograd runs, before it does anything: this may
            be the first sign of a plain ``loss.backward()``. Returns whether a backward runs that accumulates
            gradients.
        equalise: makes tensors those of the first rank; for parameters that the strategy itself has allocated.
    """

    module: nn.Module
    params: dict[str, nn.Parameter]
    comms: tuple[Communicator, ...]
    device: torch.device
    mesh: MeshParts
    is_due: Callable[[nn.Parameter], bool]
    note_backward: Callable[[], bool]
    equalise: Callable[[list[Tensor]], None]


@dataclass(frozen=True)
class LaidOut:
    """What a strategy has made of the model.

    Attributes:
        stepped: what this rank's optimizer steps, for each parameter by its name, in the module's order: the parameter
            itself or, with ``steps_pieces``, another tensor object, which is empty where this rank steps nothing of it.
        divisions: which rank has which elements, bucket by bucket; needed wherever ranks step different pieces;
            else empty, or of one rank. ``ZeRO1.lay_out`` shows how they are made of layouts (``partition.flat``).
        hooks: what was put on the module; the engine removes them when it is closed.
    """

    stepped: Mapping[str, Tensor]
    divisions: list[Division] = field(default_factory=list)
    hooks: Sequence[RemovableHandle] = ()


class Strategy:
    """Replicated parameters, and gradients that nobody averages: what all strategies begin with."""

    name: ClassVar[str] = "strategy"
    precision = Precision()
    """Of the computation; the engine casts inputs and outputs."""
    steps_pieces: ClassVar[bool] = False
    """Whether the optimizer steps tensors other than the module's parameters; means then belong at their ``.grad``."""
    allocates: ClassVar[bool] = False
    """Whether parameters may be on the meta device, to be allocated by ``lay_out``."""
    rounds: ClassVar[bool] = False
    """Whether messages round what they carry: losses then need not be those of one process to the last digits."""
    ranks_differ: ClassVar[bool] = False
    """Whether ranks train on with parameters of their own, by design, as in local SGD: they are not compared then."""
    sends_in_no_sync: ClassVar[bool] = False
    """Whether backwards inside ``no_sync()`` send too: sums over some of the axes, to which later ones are added."""
    is_alone: ClassVar[bool] = False
    """Whether it trains in one process, on the rows of all ranks."""
    by_unit: ClassVar[bool] = False
    """Whether what it sends follows from the units that forward calls."""
    full_gathers = False
    """Whether ``full()`` gathers: exact values are in the stepped pieces alone, sharded or beside what is rounded."""
    state_role = Role.OPTIMIZER_STATE
    """What the optimizer's state counts as: offloaded, where it stays in host memory."""
    units: Sequence[Any] = ()
    """What is gathered together, in the module's order: units of FSDP, buckets of ZeRO-3; else nothing."""
    partition = Partition.ELEMENTS
    """'elements' cuts parameters; else each has one owner, whose optimizer may look at it whole."""
    axes: tuple[str, ...] = (MeshAxis.DATA,)
    """Those of the mesh to average over, outer first; ``comm`` is the last, over which most strategies divide."""

    def lay_out(self, given: Given) -> LaidOut:
        """Take the model: divide, move, allocate. Called once, with equal parameters on all ranks."""
        self.params, self.is_due = given.params, given.is_due
        self.comm, self.comms = given.comms[-1], given.comms
        self.num_ranks = prod(comm.num_ranks for comm in given.comms)
        return LaidOut(given.params)

    def in_forward(self) -> AbstractContextManager[None]:
        """Inside, the module's forward runs."""
        return contextlib.nullcontext()

    def in_backward(self, *, sends: bool) -> AbstractContextManager[None]:
        """Inside, a backward runs; ``sends`` is False inside ``no_sync()``. Left after an error too."""
        return contextlib.nullcontext()

    def kept_gathered(self) -> AbstractContextManager[None]:
        """Inside, parameters that are sharded stay gathered."""
        return contextlib.nullcontext()

    def grad_ready(self, param: nn.Parameter, *, sends: bool) -> None:
        """Autograd has added this rank's gradient of ``param`` to ``param.grad``, and nobody has averaged it yet.

        Called inside ``in_backward``, where autograd has come to the parameter: in an order of this rank's own, never
        for a parameter that this rank's loss did not use, once for one that it used, and once for each part where its
        gradient comes in parts (reentrant checkpointing). ``param.grad`` has the parameter's shape and dtype; it is
        None where a hook of the user's has dropped it.

        Args:
            param: of the module.
            sends: False inside ``no_sync()``.
        """

    def make_means(self) -> None:
        """Make means over the ranks of all gradients; send what ``grad_ready`` has not sent, and wait for all.

        Called after a backward that sends, and before a step, clipping or reading where local sums are left or where
        there was no backward at all. The engine then sends the flag, by which all ranks raise together, and clears the
        ``.grad`` of what is stepped where no rank has used the parameter. Where means stay at the parameters,
        ``param.grad`` may be earlier means and this rank's new sums added up: their mean is what is wanted, too. With
        ``steps_pieces`` guards put a placeholder at ``param.grad`` afterwards, which nobody can read.
        """

    def stepping(self, *, loads: bool = False) -> AbstractContextManager[None]:
        """Inside, the optimizer steps what ``lay_out`` returned; at the end all ranks have the stepped model.

        Args:
            loads: it is no step: a checkpoint has been written into all that this rank keeps, frozen or not.
        """
        return contextlib.nullcontext()

    def visiting(self) -> AbstractContextManager[None]:
        """Inside, what the optimizer steps is on the device of its state."""
        return contextlib.nullcontext()

    def drop(self) -> None:
        """Gradients of parameters and of what is stepped have been cleared: forget what else there is of them."""

    def full(self, *, keep_changes: bool) -> AbstractContextManager[None]:
        """Inside, the module has its full parameters, as they are stored; with ``keep_changes`` writes stay.

        Write into pieces through ``.data``: what else is written into one counts as a user's change, and is refused.
        """
        return contextlib.nullcontext()

    def holdings(self) -> Iterator[Holding]:
        """Every long-lived tensor of parameters and gradients; a storage with two roles counts in the first."""
        for name, param in self.params.items():
            yield Holding(Role.PARAMETER, param, name, (0, param.numel()))
        for name, param in self.params.items():
            # Where means are at pieces, guards leave here what has no memory.
            if param.grad is not None and (param.grad.untyped_storage().nbytes() or not param.numel()):
                yield Holding(Role.GRADIENT, param.grad, name, (0, param.numel()))
