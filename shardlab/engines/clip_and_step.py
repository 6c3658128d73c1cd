"""From mean gradients to the stepped model: clipping by the global norm, and the optimizer's step.

A norm of pieces is made from the pieces' norms: the p-th powers add up (p = 1, 2), or the largest counts (p = inf). So
one small reduction for each axis of the mesh is enough, and what all ranks of an axis hold alike is counted once. The
scaling itself is torch's, so that one rank gets bit for bit what plain torch gets.
Source of the method: Pascanu et al., arXiv 1211.5063, algorithm 1.

The step is the user's optimizer's own, built here over ``step_tensors()``. Strategies that divide parameters say what
must happen around it: before it, what the user has written since the last one is taken over or refused; after it, what
was stepped in pieces is gathered.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import chain
from math import inf, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardlab.comm import BaseMesh, Communicator
from shardlab.engines.agreement import all_or_none
from shardlab.engines.checks import check_optimizer, check_others_step
from shardlab.engines.claims import Claim
from shardlab.engines.gradients import Gradients
from shardlab.engines.holdings import Holdings
from shardlab.engines.optimizer_fit import Cut, check_choice_of_slices, check_sliced, fitting_optimizer, without_values
from shardlab.engines.optimizer_trial import Stepped
from shardlab.engines.step_tensors import OptimizerFn, StepTensors, guard_groups
from shardlab.vocabulary import Partition

NORM_TYPES = (1.0, 2.0, inf)
Axes = tuple[Communicator, ...]


class Stepping(Holdings, Gradients):
    """The part of ``Engine`` that clips and steps."""

    mesh: BaseMesh
    num_steps: int
    partition: Partition = Partition.ELEMENTS
    """How parameters are cut, where they are divided over ranks."""
    _pieces_are_rows = False
    """Whether no piece begins or ends inside a row."""
    _steps_pieces = False
    """Whether the optimizer is given pieces of parameters instead of the module's own."""
    _given_params: dict[str, nn.Parameter]
    """The module's when the engine was built, before any were allocated; until the optimizer is made."""
    _claim: Claim

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Args:
            max_norm: greater than 0.
            norm_type: 1, 2 or inf.

        Returns:
            The norm before clipping, 0-d, equal on all ranks.
        """
        self.finish_gradients()
        tensors: dict[Axes, list[Tensor]] = {}
        for name, axes in self.spread_over().items():
            tensors.setdefault(axes, []).append(self.step_tensors().by_name(name))
        norm = clip_(tensors, max_norm, norm_type, self.mesh.device)
        self.guard_slices()
        return norm

    def step(self) -> None:
        """One optimizer step; afterwards all ranks train on with the same model."""
        if self._steps_pieces:
            self._step_tensors.check_pieces(self.optimizer, self.params)
        self.take_changes()
        # On ranks that called no backward too: the others wait for their part of the reductions. (This does not help
        # where backward also gathers, as in zero3, nor where this rank has means of an earlier backward: the ranks'
        # collectives differ, and the error or the table of the hang says so.)
        self.finish_gradients()
        if self._count_stepped() != self._num_stepped:
            # A group was added: of a tensor that the engine does not know, nobody averages the gradients.
            check_optimizer(self.optimizer, self.step_tensors())
            self._note_groups()
        with self.stepping(), self._claim.stepping():
            try:
                self.optimizer.step()
            finally:  # after an error too, or later steps would change tensors that nobody gathers
                self._take_assigned()
        self._guarded.clear()  # spent: they may be zeroed in place, and some optimizers change them
        self.num_steps += 1
        # Here zero1 and zero2 gather. As a rule they have done so at the end of the optimizer's step, where the claim's
        # hook calls this; but an optimizer may run no hooks, and a hook of the user's may have written since.
        self.after_optimizer_step()

    def before_others_step(self, optimizer: torch.optim.Optimizer, *, inside: bool) -> None:
        """Another optimizer of this process is about to step; ``inside`` a step of the engine's own.

        Raises:
            RuntimeError: it steps parameters of the module of which this engine steps pieces, or steps parameters
                before their gradients are averaged.
        """
        if inside:
            return
        several = self.num_data_ranks > 1
        is_early, is_behind = several and self._backward_watch.is_inside, several and self._step_tensors.are_behind
        check_others_step(optimizer, self.params, self._step_tensors, self.name, is_early=is_early, is_behind=is_behind)

    def take_changes(self) -> None:
        """Before a step: take over what the user has written, or refuse what the step would miss."""
        return

    def before_optimizer_step(self) -> None:
        """The engine's optimizer is about to step; ``Claim`` calls this after its hooks, which may have written."""
        self.take_changes()

    def after_optimizer_step(self) -> None:
        """The optimizer has stepped; ``Claim`` calls this before its hooks, which must find the stepped model."""
        return

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group; setting it sets that of all groups."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``step_tensors()`` are where the optimizer keeps its state."""
        return contextlib.nullcontext()

    def install_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a state dict of the optimizer over this rank's ``step_tensors()``."""
        # Torch moves the state to the device of the tensors; inside, those are where they are stepped.
        with self.stepping(), self._claim.installing():
            self.optimizer.load_state_dict(state)

    def _take_assigned(self) -> None:
        """Take over what the optimizer has put in the place of a piece by assigning to its ``.data``."""
        return

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        """The optimizer; refuses one that would be wrong for how the parameters are divided."""
        num_ranks = 1 if self.sharded_over is None else self.sharded_over.num_ranks
        cut = Cut(self.partition, num_ranks, by_rows=self._pieces_are_rows)

        def make() -> torch.optim.Optimizer:
            # First: what the user's function keeps is to be of the optimizer that it makes last.
            check_choice_of_slices(optimizer_fn, self._stepped(), self.slices)
            optimizer = fitting_optimizer(optimizer_fn, self._stepped(), cut)
            check_sliced(optimizer, self._stepped(), self.slices)
            return optimizer

        try:
            # Pieces differ by rank, so one rank may refuse its own while another accepts: then all must refuse.
            return make() if num_ranks == 1 else all_or_none(self.comms, self.mesh.device, make)
        except Exception:
            # This may gather. All ranks have raised, so all of them join.
            self._give_back()
            raise

    def _give_back(self) -> None:
        """Put into the module what plain training needs; collective where this rank keeps only pieces."""
        return

    def _note_groups(self) -> None:
        self._num_stepped = self._count_stepped()
        if any(tensor is not self.params[name] for name, tensor in self._step_tensors.items()):
            guard_groups(self.optimizer, self._step_tensors)

    def _count_stepped(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _stepped(self) -> Stepped:
        """What the optimizer steps."""
        shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        # Asked inside, since offloaded pieces are on the device of the optimizer only during a step.
        with self.stepping():
            own = self._lent_params if self._steps_pieces else None
            return Stepped(self.step_tensors(), shapes, self.step_tensors()[0].device, own)

    @contextlib.contextmanager
    def _lent_params(self) -> Iterator[list[StepTensors]]:
        """The module's own parameters, inside without their values, for a user's function to choose from.

        Those that the engine was given, too, if it has allocated others: the user may know them by identity.
        """
        sets = [self.params]
        if any(param is not self.params[name] for name, param in self._given_params.items()):
            sets.append(self._given_params)
        with self._own_params(), contextlib.ExitStack() as lent:
            for name, param in chain.from_iterable(params.items() for params in sets):
                lent.enter_context(without_values(param, self._step_tensors.by_name(name).dtype))
            yield [StepTensors(params) for params in sets]

    def _own_params(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the module has its parameters, if perhaps not their values."""
        return contextlib.nullcontext()


def clip_(tensors: Mapping[Axes, Iterable[Tensor]], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale the gradients of ``tensors`` in place; return the norm before clipping, 0-d, equal on all ranks.

    Args:
        tensors: what this rank steps, by the axes over which the other pieces are spread; () where every rank holds
            everything. Tensors without a gradient do not count.
        max_norm: greater than 0.
        norm_type: 1, 2 or inf.
        device: on which the axes communicate.

    Raises:
        ValueError: another norm type, or a ``max_norm`` that is not positive.
    """
    if norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type: {norm_type} is not one of 1, 2, inf")
    if not max_norm > 0:
        raise ValueError(f"max_norm: {max_norm} is not greater than 0")
    everything = [tensor for some in tensors.values() for tensor in some]
    norms = {
        # Nothing is in an empty one, of which torch refuses the largest value.
        axes: get_total_norm([tensor.grad for tensor in some if tensor.grad is not None and tensor.numel()], norm_type)
        for axes, some in tensors.items()
    }
    norm = norms[()] if set(norms) == {()} else _over_axes(norms, norm_type, device)
    # A rank that holds nothing has a norm in torch's default dtype; all ranks must return the same dtype.
    dtypes = {tensor.dtype for tensor in everything if tensor.is_floating_point()}
    norm = norm.to(reduce(torch.promote_types, dtypes, torch.float32))
    # All ranks scale by this one number, so what several of them hold alike stays alike.
    clip_grads_with_norm_(everything, max_norm, norm)
    return norm


def _over_axes(norms: Mapping[Axes, Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The global norm, in float64: one reduction per axis, of one number for each group of tensors spread over it."""
    power = 1.0 if norm_type == inf else norm_type
    parts = {axes: norm.to(device, torch.float64) ** power for axes, norm in norms.items()}
    # The axes in the order in which parameters use them, which is the module's and so the same on every rank.
    for comm in dict.fromkeys(comm for axes in parts for comm in axes):
        spread = [axes for axes in parts if comm in axes]
        message = torch.stack([parts[axes] for axes in spread])
        if norm_type == inf:
            # Beside each norm whether it is NaN, which the maximum of some transports leaves out.
            message = torch.cat([message.nan_to_num(nan=0.0, posinf=inf), message.isnan().to(message)])
        comm.all_reduce(message, reduction="max" if norm_type == inf else "sum", tag="gradient norm").wait()
        if norm_type == inf:
            largest, are_nan = message.chunk(2)
            message = largest.masked_fill(are_nan > 0, nan)
        # A group that is spread over two axes is reduced again, over the second, from these results.
        parts.update(zip(spread, message.unbind(), strict=True))
    values = torch.stack(list(parts.values()))
    return values.max() if norm_type == inf else values.sum() ** (1.0 / power)
