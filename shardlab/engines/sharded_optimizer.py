"""Any torch optimizer with its state sharded over ranks: usable alone, if gradients are already means.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm=mesh.data, lr=3e-4)
    loss.backward(); average_gradients_somehow(); optimizer.step()

Parameters and gradients stay whole on every rank. Each rank steps its pieces and keeps state for those only; an
all-gather puts the parameters together. Per rank for P fp32 parameters and Adam: 4P / 4P / 8P/N.
"""

from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardlab.comm.communicator import Communicator
from shardlab.engines.agreement import all_or_none
from shardlab.engines.buckets import build_buckets
from shardlab.engines.checks import check_separate
from shardlab.engines.claims import PIECES
from shardlab.engines.flat_parameters import FlatParameters
from shardlab.engines.holdings import Division, owned_in, owners_in
from shardlab.engines.optimizer_fit import Cut, fitting_optimizer, parse_partition
from shardlab.engines.optimizer_trial import Stepped
from shardlab.engines.step_tensors import StepTensors, guard_groups, is_clipping
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.vocabulary import Partition


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps this rank's pieces with an optimizer of class ``optimizer_cls``.

    ``param_groups`` and ``state`` are the inner optimizer's, over pieces; set learning rates there, or use a scheduler.

    Args:
        params: what any torch optimizer takes: parameters, pairs of name and parameter, or groups. The same on every
            rank, with equal values.
        optimizer_cls: the class of the optimizer that steps the pieces.
        comm: the ranks to shard over.
        partition: 'elements' cuts buckets into equal chunks; 'round_robin', 'contiguous' and 'balanced' give whole
            parameters to ranks, for optimizers that look at whole tensors.
        bucket_bytes: parameters gathered in one message, in bytes.
        defaults: arguments of ``optimizer_cls``.

    Raises:
        ValueError: an unknown partition, or one that does not fit the optimizer; on all ranks together. Or two
            parameters share memory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        comm: Communicator,
        partition: Partition | str = Partition.ELEMENTS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        **defaults: Any,
    ) -> None:
        super().__init__(params, dict(defaults))
        self.partition = parse_partition(partition)
        self.num_steps = 0
        self._named = _names(self.param_groups)
        check_separate(self._named, {})
        buckets = build_buckets(self._named, comm.num_ranks, bucket_bytes, self.partition, comm.rank)
        # Only after the base has taken its groups: from here on ``add_param_group()`` refuses.
        self.flat_params = FlatParameters(self._named, buckets, comm)
        device = next(iter(self._named.values())).device

        def make(tensors: StepTensors) -> torch.optim.Optimizer:
            return optimizer_cls(self._groups_of(tensors), **defaults)

        shapes = {name: tuple(param.shape) for name, param in self._named.items()}
        stepped, cut = Stepped(self.flat_params.tensors, shapes, device), Cut(self.partition, comm.num_ranks)
        self.inner = all_or_none((comm,), device, lambda: fitting_optimizer(make, stepped, cut))
        guard_groups(self.inner, _Pieces(dict(self.flat_params.tensors.items())))
        self._share()

    @override
    def state_dict(self) -> dict[str, Any]:
        """This rank's state, of its pieces; ``load_state_dict()`` takes it on the same rank of as many."""
        return {**super().state_dict(), PIECES: self._pieces}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned on this rank.

        Raises:
            ValueError: it is not of this rank's pieces.
        """
        if state_dict.get(PIECES) != self._pieces:
            raise ValueError(
                "optimizer.load_state_dict: this rank steps pieces of the parameters, and the state is not of these "
                "pieces; load on each rank what state_dict() returned on that rank, with as many ranks, or train with "
                "an engine, whose save() and load() reshard"
            )
        self.inner.load_state_dict(state_dict)  # which puts others in the place of its groups and state
        self._share()

    @property
    def _pieces(self) -> dict[str, list[int]]:
        return {name: list(span) for name, span in self.owned().items()}

    def _share(self) -> None:
        # The same objects, so that a learning rate set here, by a scheduler or a user, is the inner optimizer's.
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's pieces with the gradients of the parameters, then gather the parameters.

        Args:
            closure: reevaluates the model and returns the loss, as for any torch optimizer; called once.

        Raises:
            RuntimeError: the pieces in ``param_groups`` were written to.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.flat_params.are_written:
            raise RuntimeError(
                "optimizer.param_groups: this rank's pieces were written to, and other ranks have not seen it; write "
                "into the parameters of the module, the same on all ranks"
            )
        self._take_gradients()
        self.flat_params.take_replaced()  # what module.to() or ``.data =`` has put there is stepped too
        try:
            self.inner.step()
        finally:
            self.flat_params.take_assigned()
            self._drop_gradients()
            # Without grad mode, since it writes into parameters. Every rank joins, also one that stepped nothing or
            # whose step raised: else the ranks would go on with different models.
            with torch.no_grad():
                self.flat_params.gather(lambda param: param.requires_grad or param.grad is not None)
        self.num_steps += 1
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear (or zero) the gradients of the parameters."""
        for param in self._named.values():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach().zero_()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being built; afterwards the layout is fixed.

        Raises:
            RuntimeError: called later.
        """
        if hasattr(self, "flat_params"):
            raise RuntimeError(
                "param_group: the layout over ranks is fixed; build a new ShardedOptimizer with all groups"
            )
        super().add_param_group(param_group)

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The ranks that step a piece of each parameter, in the order the parameters were given."""
        return owners_in(self._divisions(), self._named, self.flat_params.comm.num_ranks)

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) that this rank steps of each flattened parameter it steps anything of."""
        return owned_in(self._divisions(), self._named)

    def _divisions(self) -> list[Division]:
        buckets, comm = self.flat_params.buckets, self.flat_params.comm
        return [Division(bucket.layout, comm, bucket.params[0].element_size()) for bucket in buckets]

    def _take_gradients(self) -> None:
        for name in self.flat_params.pieces:
            gradient = self._named[name].grad
            self.flat_params.tensors.by_name(name).grad = (
                None if gradient is None else self.flat_params.slice_of(name, gradient)
            )

    def _drop_gradients(self) -> None:
        # Or these views would keep the full gradients in memory after the caller's zero_grad().
        for tensor in self.flat_params.tensors:
            tensor.grad = None

    def _groups_of(self, tensors: StepTensors) -> list[dict[str, Any]]:
        names = {param: name for name, param in self._named.items()}
        groups = []
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            own = {names[param] for param in group["params"]}
            groups.append({**options, "params": tensors.where(own.__contains__)})
        return groups


class _Pieces(StepTensors):
    """What the inner optimizer steps, with gradients only while it steps."""

    @override
    def check_caller(self, caller: FrameType) -> None:
        """Refuse torch's clipping, which would find no gradients.

        Raises:
            RuntimeError: it is the caller.
        """
        if is_clipping(caller):
            raise RuntimeError(
                "optimizer.param_groups: these are this rank's pieces, which have gradients only inside step(); clip "
                "the gradients of the parameters: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
            )


def _names(groups: list[dict[str, Any]]) -> dict[str, nn.Parameter]:
    """Parameters by name, in the order given; numbered where the caller gave no names or one that is taken."""
    named: dict[str, nn.Parameter] = {}
    for group in groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            known = f"{len(named)}.{name}" if name in named else name
            named[known or str(len(named))] = param
    return named
