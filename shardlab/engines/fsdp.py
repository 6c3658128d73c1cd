"""Fully sharded data parallel: parameters are gathered unit by unit, just before they are needed.

What differs from ``zero3``: hooks, and a program. A unit (by default a block) is gathered before its forward and
resharded after it, gathered again before its backward, and reduce-scattered and resharded when backward has passed it.
The next ``prefetch`` units are gathered during the compute of this one. So, where units are resharded after forward,
the full parameters in memory at any time are those of the root, of one unit and of the prefetched ones.

In which order all of that happens is a program, made by forward for backward (``fsdp_program.py``): hooks only move a
cursor in it.

Per rank for P fp32 parameters with Adam, S ranks in the shard group: at rest 4P/S parameters, 4P/S gradients, 8P/S
state (P with padding); another 4 x (root + (1 + prefetch) units) during a step, and in backward the whole gradients of
the root and of the units under way, with a buffer for each that is being reduced. (What stands inside reentrant
checkpointing leaves no tape: it stays gathered, and its gradients whole, until backward has ended; with
``use_reentrant=False`` it does not.) On the wire, elements a step:

=============  ====================  =================================================
sharding       mesh axes             what travels
=============  ====================  =================================================
full_shard     data                  3P(N-1)/N: gather, gather, reduce-scatter
shard_grad_op  data                  2P(N-1)/N: kept between forward and backward
no_shard       data                  2P(N-1)/N: one all-reduce per unit
hybrid_shard   replica, shard        3P(S-1)/S, and an all-reduce of P/S over replicas
=============  ====================  =================================================

Every rank must run the same units in the same order, since all of them join each gather. If ranks may skip a module,
make it part of a larger unit with ``wrap``. Source: Zhao et al., arXiv 2304.11277, sections 3 and 4.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm.trees import cast_floating, tensors_in
from shardlab.engines.fsdp_program import Act, Pass, Program
from shardlab.engines.fsdp_units import ShardingOptions, build_units
from shardlab.engines.offload import OffloadedShards, wait_for_copies
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.saved_tensors import stub_used
from shardlab.engines.sharded_strategy import ModuleHook, Sharded
from shardlab.engines.strategy import IN_PARTS, Given, LaidOut
from shardlab.engines.unit import State, Unit
from shardlab.meta_device import InitFn, reset_parameters
from shardlab.partition.chunks import parse_partition
from shardlab.units.policy import AUTO, ROOT, WrapPolicy
from shardlab.vocabulary import Offload, Partition, Role

_TRAINS = attrgetter("requires_grad")


class FSDP(Sharded):
    """Sharded parameters, gradients and optimizer state, unit by unit.

    Args:
        sharding: full_shard, shard_grad_op, no_shard or hybrid_shard.
        wrap: which modules are units, see ``wrapped_modules``.
        prefetch: units to gather ahead, in forward and in backward; 0 gathers each when it is needed.
        layout: 'flat' (end to end, padded at the end of the unit) or 'dim0' (each parameter by rows).
        partition: 'elements' cuts parameters as ``layout`` says; 'round_robin', 'contiguous' and 'balanced' give whole
            parameters to ranks, for optimizers that look at whole tensors.
        precision: 'full', 'bf16', 'fp16' or a ``Precision``.
        offload: what stays in host memory: 'none', 'parameters' or 'all' (gradients and optimizer state too).
        replicate_below: parameters with fewer elements are replicated instead of sharded; 0 shards all.
        init_fn: initializes parameters on the meta device: called as (name, module) for each module that holds some,
            unit by unit; None calls ``module.reset_parameters()``.
    """

    name = "fsdp"
    allocates = by_unit = True

    def __init__(
        self, *, sharding: str = "full_shard", wrap: WrapPolicy = AUTO, prefetch: int = 1, layout: str = "flat",
        partition: Partition | str = Partition.ELEMENTS, precision: Precision | str = "full", offload: str = "none",
        replicate_below: int = 0, init_fn: InitFn | None = None,
    ) -> None:  # fmt: skip
        self.options = ShardingOptions(
            sharding, wrap, prefetch, layout, parse_partition(partition), parse_precision(precision), offload,
            replicate_below, init_fn or reset_parameters,
        )  # fmt: skip
        self.partition, self.precision = self.options.partition, self.options.precision
        self.axes, self._prefetch = self.options.row.axes, prefetch
        self.state_role = Role.OFFLOADED if offload == Offload.ALL else Role.OPTIMIZER_STATE
        self._pass: Pass | None = None  # the forward under way
        self._waiting: list[Pass] = []  # forwards whose backward has not come
        self._is_stale = False  # gradients have been cleared since: from the next forward on, those are forgotten
        self._running: dict[Pass, Program] = {}  # of this backward
        self._is_in_backward = self._sends = self._holds_to_the_end = False
        self._missing: dict[Unit, set[int]] = {}  # whose gradients this backward has still to bring
        self._sent: set[Unit] = set()  # since the last means
        self._over: set[Unit] = set()  # of whole units: those whose gradients are there, in this backward
        self._called: set[Unit] = set()  # in any forward
        self._reducing: list[Unit] = []  # in the order of sending
        self._is_other_graph = False  # made inside full_params(), since the last backward

    def make_units(self, given: Given) -> list[Unit]:
        """By ``wrap``; each is allocated, if need be, and sharded before the next."""
        return build_units(given, self.options, self.at)

    def lay_out(self, given: Given) -> LaidOut:
        """Shard unit by unit, and put hooks on the units' modules."""
        laid_out = super().lay_out(given)
        self._offloaded = [one for unit in self.units for one in unit.shards if isinstance(one, OffloadedShards)]
        if self._offloaded:
            wait_for_copies(self.device)  # the host may read its shards from here on
        self._root = next((unit for unit in self.units if unit.name == ROOT), None)
        self._last_order = list(self.units)  # of the last forward; before it, a guess
        return replace(laid_out, hooks=[hook for unit in self.units for hook in self._watch(unit)])

    def _watch(self, unit: Unit) -> list[RemovableHandle]:
        module, dtype = unit.module, self.precision.compute
        assert module is not None

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            self._before(unit)
            # Of units too: a float32 buffer, for example, may have promoted them on their way.
            return None if dtype is None else cast_floating((args, kwargs), dtype)

        after = ModuleHook(lambda _, __, output: self._after(unit, output))
        return [
            # First: before hooks that compute with parameters, such as those of pruning.
            module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    # Forward: gather, reshard, and write the tape.

    def in_forward(self) -> AbstractContextManager[None]:
        """Inside, units are gathered and resharded by their own forwards, which write the tape."""
        # Called by the module's own forward, or computed again by checkpointing: that is a part of another pass.
        return self.saving_by_reference() if self._pass is not None or self._is_in_backward else self._one_pass()

    @contextlib.contextmanager
    def _one_pass(self) -> Iterator[None]:
        is_taped, has_ended = torch.is_grad_enabled(), False
        # What torch.autocast cast in an earlier forward of one block is a whole weight, and brings its gradient when
        # that forward's turn comes: behind the rest of this one, whose units are sent by then.
        torch.clear_autocast_cache()
        this = self._pass = Pass(is_taped=is_taped, reshards=self.options.row.reshards_after_forward or not is_taped)
        if is_taped and self._is_stale:
            self._waiting, self._is_stale = [], False
        try:
            with self.saving_by_reference():
                yield
            has_ended = True
            if is_taped:
                self._waiting.append(this)
                self._last_order = this.order
        finally:
            self._pass = None
            for unit in self.units:
                # What is prefetched, and was not called, nothing else would free.
                if this.reshards or not has_ended or unit.state is State.GATHERING:
                    unit.reshard()

    def saw_other_graph(self) -> None:
        """The next backward may also come through what plain code has computed: then all stays gathered to its end."""
        self._is_other_graph = True

    def _before(self, unit: Unit) -> None:
        if self._pass is None:
            if not self._is_in_backward and not unit.num_holders:
                raise RuntimeError(
                    f"model: unit {unit.name!r} was called outside engine(...), and its parameters are sharded; write "
                    "engine(x), or engine.call(function, x) for what is not the module's own forward; where activation "
                    "checkpointing calls it again, engine.backward(loss) instead of loss.backward()"
                )
            for one, program in self._running.items():
                # Reentrant checkpointing, of which the tape has nothing: on all ranks what is younger goes first, also
                # where no gradient has come to it.
                if places := one.untaped.get(unit):
                    self._run(program, program.until(places.pop()))
            unit.gather()  # checkpointing computes it again: it stays until the program has passed it
            return
        self._pass.open.append(unit)
        unit.gather()
        self._called.add(unit)
        self._pass.order.append(unit)
        if self._pass.is_taped:
            self._pass.tape.append(Act(unit, gathers=False))  # here backward will be over with it
        # Only after the wait: what is prefetched now travels while this unit computes, and not in front of it.
        place = len(self._pass.order)
        if self._last_order[:place] == self._pass.order:  # none once this forward goes another way than the last
            for following in self._last_order[place : place + self._prefetch]:
                following.start()

    def _after(self, unit: Unit, output: Any) -> Any:
        if self._pass is None:
            return output
        self._pass.open.remove(unit)
        # Before the reshard: an output that is a parameter is copied while its values are there.
        output = self.without_parameters(output)
        if self._pass.is_taped:
            self._tape_end(unit, self._pass, output)
        if self._pass.reshards and unit not in self._pass.open:
            unit.reshard()
        return output

    def _tape_end(self, unit: Unit, this: Pass, output: Any) -> None:
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not tensors:  # no gradient will come to it: its backward is no part of the program
            place = len(this.tape) - 1 - this.tape[::-1].index(Act(unit, gathers=False))
            del this.tape[place]
            this.untaped.setdefault(unit, []).append(place)
            return
        place = len(this.tape)
        this.tape.append(Act(unit, gathers=True))  # here backward will begin with it
        for tensor in tensors:
            tensor.register_hook(lambda _: self._output_reached(this, place))

    # Backward: the program.

    @contextlib.contextmanager
    def in_backward(self, *, sends: bool) -> Iterator[None]:
        """Begin the program, where one forward waits, and at the end do what is left of all.

        Its acts are done in between, by the hooks that call ``_run``: an output's (``_output_reached``), a parameter's
        (``grad_ready``), and a unit's forward where checkpointing computes it again (``_before``).
        """
        if self._pass is not None:
            raise RuntimeError("backward: it was called inside a forward, whose units it would reshard; call it later")
        self.note_writes()
        self._is_in_backward, self._sends = True, sends
        # Where several forwards wait, nobody knows yet which of them this backward takes, alone or together: then what
        # is gathered stays to the end, and gradients are sent there.
        # So it does where gradients also come through what was computed inside full_params().
        self._holds_to_the_end = len(self._waiting) != 1 or self._is_other_graph
        self._sent, self._over = set(), set()
        self._missing = {unit: _trainable(unit) for unit in self.units}
        try:
            if not self._holds_to_the_end:
                self._start(self._waiting[0])
            yield
        finally:
            for program in self._running.values():
                self._run(program, len(program.acts))  # after an error too: the others wait in it
            if self.sends_in_no_sync and not sends:
                self._reduce_all()
            self._waiting = [one for one in self._waiting if one not in self._running]
            self._running, self._is_in_backward, self._is_other_graph = {}, False, False
            for unit in self.units:
                unit.reshard()

    def _start(self, one: Pass) -> Program:
        program = self._running[one] = Program(one.tape)
        self._run(program, min(1, len(program.acts)))  # the root, or the last unit; checkpointing may leave no act
        return program

    def _output_reached(self, one: Pass, place: int) -> None:
        """Backward has come to an output of the use that ends at ``place`` of the tape."""
        if not self._note_backward():
            return  # torch.autograd.grad: what it needs is gathered when it asks, and stays until the next pass ends
        program = self._running.get(one) or self._start(one)
        self._run(program, program.until(place))

    def _run(self, program: Program, stop: int) -> None:
        """Do the first ``stop`` acts of the program, in its order, but for those that have been done.

        One that gathers also prefetches. One that is over, for the last time, reshards the unit and begins to reduce
        its gradients (``_reduce``), except inside ``no_sync()``. The root's are sent in ``make_means``, and those of
        all where several forwards wait; there units stay gathered until backward has ended.
        """
        while program.next < stop:
            unit, gathers = program.acts[program.next]
            is_last = program.last.get(unit) == program.next
            program.next += 1
            if gathers:
                if not self._missing[unit]:  # reentrant checkpointing brings the gradients of each use by itself
                    self._missing[unit] = _trainable(unit)
                unit.gather()
                ahead = [act.unit for act in program.acts[program.next :] if act.gathers] if self._prefetch else []
                for following in ahead[: self._prefetch]:
                    following.start()
            # Sent it may be by another forward's program, for both.
            elif is_last and not self._holds_to_the_end and unit not in self._sent:
                # The root is the last of all to be reduced.
                if not (self._sends or self.sends_in_no_sync) or unit is self._root:
                    unit.reshard()
                elif unit.is_undivided:
                    self._reduce_in_turn(unit)
                else:
                    self._reduce(unit)

    def grad_ready(self, param: nn.Parameter, *, sends: bool) -> None:
        """With the last gradient of a unit the program goes on, if the unit's end is its next act.

        The gradient is full, in the dtype to compute in, and stays at the parameter until then.
        """
        unit = self._unit_of[id(param)]
        if unit in self._sent:
            raise RuntimeError(IN_PARTS.format(f"a parameter of unit {unit.name!r}"))
        # NaN is what stubs give. A unit that was called may have NaN of its own: of a loss that is infinite, where a
        # pipeline computes the gradients of weights when backward has passed the unit.
        is_bypassed = unit.state is State.SHARDED and unit not in self._called
        if is_bypassed and param.grad is not None and bool(param.grad.isnan().any()):
            raise stub_used(next(name for name, known in self.params.items() if known is param))
        self._missing[unit].discard(id(param))
        for program in self._running.values():
            # All gradients are there, so nothing of the unit is needed; unless a part of it is frozen, whose backward
            # may come later.
            while program.next < len(program.acts) and self._is_over(program.acts[program.next]):
                self._run(program, program.next + 1)

    def _is_over(self, act: Act) -> bool:
        unit = act.unit
        return not act.gathers and not self._missing[unit] and all(map(_TRAINS, unit.params))

    def _reduce_in_turn(self, unit: Unit) -> None:
        """Reduce a unit that all ranks have whole, behind those before it: ranks may call such in any order."""
        self._over.add(unit)
        for one in self._order():
            if one not in self._over | self._sent and any(map(self.is_due, one.params)):
                return
            if one not in self._sent:
                self._reduce(one)

    def _order(self) -> list[Unit]:
        """Of reduction: as backward passes units, then those that are whole or were not called, the root last."""
        gathered = (unit for unit in reversed(self._last_order) if not unit.is_undivided)
        return sorted(dict.fromkeys([*gathered, *reversed(self.units)]), key=lambda unit: unit is self._root)

    def _reduce(self, unit: Unit) -> None:
        """Begin to reduce a unit, behind the sums of earlier ones: of these it makes means, or begins the next axis."""
        for earlier in self._reducing:
            earlier.advance()  # one buffer of a unit at a time, during the backward of the next: bounds the memory
        self._reducing = [earlier for earlier in self._reducing if earlier.state is State.REDUCING] + [unit]
        unit.reduce(self.is_due, first_axis_only=not self._sends)
        self._sent.add(unit)

    def _reduce_all(self) -> None:
        """Send what backward has not sent, such as what this rank did not use, and wait for all."""
        for unit in self._order():
            if unit not in self._sent:
                self._reduce(unit)
        super().make_means()
        self._sent, self._reducing = set(), []

    def make_means(self) -> None:
        """Send what backward has not sent, over all axes; means that are offloaded arrive in host memory."""
        self._sends = True  # also where every backward was inside no_sync()
        self._reduce_all()
        if self.state_role is Role.OFFLOADED:
            wait_for_copies(self.device)  # once, for the means of all units
            for one in self._offloaded:
                one.arrive()

    def drop(self) -> None:
        """The gradients are cleared; what forwards have taped is forgotten when the next one begins."""
        super().drop()
        # Not at once: a loop may clear gradients between a forward and its backward.
        self._sent, self._reducing, self._is_stale = set(), [], True

    @contextlib.contextmanager
    def stepping(self, *, loads: bool = False) -> Iterator[None]:
        """As ``Sharded``; forwards whose backward has not come are forgotten."""
        with super().stepping(loads=loads):
            self._waiting = []  # their graphs have saved values that this step replaces
            yield

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Inside, shards in host memory whose optimizer state is on the device are on it too."""
        if self.state_role is Role.OFFLOADED:
            wait_for_copies(self.device)  # the host is about to write what a gather may still be reading
        visiting = [one for one in self._offloaded if one.visits]
        for one in visiting:
            one.visit()
        try:
            yield
        finally:  # after an error too, or the next gather would send the host's old values
            for one in visiting:
                one.leave()
            if visiting:
                wait_for_copies(self.device)


def _trainable(unit: Unit) -> set[int]:
    return set(map(id, filter(_TRAINS, unit.params)))
