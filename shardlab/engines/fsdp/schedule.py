"""When units are gathered, resharded and reduced: what hooks on the wrapped modules and on the parameters do.

Forward gathers a unit before it computes and reshards it after; backward gathers it again, and reduces and reshards it
when its last gradient is there. Both prefetch the next ``prefetch`` units, in the order of the last forward.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm.trees import tensors_in
from shardlab.engines.fsdp.order import Order
from shardlab.engines.fsdp.sharding import ShardingOptions
from shardlab.engines.fsdp.unit import Unit
from shardlab.engines.held_parameters import reshard_all
from shardlab.engines.hooks import ModuleHook
from shardlab.engines.placeholder import without_parameters
from shardlab.engines.reduction_queue import ReductionQueue
from shardlab.units.policy import ROOT


class Schedule:
    """What happens to which unit, and when.

    Args:
        units: in the module's order; every rank makes the same.
        options: of the engine.
        is_due: whether any rank may have a gradient of a parameter.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        options: ShardingOptions,
        is_due: Callable[[nn.Parameter], bool],
    ) -> None:
        self._units, self._prefetch, self._is_due = units, options.prefetch, is_due
        self._reshard_after_forward = options.reshard_after_forward
        self._reshard_in_this_pass = True
        self._root_stays = False  # gathered, even when a forward of the whole model ends
        self._root = next((unit for unit in units if unit.name == ROOT), None)
        self._order = Order(units, self._root)
        self._queue = ReductionQueue(units, is_due, self._reduce, self._order.of_reduction)
        self._unit_of = {param: unit for unit in units for param in unit.params}
        self._inside = {unit: _units_inside(unit, units) for unit in units}
        self._in_pass = self._in_backward = False
        self._begun: set[Unit] = set()  # units whose backward has begun, and that have not been resharded since
        # Autograd's nodes of the inputs, while the unit computes: of each call, since a unit may call itself.
        self._came_with: dict[Unit, list[set[Any]]] = {}
        self._recomputed: set[Unit] = set()  # units whose whole forward ran again in this backward
        # Units that train on other ranks and get no gradient on this one, until backward has passed them.
        self._passed_by: set[Unit] = set()
        self._reducing: list[Unit] = []  # whose gradients are under way, in the order of sending
        self._reduces = False  # this backward, and not one inside ``no_sync()``

    def watch(self) -> list[RemovableHandle]:
        """Put the hooks on the units' modules."""
        return [hook for unit in self._units for hook in self._watch(unit)]

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the whole model is under way, and not in a backward that it runs itself."""
        return self._in_pass and not self._in_backward

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""
        # Checkpointing computes it again, in the order of backward.
        if self._in_backward:
            return
        self._in_pass = True
        self._begun.clear()  # by torch.autograd.grad, whose end nobody sees
        is_taped = torch.is_grad_enabled()
        self._reshard_in_this_pass = self._reshard_after_forward or not is_taped
        self._order.begin_pass(is_taped=is_taped)

    def end_pass(self) -> None:
        """It has ended: drop prefetches that were not used."""
        left = [unit for unit, calls in self._came_with.items() if calls]  # by an exception that the model caught
        self._came_with.clear()
        if self._in_backward:
            return
        self._in_pass = False
        if self._reshard_in_this_pass:
            reshard_all(unit for unit in left if not (self._root_stays and unit is self._root))
        self._order.end_pass()
        # The guess was wrong, after an early exit for example: nothing else would free these buffers.
        for unit in self._units:
            unit.drop_gather()

    def abandon_pass(self) -> None:
        """It was left by an exception: reshard what it had gathered, and keep nothing of its graph."""
        self._in_pass = False
        self._came_with.clear()
        self.reshard_rest()

    def begin_backward(self) -> None:
        """A backward begins: expect every gradient again."""
        if self._root is not None:
            # Before the units, also where the last one's output is the model's own and its hook runs first. (A plain
            # ``loss.backward()`` shows only by such hooks: there that unit is first, on all ranks alike.) And before
            # anything is noted: if this gather raises, no backward has begun.
            self._root.start_unshard()
        self._in_backward = True
        self._begun.clear()
        self._recomputed.clear()
        self._passed_by.clear()
        self._queue.begin()

    def expect_none_of(self, params: Iterable[nn.Parameter], *, reduce: bool) -> None:
        """This rank's backward gives these no gradient.

        Else a rank that left out a parameter would reduce its unit when backward has ended, and a rank that used it
        before the next gather: both travel on one axis, so their order must be the same on all ranks. Where it left out
        all that trains in a unit, it gathers and reduces this unit when backward passes it, as the others do.

        Args:
            params: trainable ones.
            reduce: False inside ``no_sync()``.
        """
        self._reduces, missing = reduce, set(params)
        passed = {unit for unit in self._order.passed_before(None) if missing.issuperset(unit.trainable)}
        for param in missing:
            if self._unit_of[param] not in passed:
                self._queue.note(self._unit_of[param], param, in_part=False)
        self._passed_by = {unit for unit in passed if unit.trainable}

    def pass_by_rest(self) -> None:
        """Backward has come to its end: do for the units that it did not come to what the other ranks have done."""
        self._pass_by(self._order.passed_before(None))

    def _pass_by(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit in self._passed_by:
                self._before_backward(unit)
                self._reshard(unit)

    def end_backward(self) -> None:
        """It has ended, or raised: reshard what is still gathered."""
        # First: ``reshard_rest()`` may raise, and then the next forward would count as a recomputation.
        self._in_backward = False
        self._passed_by.clear()  # after an error too, or torch.autograd.grad would reduce them
        self.reshard_rest()

    def forget(self) -> None:
        """The gradients are cleared: forget the passes that no backward has followed."""
        self._order.forget()
        self._queue.reset()

    def comes_too_late(self, param: nn.Parameter) -> bool:
        """Whether a gradient of ``param`` would be added to one that is being reduced."""
        return self._queue.is_sent(self._unit_of[param])

    def gradient_came(self, param: nn.Parameter, *, in_part: bool, reduce: bool) -> None:
        """Reshard the parameter's unit if this was its last gradient; with ``reduce``, reduce what is complete.

        Args:
            param: whose gradient it is.
            in_part: more may be added to it before backward ends, see ``ReductionQueue``.
            reduce: False inside ``no_sync()``.
        """
        unit = self._unit_of[param]
        was_complete = self._queue.is_complete(unit)
        self._queue.note(unit, param, in_part=in_part)
        # A part that is frozen may still be needed: its backward, which has no gradient of its own, may come later.
        if not was_complete and self._is_over(unit) and not unit.is_partly_frozen:
            # Before the reduction, so that its buffer does not come on top of the full parameters.
            self._reshard(unit)
        if reduce:
            self._queue.send_complete()

    def finish(self) -> None:
        """Reduce what is left, and return when all gradients are means."""
        # Units that this rank's backward did not reach too: other ranks have gradients of them, and send them.
        self._queue.send_rest()
        # In one order on all ranks: with replicas, finishing a unit sends its sums over the next axis.
        for unit in self._units:
            unit.finish_reduce()
        self.reshard_rest()

    def reshard_rest(self) -> None:
        """Reshard what is still gathered: not used, prefetched for nothing, or left by an error."""
        reshard_all(unit for unit in self._units if not self._is_computing(unit))

    def _reshard(self, unit: Unit) -> None:
        if not self._is_computing(unit):
            unit.reshard()

    def _is_computing(self, unit: Unit) -> bool:
        """Whether its forward goes on when a backward that has run inside it has ended."""
        return self._in_pass and bool(self._came_with.get(unit))

    @contextlib.contextmanager
    def holding_root(self) -> Iterator[None]:
        """Inside, no forward reshards the root; at the end it is resharded as after a forward."""
        before, self._root_stays = self._root_stays, True
        try:
            yield
        finally:
            self._root_stays = before  # the module's own forward may call this, or what this runs
            if self._root is not None and self._reshard_in_this_pass and not (before or self._in_backward):
                self._reshard(self._root)

    def _watch(self, unit: Unit) -> list[RemovableHandle]:
        return [
            unit.module.register_forward_pre_hook(
                ModuleHook(lambda _, args, kwargs: self._before_forward(unit, (args, kwargs))),
                prepend=True,  # before hooks that compute with parameters, such as those of pruning
                with_kwargs=True,
            ),
            unit.module.register_forward_hook(ModuleHook(lambda _, __, output: self._after_forward(unit, output))),
        ]

    def _before_forward(self, unit: Unit, inputs: Any) -> None:
        if self._in_backward:
            self._recomputed.add(unit)  # prefetches follow the order of backward, not of this forward
            unit.unshard()
            return
        self._came_with.setdefault(unit, []).append({tensor.grad_fn for tensor in tensors_in(inputs)})
        self._gather_for_forward(unit)
        unit.unshard()
        # Only after the wait: what is prefetched now travels while this unit computes, and not in front of it.
        for following in self._order.forward_of(unit, self._prefetch):
            self._gather_for_forward(following)

    def _gather_for_forward(self, unit: Unit) -> None:
        if unit.start_unshard():
            self._order.gathered_for_forward(unit)

    def _after_forward(self, unit: Unit, output: Any) -> Any:
        if self._in_backward:
            return output
        # Before the reshard: an output that is a parameter is copied while its values are there.
        output = without_parameters(output, self._unit_of)
        calls = self._came_with.get(unit, [])
        came_with = calls.pop() if calls else set()
        if self._reshard_in_this_pass and not calls and not (self._root_stays and unit is self._root):
            unit.reshard()
        for tensor in tensors_in(output):
            # What the unit has passed through gets its gradient when an earlier unit runs backward, not this one.
            if tensor.grad_fn is not None and tensor.grad_fn not in came_with:
                tensor.register_hook(lambda _: self._before_backward(unit))
        return output

    def _is_over(self, unit: Unit) -> bool:
        """Whether all gradients of a unit are there, so that this backward needs its trainable parameters no more."""
        # In parts: unless the whole unit was recomputed, more pieces of it may be, and no hook would gather it again.
        comes_in_parts = self._queue.comes_in_parts(unit)
        return self._queue.is_complete(unit) and (not comes_in_parts or unit in self._recomputed)

    def _before_backward(self, unit: Unit) -> None:
        if self._passed_by:
            self._pass_by(self._order.passed_before(unit))
        # The gradient of this unit's output has passed through the units before it in backward: what is frozen in them
        # is needed no more, and nothing is where nothing accumulates (all is frozen, or this is torch.autograd.grad). A
        # unit around this one has more to do; one inside it may just be about to begin, where its output is that of
        # both.
        others = {begun for begun in self._begun - self._inside[unit] - {unit} if unit not in self._inside[begun]}
        over = {begun for begun in others if not self._in_backward or self._is_over(begun)}
        for begun in over:
            self._reshard(begun)
        self._begun = self._begun - over | {unit}
        unit.unshard()
        for following in self._order.backward_of(unit, self._prefetch):
            following.start_unshard()
        if unit in self._passed_by:
            self._passed_by.remove(unit)
            for param in unit.trainable:
                self._queue.note(unit, param, in_part=False)
            if self._reduces:
                self._queue.send_complete()

    def _reduce(self, unit: Unit) -> None:
        for earlier in self._reducing:
            # One buffer of a unit at a time, during the backward of the next: bounds the memory.
            earlier.advance_reduce()
        self._reducing = [earlier for earlier in self._reducing if earlier.is_reducing] + [unit]
        unit.start_reduce(self._is_due)


def _units_inside(unit: Unit, units: Sequence[Unit]) -> set[Unit]:
    modules = set(unit.module.modules()) - {unit.module}
    return {other for other in units if other.module in modules}
