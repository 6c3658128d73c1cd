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

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.communicator import Communicator
from shardlab.engines.any_engine import owned_in
from shardlab.engines.guards.clipping import guard_groups, is_clipping
from shardlab.engines.guards.model_checks import check_separate
from shardlab.engines.guards.optimizer_fit import check_fits
from shardlab.engines.guards.snapshot import Snapshot
from shardlab.engines.step_tensors import StepTensors, over_pieces
from shardlab.engines.strategy import Given
from shardlab.engines.zero1 import ZeRO1
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.vocabulary import Partition

_PIECES = "shardlab_pieces"  # in its state dict: of which pieces it is


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
        self, params: Iterable[Any], optimizer_cls: Callable[..., torch.optim.Optimizer], *, comm: Communicator,
        partition: Partition | str = Partition.ELEMENTS, bucket_bytes: int = DEFAULT_BUCKET_BYTES, **defaults: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, dict(defaults))
        self.num_steps = 0
        self._named = _names(self.param_groups)
        check_separate(self._named, {})
        # Only after the base has taken its groups: from here on ``add_param_group()`` refuses.
        self._zero = ZeRO1(bucket_bytes=bucket_bytes, partition=partition)
        device = next(iter(self._named.values())).device
        mesh = BaseMesh({comm.axis: comm.num_ranks}, comm.ranks, device)
        given = Given(nn.Module(), self._named, (comm,), device, mesh, _may_have_gradient, lambda: True, lambda _: None)
        laid_out = self._zero.lay_out(given)
        self._divisions, self._tensors = laid_out.divisions, StepTensors(laid_out.stepped)

        inner = over_pieces(optimizer_cls(self.param_groups, **defaults), self._named, laid_out.stepped)
        check_fits(inner, self._zero.partition if comm.num_ranks > 1 else None)
        self.inner = inner
        guard_groups(self.inner, _refuse_clipping)
        self._share()
        self._stepped, self._given = Snapshot(laid_out.stepped), Snapshot(self._named)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, of its pieces; ``load_state_dict()`` takes it on the same rank of as many."""
        return {**super().state_dict(), _PIECES: self._pieces}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned on this rank.

        Raises:
            ValueError: it is not of this rank's pieces.
        """
        if state_dict.get(_PIECES) != self._pieces:
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

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's pieces with the gradients of the parameters, then gather the parameters.

        Args:
            closure: reevaluates the model and returns the loss, as for any torch optimizer; called once.

        Raises:
            RuntimeError: the pieces in ``param_groups`` were written to, or a parameter's data was replaced.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_writes()
        self._take_gradients()
        try:
            # Without grad mode, since the gather writes into parameters. Every rank joins it, also one that stepped
            # nothing or whose step raised: else the ranks would go on with different models.
            with torch.no_grad(), self._zero.stepping():
                self.inner.step()
        finally:
            self._drop_gradients()
            self._stepped.remember("version")
        self.num_steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear (or zero) the gradients of the parameters."""
        for param in self._named.values():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach().zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being built; afterwards the layout is fixed.

        Raises:
            RuntimeError: called later.
        """
        if hasattr(self, "_zero"):
            raise RuntimeError(
                "param_group: the layout over ranks is fixed; build a new ShardedOptimizer with all groups"
            )
        super().add_param_group(param_group)

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) that this rank steps of each flattened parameter it steps anything of."""
        return owned_in(self._divisions, self._named)

    def _refuse_writes(self) -> None:
        if self._stepped.changed("version"):
            raise RuntimeError(
                "optimizer.param_groups: this rank's pieces were written to, and other ranks have not seen it; "
                "write into the parameters of the module, the same on all ranks"
            )
        if moved := self._given.changed("place"):
            raise RuntimeError(
                f"parameter {moved[0]!r}: its data was replaced by .data =, by module.to() or the like, and the "
                "optimizer steps what was there; write into it in place, or build the optimizer afterwards"
            )

    def _take_gradients(self) -> None:
        for name, (start, stop) in self.owned().items():
            gradient, piece = self._named[name].grad, self._tensors.by_name(name)
            piece.grad = None if gradient is None else gradient.reshape(-1)[start:stop].view(piece.shape)

    def _drop_gradients(self) -> None:
        # Or these views would keep the full gradients in memory after the caller's zero_grad().
        for tensor in self._tensors:
            tensor.grad = None


def _refuse_clipping(caller: FrameType) -> None:
    """Refuse torch's clipping and scaling of the pieces, which have gradients only while the inner optimizer steps."""
    if caller.f_code.co_name == "_unscale_grads_":  # torch's scaler would end in an assertion of its own
        raise RuntimeError(
            "scaler: it unscales what the optimizer steps, and these are this rank's pieces, which have gradients only "
            "inside step(); train with an engine and shardlab.GradScaler, or unscale the parameters' gradients yourself"
        )
    if is_clipping(caller):
        raise RuntimeError(
            "optimizer.param_groups: these are this rank's pieces, which have gradients only inside step(); clip the "
            "gradients of the parameters: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
        )


def _may_have_gradient(param: nn.Parameter) -> bool:
    return param.requires_grad or param.grad is not None


def _names(groups: list[dict[str, Any]]) -> dict[str, nn.Parameter]:
    """Parameters by name, in the order given; numbered where the caller gave no names or one that is taken."""
    named: dict[str, nn.Parameter] = {}
    for group in groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            known = f"{len(named)}.{name}" if name in named else name
            named[known or str(len(named))] = param
    return named
