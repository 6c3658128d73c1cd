"""What strategies with sharded parameters share: the step on shards, full parameters on demand, state dicts."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardlab.engines.checks import check_not_scripted
from shardlab.engines.held_parameters import let_go_all, reshard_all
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.hooks import ModuleHook, unrefused, untraced
from shardlab.engines.placeholder import PlaceholderGradients, refuse_loading
from shardlab.engines.precision import MixedPrecision
from shardlab.engines.saved_tensors import saved_by_reference
from shardlab.engines.sharded_bucket import ShardedBucket
from shardlab.engines.state import Stateful
from shardlab.engines.step_tensors import StepTensors, tensors_of


class ShardedEngine(MixedPrecision):
    """An engine whose parameters are in sharded buckets; ``partition`` says how they are cut."""

    _steps_pieces = True
    buckets: Sequence[ShardedBucket]
    _num_keeping: int  # open full_params(keep_changes=True)
    _placeholders: PlaceholderGradients | None = None
    """At ``param.grad`` while the means are the ``.grad`` of the pieces; None until there are any."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the base."""
        output = super().__call__(*args, **kwargs)
        self._put_placeholders()  # some units stay gathered until a backward, which may not come
        return output

    @untraced
    @unrefused
    def _put_placeholders(self) -> None:
        """Put placeholders at ``param.grad``, where torch's clipping would find None.

        Also of what is not gathered: the user may have a list of the parameters from before the engine.
        """
        # Inside a backward they would be taken for gradients. What somebody has cleared is told by the next check.
        is_gone = self._placeholders is not None and bool(self._placeholders.gone)
        if self._is_closed or self._backward_watch.has_begun or is_gone:
            return
        names = [
            name for bucket in self.buckets if bucket.gradient_shard is not None
            for name, param in bucket.params.items() if param.grad is None and param.requires_grad
        ]  # fmt: skip
        if names:
            self._placeholders = self._placeholders or PlaceholderGradients(self.params)
            self._placeholders.place(names)

    @unrefused
    def _take_placeholders_away(self, *, checked: bool = True) -> None:
        if self._placeholders is not None:
            if checked:
                self._placeholders.check()
            self._placeholders.take_away()

    @override
    def _begin_backward(self) -> None:
        for bucket in self.buckets:
            bucket.take_assigned()
            bucket.follow_pieces()
        self._take_placeholders_away()
        super()._begin_backward()

    @override
    def finish_gradients(self) -> None:
        """As the base."""
        if not self._are_means:
            self._take_placeholders_away()
        super().finish_gradients()
        self._put_placeholders()

    @override
    def _forget_gradients(self) -> None:
        self._take_placeholders_away(checked=False)
        super()._forget_gradients()
        for bucket in self.buckets:
            # First: of FSDP's a reduction may be under way, whose means would arrive after they were cleared.
            bucket.finish_reduce()
            bucket.drop_gradients()

    @override
    def _complete_failed_backward(self) -> None:
        self._take_placeholders_away(checked=False)  # one at a parameter that was frozen since would be sent
        super()._complete_failed_backward()

    @override
    def take_changes(self) -> None:
        """As the base: what the user wrote must be in the shards, and nothing gathered may outlive its values."""
        if self._placeholders is not None:
            self._placeholders.check()
        if self._num_keeping:
            self._keep_changes()
        reshard_all(self.buckets)

    @override
    def before_optimizer_step(self) -> None:
        """As the base; from here on what has gradients counts as written, also if the step raises."""
        super().before_optimizer_step()
        for bucket in self.buckets:
            # A reduction leaves a chunk on every rank, so all ranks count it or none does.
            if bucket.gradient_shard is not None:
                bucket.count_as_written()

    @override
    def after_optimizer_step(self) -> None:
        """Gather again what the user holds, and refuse backwards that need the values from before the step."""
        self._take_assigned()
        for bucket in self.buckets:
            if self._num_keeping and bucket.is_written:  # by a hook
                bucket.check_changes()
                bucket.keep_changes()
            bucket.refresh()  # on every rank, since all hold the same

    @override
    def _take_assigned(self) -> None:
        for bucket in self.buckets:
            bucket.take_assigned()

    @override
    def before_others_step(self, optimizer: torch.optim.Optimizer, *, inside: bool) -> None:
        """As the base; refuses backwards that need the values from before the step.

        Raises:
            RuntimeError: also if the user holds full parameters, which would be stale.
        """
        super().before_others_step(optimizer, inside=inside)
        stepped = tensors_of(optimizer)
        for bucket in self.buckets:
            if not any(id(piece) in stepped for piece in bucket.pieces.values()):
                continue
            if bucket.is_held and not inside:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): what engine.full_params() or engine.unshard(unit) holds would "
                    "be stale; call it outside, or step by engine.step()"
                )
            bucket.reshard()
            bucket.count_as_written()

    @override
    def divisions(self) -> list[Division]:
        """Bucket by bucket."""
        return [bucket.division for bucket in self.buckets]

    @contextlib.contextmanager
    @override
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """Inside, the module has its full parameters on every rank, in the dtype they are stored in; collective.

        Of a tensor-parallel model these are this rank's slices; ``full_state_dict()`` has the whole ones.

        Args:
            keep_changes: copy changes in place back into the shards when the block ends without an error; otherwise
                they are lost. Where a rank keeps whole parameters on its device (no_shard, one rank,
                ``replicate_below``), the block sees copies, or with ``keep_changes`` the parameters themselves, so that
                an error takes nothing back. Every rank must write the same values; nothing checks that.
        """
        # A graph made inside, as of a penalty on weights, must not save what is resharded behind it.
        saving = saved_by_reference(self.buckets) if torch.is_grad_enabled() else contextlib.nullcontext()
        with self._full(keep_changes=keep_changes, as_copies=not keep_changes) as module, saving:
            yield module

    @contextlib.contextmanager
    def _full(self, *, keep_changes: bool, as_copies: bool) -> Iterator[nn.Module]:
        reshard_all(self.buckets)  # first: it refuses what was written, which would be lost unseen
        held: list[ShardedBucket] = []
        self._num_keeping += keep_changes
        try:
            for bucket in self.buckets:
                bucket.hold(as_copy=as_copies)  # a gather may fail, and then those before it must not stay held
                held.append(bucket)
            self._note_stored_params()
            self._put_placeholders()
            yield self.module
            # Not after an error: half of a change must not reach the shards. Nor after close(), when none train.
            if keep_changes and not self._is_closed:
                self._keep_changes()
        finally:
            self._num_keeping -= keep_changes
            let_go_all(held)
            self._put_placeholders()

    def _keep_changes(self) -> None:
        for bucket in self.buckets:
            bucket.check_changes()
        for bucket in self.buckets:
            bucket.keep_changes()

    @override
    def full_state_dict(self) -> dict[str, Any]:
        """As the base; always collective."""
        with self._full(keep_changes=False, as_copies=False):
            return super().full_state_dict()

    @override
    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a full state dict; each rank keeps its shards of it. Collective."""
        with self.full_params(keep_changes=True):
            super().load_full_state_dict(state)

    @override
    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """As the base. What is gathered is resharded first, since it would be stale.

        Raises:
            ValueError: also if the user holds full parameters, on all ranks.
        """
        if any(bucket.is_held for bucket in self.buckets):
            raise ValueError(
                "load: leave 'with engine.full_params():' first, and call engine.reshard(unit) for units gathered by "
                "hand; what they hold would be stale"
            )
        reshard_all(self.buckets)
        extra = super().load(directory, **objects)
        for bucket in self.buckets:
            bucket.count_as_written()
        return extra

    @override
    def _prepare(self) -> StepTensors:
        check_not_scripted(self.module)
        self._num_keeping = 0
        self.buckets = self._make_buckets()
        self._cast_buffers()
        pieces = {name: piece for bucket in self.buckets for name, piece in bucket.pieces.items()}
        are_parts = self.sharded_over is not None or bool(self.slices)
        # In the module's order, not by bucket: every strategy must number an optimizer's parameters alike.
        return StepTensors({name: pieces[name] for name in self.params}, are_parts=are_parts)

    @override
    def _parameter_holdings(self) -> Iterator[Holding]:
        return chain.from_iterable(bucket.parameter_holdings() for bucket in self.buckets)

    @override
    def _gradient_holdings(self) -> Iterator[Holding]:
        return chain.from_iterable(bucket.gradient_holdings() for bucket in self.buckets)

    @override
    def close(self) -> None:
        """As the base."""
        super().close()
        for hook in self._load_hooks:
            hook.remove()
        if self._placeholders is not None:
            self._placeholders.close()

    @contextlib.contextmanager
    @override
    def _own_params(self) -> Iterator[None]:
        sites = [site for bucket in self.buckets for site in bucket.sites.values()]
        for site in sites:
            site.put_parameter()
        try:
            yield
        finally:
            for site in sites:
                site.put_placeholder()

    @override
    def _watch_params(self) -> None:
        super()._watch_params()
        # Torch would say for each parameter alone that it is sharded, and load the buffers.
        owners = {owner: None for bucket in self.buckets for site in bucket.sites.values() for owner in site.owners}
        self._load_hooks = [owner.register_load_state_dict_pre_hook(ModuleHook(refuse_loading)) for owner in owners]

    @property
    @override
    def _keeps_pieces(self) -> bool:
        return True

    @override
    def _give_back(self) -> None:
        """Put the full parameters back into the module; collective."""
        self._take_placeholders_away(checked=False)
        for bucket in self.buckets:
            bucket.drop_gradients()
            bucket.give_back()

    @property
    @override
    def _has_stored_params(self) -> bool:
        return any(bucket.is_held_as_stored for bucket in self.buckets)

    @abstractmethod
    def _make_buckets(self) -> Sequence[ShardedBucket]:
        """Shard the parameters."""
