"""What changes for the user where parameters are whole but stepped in pieces, as in ZeRO-1 and ZeRO-2.

The mean of a gradient is in pieces, so ``param.grad`` is a placeholder that refuses to be used. With ``precision`` the
module's parameters are rounded copies, and the master weights are the model: state dicts, checkpoints and
``full_params()`` have those, in the dtype that the model came with, as with ``zero3`` and ``fsdp``. Writing into a
rounded parameter is refused.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from typing_extensions import override

from shardlab.engines.buckets import Bucket
from shardlab.engines.flat_parameters import FlatParameters
from shardlab.engines.holdings import Holding
from shardlab.engines.master_weights import MasterWeights
from shardlab.engines.placeholder import PlaceholderGradient, PlaceholderGradients
from shardlab.engines.precision import MixedPrecision
from shardlab.engines.state import Stateful
from shardlab.engines.step_tensors import StepTensors, tensors_of
from shardlab.vocabulary import Role


class SteppedInPieces(MixedPrecision):
    """An engine that has ``buckets`` of whole parameters and steps the pieces in ``flat_params``.

    Stands before ``Bucketed`` among the bases of ``ZeRO1``. Python then asks this class, ``MixedPrecision``,
    ``Bucketed`` and ``Engine`` in this order, so ``super()`` here reaches what makes the buckets.
    """

    flat_params: FlatParameters
    buckets: list[Bucket]
    _steps_pieces = True
    _place: dict[nn.Parameter, tuple[Bucket, int]]
    _scale: float

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the base.

        Raises:
            RuntimeError: another optimizer has stepped the pieces, and no ``step()`` has gathered them.
        """
        self._refuse_ungathered()
        return super().__call__(*args, **kwargs)

    @override
    def _take_assigned(self) -> None:
        self.flat_params.take_assigned()

    @override
    def before_others_step(self, optimizer: torch.optim.Optimizer, *, inside: bool) -> None:
        """As the base; remembers an optimizer over the pieces, which ``step()`` has to gather."""
        super().before_others_step(optimizer, inside=inside)
        known = tensors_of(optimizer)
        stepped = [tensor for tensor in self._step_tensors if id(tensor) in known]
        if stepped and not inside:
            self._ungathered_by = type(optimizer).__name__
        # On all ranks, also one whose pieces have no gradient; and fused kernels write unseen by autograd.
        increment_version(stepped)

    @property
    def _is_ungathered(self) -> bool:
        """Whether pieces have changed since the last gather, by another optimizer or by hand."""
        return bool(self._ungathered_by) or self.flat_params.are_written

    @contextlib.contextmanager
    def _loading_all(self) -> Iterator[None]:
        """Inside, every parameter gets another value, so that what others have stepped or written counts no more."""
        self._take_assigned()  # or what is loaded would not reach the pieces
        before, self._ungathered_by = self._ungathered_by, ""
        try:
            with self.flat_params.loading_all():
                yield
        except BaseException:
            self._ungathered_by = before
            raise

    def _refuse_ungathered(self) -> None:
        # All ranks call the user's optimizer alike, so all of them refuse.
        if self._ungathered_by:
            raise RuntimeError(
                f"{self._ungathered_by}.step(): it has stepped this rank's pieces, which nobody has gathered since; "
                "call it before engine.step(), which gathers what both have stepped, or engine.step() once more"
            )
        self.flat_params.check_gathered()

    @contextlib.contextmanager
    @override
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """As the base; inside, the master weights replace rounded parameters, which is collective.

        Args:
            keep_changes: copy changes in place back into the master weights; without it they are lost where
                parameters are rounded. Every rank must write the same values; nothing checks that.
        """
        self._refuse_ungathered()
        masters = self._masters
        with contextlib.nullcontext() if masters is None else masters.whole(keep_changes=keep_changes):
            self._note_stored_params()
            yield self.module
            # Rounded parameters are left out: ``whole()`` does it while the master weights are in their place.
            if keep_changes and masters is None and not self._is_closed:
                self.flat_params.take_replaced()

    @override
    def full_state_dict(self) -> dict[str, Any]:
        """As the base; the master weights, if there are any."""
        with self.full_params():
            return super().full_state_dict()

    @override
    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the base; each rank keeps its part of the master weights. Collective if there are any."""
        with self._loading_all(), self.full_params(keep_changes=True):
            super().load_full_state_dict(state)

    @override
    def save(self, directory: str | Path, *, extra: Any = None, **objects: Stateful) -> None:
        """As the base; the master weights, if there are any."""
        self._refuse_ungathered()
        self._take_or_refuse_writes()
        super().save(directory, extra=extra, **objects)

    @override
    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """As the base; master weights, of which each rank has read its own, are then rounded and gathered.

        Raises:
            ValueError: also inside ``full_params()`` if parameters are rounded outside it, on all ranks.
        """
        if self._masters is not None and self._masters.is_held:
            raise ValueError("load: leave 'with engine.full_params():' first; what it holds would be stale")
        with self._loading_all():
            extra = super().load(directory, **objects)
        if self._masters is not None:
            # Each rank has read only its own chunks. All buckets, since frozen parameters were loaded too.
            self._masters.gather(lambda _: True)
        return extra

    @override
    def _prepare(self) -> StepTensors:
        super()._prepare()
        for bucket in self.buckets:
            bucket.gradient_dtype = self.precision.reduce_dtype_of(bucket.params[0])
            bucket.is_cut = True
        if self.precision.reduce_dtype is not None:
            self._scale = 1.0  # sums are divided when they have the master weights' dtype
        self._cast_buffers()
        self.flat_params = self._new_flat_params()
        self._placeholders = PlaceholderGradients(self.params)
        self._ungathered_by = ""  # the class of another optimizer that has stepped pieces since the last gather
        return self.flat_params.tensors

    @override
    def _begin_backward(self) -> None:
        self._check_or_drop()
        self._refuse_ungathered()
        super()._begin_backward()
        # Before autograd accumulates, since a placeholder has no memory to add to, but after the checks, which look for
        # placeholders that other code has taken away.
        self._placeholders.take_away()

    @override
    def _on_gradient(self, param: nn.Parameter) -> None:
        super()._on_gradient(param)
        if not self._sync and param.grad is None:
            # It adds up in its bucket, in more bits: torch's clipping would take None for "has no gradient".
            bucket, slot = self._place[param]
            self._placeholders.place([bucket.names[slot]])

    @override
    def _refuse_changes(self, *, others_wait: bool) -> None:
        # Means are checked by step and backward alone: zero_grad() must work even after somebody has cleared some.
        if not self._are_means:
            self._check_or_drop()
        super()._refuse_changes(others_wait=others_wait)

    def _check_or_drop(self) -> None:
        """Where the user has cleared or set a placeholder: raise for means, drop a sum of ``no_sync()``."""
        if not self._step_tensors.are_behind:
            self._placeholders.check()
            return
        places = {bucket.names[slot]: (bucket, slot) for bucket, slot in self._place.values()}
        for name in self._placeholders.gone:
            bucket, slot = places[name]
            bucket.drop(slot)

    @override
    def _reduce_gradients(self) -> None:
        self._placeholders.take_away()
        super()._reduce_gradients()
        # Last: until everything is sent, whatever is at ``.grad`` counts as a gradient.
        self._placeholders.place(self.params)

    @override
    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        for tensor in self.step_tensors():
            tensor.grad = None
        # The base has cleared them: forgotten here, or the next check would take that for somebody else's doing.
        self._placeholders.take_away()

    @override
    def _parameter_holdings(self) -> Iterator[Holding]:
        return self.flat_params.holdings()

    @override
    def _gradient_holdings(self) -> Iterator[Holding]:
        for bucket in self.buckets:
            yield from self._gradients_of(bucket)
            if bucket.buffer is not None:
                yield Holding(Role.GRADIENT, bucket.buffer)
        others = (tensor.grad for tensor in (*self.params.values(), *self.step_tensors()))
        yield from (
            Holding(Role.GRADIENT, gradient)
            for gradient in others if gradient is not None and not isinstance(gradient, PlaceholderGradient)
        )  # fmt: skip

    def _gradients_of(self, bucket: Bucket) -> Iterator[Holding]:
        """What this rank holds of the gradients of a bucket, by parameter."""
        if bucket.buffer is not None:
            for name, view in zip(bucket.names, bucket.views, strict=True):
                yield Holding(Role.GRADIENT, view, name, (0, view.numel()))

    @property
    @override
    def _keeps_pieces(self) -> bool:
        return self._masters is not None or self._is_ungathered

    def _new_flat_params(self) -> FlatParameters:
        """The parameters in flat buffers, with master weights if parameters do not have the dtype to compute in."""
        if any(self.precision.compute_dtype_of(param) != param.dtype for param in self.params.values()):
            flat_params: FlatParameters = MasterWeights(self.params, self.buckets, self.comm, self.precision)
        else:
            flat_params = FlatParameters(self.params, self.buckets, self.comm)
        flat_params.tensors.are_parts |= bool(self.slices)
        return flat_params

    @override
    def take_changes(self) -> None:
        """As the base: the step reads the master weights, and the gather after it overwrites the parameters."""
        self._check_or_drop()
        self._take_or_refuse_writes()
        self.flat_params.begin_step()

    @override
    def before_optimizer_step(self) -> None:
        """As the base; counts pieces as written where that would not be seen."""
        super().before_optimizer_step()
        # Fused kernels write unseen by autograd: after an error in the step nobody would know that pieces were written.
        if any(group.get("fused") for group in self.optimizer.param_groups):
            # Where the user has set a gradient at a frozen piece, too: on all ranks alike, as with any other kernels.
            increment_version([
                piece for name, piece in self._step_tensors.items()
                if piece.grad is not None or self._is_due(self.params[name])
            ])  # fmt: skip

    def _take_or_refuse_writes(self) -> None:
        """Before they are stepped or saved: take over what the user has written, or refuse it."""
        self.flat_params.take_replaced()
        if self._masters is not None:
            self._masters.check_unwritten()
            self._masters.keep_changes()

    @override
    def _give_back(self) -> None:
        """Put the master weights into the module; collective if there are any, or if another optimizer has stepped.

        Raises:
            RuntimeError: this rank's pieces were written to. Nobody gathers them: other ranks may have written none.
        """
        if self._ungathered_by:
            self._take_assigned()
            self.flat_params.gather(lambda _: True)
            self._ungathered_by = ""
        self._refuse_ungathered()
        # Or plain training would meet their hooks and a placeholder at ``.grad``.
        self._placeholders.close()
        if self._masters is not None:
            self._masters.give_back()

    @property
    @override
    def _has_stored_params(self) -> bool:
        return self._masters is not None and self._masters.is_held

    @property
    def _masters(self) -> MasterWeights | None:
        return self.flat_params if isinstance(self.flat_params, MasterWeights) else None
