"""Fully sharded data parallel: parameters are gathered unit by unit, just before they are needed.

What differs from ``zero3``: hooks. A unit (by default a block) is gathered before its forward and resharded after
it, gathered again before its backward, and reduce-scattered and resharded when its last gradient is there. The next
``prefetch`` units are gathered during the compute of this one. So, where units are resharded after forward, the full
parameters in memory at any time are those of the root, of one unit and of the prefetched ones, not of the model.

Per rank for P fp32 parameters with Adam, S ranks in the shard group: at rest 4P/S parameters, 4P/S gradients, 8P/S
state (P with padding); another 4 x (root + (1 + prefetch) units) during a step, and in backward the whole gradients of
the root and of the units under way, with a buffer for each that is being reduced. On the wire, elements a step:

=============  ====================  =================================================
sharding       mesh axes             what travels
=============  ====================  =================================================
full_shard     data                  3P(N-1)/N: gather, gather, reduce-scatter
shard_grad_op  data                  2P(N-1)/N: kept between forward and backward
no_shard       data                  2P(N-1)/N: one all-reduce per unit
hybrid_shard   replica, shard        3P(S-1)/S, and an all-reduce of P/S over replicas
=============  ====================  =================================================

Every rank must run the same units in the same order, since all of them join each gather. If ranks may skip a module,
make it part of a larger unit with ``wrap``: within a unit, ranks may use different parameters, and those of a unit that
runs, none. There are three exceptions, in which it is not known before the end what backward leaves out, so that the
ranks' collectives may differ in order: (1) reentrant checkpointing, and autograd functions written in Python, which may
run a backward of their own; one that runs none says so with the class attribute ``runs_no_backward = True``. (2) A
plain ``loss.backward()`` through several outputs of the model, of which nothing but the loss holds some;
``engine.backward(loss)`` sees all of them. (3) A unit that runs twice, of which a rank uses nothing in one of the runs.
Source: Zhao et al., arXiv 2304.11277, sections 3 and 4.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.communicator import Communicator
from shardlab.engines.checks import second_gradient
from shardlab.engines.fsdp.offloaded_engine import OffloadedEngine
from shardlab.engines.fsdp.schedule import Schedule
from shardlab.engines.fsdp.sharding import ShardingOptions, build_units
from shardlab.engines.fsdp.unit import Unit, UnitBucket
from shardlab.engines.held_parameters import end_holds_by_hand
from shardlab.engines.optimizer_fit import parse_partition
from shardlab.engines.placeholder import StubbedParameter, sharded_parameter
from shardlab.engines.precision import Precision, parse_precision
from shardlab.engines.saved_tensors import saved_by_reference
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.meta_device import InitFn, reset_parameters
from shardlab.units.policy import AUTO, WrapPolicy
from shardlab.vocabulary import Partition


class FSDP(OffloadedEngine):
    """Sharded parameters, gradients and optimizer state, unit by unit.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: with the axes that ``sharding`` names.
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
    _allocates_params = True  # unit by unit; buffers must be there

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: OptimizerFn,
        mesh: BaseMesh | None = None,
        *,
        sharding: str = "full_shard",
        wrap: WrapPolicy = AUTO,
        prefetch: int = 1,
        layout: str = "flat",
        partition: Partition | str = Partition.ELEMENTS,
        precision: Precision | str = "full",
        offload: str = "none",
        replicate_below: int = 0,
        init_fn: InitFn | None = None,
    ) -> None:
        self.options = ShardingOptions(
            mesh=BaseMesh.alone() if mesh is None else mesh,
            sharding=sharding,
            wrap=wrap,
            prefetch=prefetch,
            layout=layout,
            partition=parse_partition(partition),
            precision=parse_precision(precision),
            offload=offload,
            replicate_below=replicate_below,
            init_fn=init_fn or reset_parameters,
        )
        self.partition, self.precision, self.offload = self.options.partition, self.options.precision, offload
        self._pieces_are_rows = layout == "dim0"
        # After the options, from which the base's construction makes the axes and the units.
        super().__init__(model, optimizer_fn, self.options.mesh)
        # Last, as in the base: a model that is refused must keep no hook.
        self._hooks += self._schedule.watch()
        self._hooks += self._cast_inputs_of(unit.module for unit in self.units if unit.module is not self.module)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; units are gathered as it reaches them."""
        self._before_forward()
        if self._schedule.is_in_forward:  # by the module's own forward, whose pass goes on behind this call
            return super().__call__(*args, **kwargs)
        self._schedule.begin_pass()
        try:
            with saved_by_reference(self.buckets):
                output = super().__call__(*args, **kwargs)
        except BaseException:
            # The hooks that would reshard the unit that failed, and what was prefetched, will not run.
            self._schedule.abandon_pass()
            raise
        self._schedule.end_pass()
        return output

    @override
    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As in ``Engine``; the root's parameters stay until ``function`` has ended, even if it calls the module."""
        with self._schedule.holding_root():
            return super().call(function, *args, **kwargs)

    @override
    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        self._schedule.forget()

    def unshard(self, unit: str) -> None:
        """Gather a unit by hand and keep it until ``reshard(unit)``; collective.

        Raises:
            ValueError: there is no unit with that name; the message lists the units.
        """
        held = self._unit(unit)
        held.unshard()
        # Only once it is there: a gather that raised must not leave the unit held.
        for bucket in held.buckets:
            bucket.held_by_hand = True
        self._put_placeholders()

    def reshard(self, unit: str) -> None:
        """Reshard a unit that was gathered by hand.

        A backward through what you have computed with its parameters yourself is refused from then on, by torch.
        """
        end_holds_by_hand(self._unit(unit).buckets)
        self._put_placeholders()

    @override
    def _data_axes(self) -> tuple[Communicator, ...]:
        return self.options.data_axes

    @override
    def _make_buckets(self) -> list[UnitBucket]:
        axis = self.options.shard_axis
        self._check_host_memory(1 if axis is None else axis.num_ranks)
        self.units = build_units(self.module, self.params, self.options, self._equalise)
        self._schedule = Schedule(self.units, self.options, self._is_due)
        return [bucket for unit in self.units for bucket in unit.buckets]

    @override
    def _on_gradient(self, param: nn.Parameter) -> None:
        super()._on_gradient(param)
        if isinstance(param, StubbedParameter) and param.grad is not None and bool(param.grad.isnan().any()):
            # C++ has computed with its stub, from an input that needs no gradient.
            raise RuntimeError(sharded_parameter(self._name_of(param)))
        # Before it is noted, which may reshard the unit and send others.
        if self._sync and self._schedule.comes_too_late(param):
            raise second_gradient(self._name_of(param))
        self._schedule.gradient_came(param, in_part=self._backward_watch.brings_parts, reduce=self._sync)

    @override
    def _begin_backward(self) -> None:
        # First, since it may refuse: then nothing has been gathered.
        super()._begin_backward()
        self._schedule.begin_backward()

    @override
    def _enter_backward(self) -> None:
        self._schedule.expect_none_of(self._backward_watch.unreached(self.params.values()), reduce=self._sync)

    @override
    def _end_backward(self) -> None:
        self._schedule.pass_by_rest()  # first: it gathers, before what is left is reduced
        super()._end_backward()

    @override
    def _clean_up_backward(self) -> None:
        self._schedule.end_backward()

    @override
    def _reduce_gradients(self) -> None:
        self._schedule.finish()
        super()._reduce_gradients()

    def _unit(self, name: str) -> Unit:
        for unit in self.units:
            if unit.name == name:
                return unit
        raise ValueError(f"unit: {name!r} is not one of {', '.join(unit.name for unit in self.units)}")
