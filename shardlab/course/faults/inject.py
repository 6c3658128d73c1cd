"""Makes faults happen in a training loop: at their rank, in their step, in their phase, and nowhere else.

    with inject(engine, DeadRank(rank=1, step=2, phase="backward")):        # in a loop of one's own
        ...
    compare(faulty(make_model, NaN(rank=1, step=3)), data, loss)            # where somebody else makes the engine

Nothing of the engine or the loop is replaced outside of the faulty phase on the faulty rank, so a hang is reported with
the same lines as one that was not made on purpose. A fault that never happened is an error at the end: a test with it
would show nothing.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.comm import CollectiveEvent, Communicator, Observer, Pending
from shardlab.comm.trees import map_tensors
from shardlab.course.faults.kinds import AtCollective, AtLayer, Fault, OnLink, SkippedCall
from shardlab.engines import AnyEngine
from shardlab.engines.guards.ownership import engine_of
from shardlab.launch import current
from shardlab.units.structure import called_modules
from shardlab.vocabulary import Collective, Phase

_VERBS = tuple(verb for verb in Collective if hasattr(Communicator, verb))


@dataclass(frozen=True)
class Happened:
    """Sent to the parent process (``on_message`` of a pool) just before a fault happens.

    Attributes:
        fault: which.
        time_ns: when, by ``time.perf_counter_ns``.
    """

    fault: Fault
    time_ns: int


@contextmanager
def inject(engine: AnyEngine, *faults: Fault) -> Iterator[None]:
    """Inside, the faults happen; call it on all ranks with the same faults.

    Args:
        engine: any strategy. Torch's own bypass the communicator, so their collectives cannot be skipped or delayed.
        faults: on one or several ranks.

    Raises:
        ValueError: a fault's rank is not on the engine's mesh.
        RuntimeError: at the end, on the rank of a fault that never happened.
    """
    _check_ranks(faults, engine.mesh.ranks)
    injection = Injection(engine, faults)
    try:
        yield
    finally:
        injection.remove()
    # Not after an error in the loop, which would then be hidden behind this one.
    injection.check()


def faulty(make: Callable[[], nn.Module], *faults: Fault) -> Callable[[], nn.Module]:
    """A function that makes the same module with faults, for ``compare`` and for workloads.

    They begin with the first forward of an engine around the module, and end when its mesh is closed. On ranks, and in
    the single process, that have none of the faults nothing changes.

    Args:
        make: makes the module.
        faults: on one or several ranks.
    """

    @functools.wraps(make)
    def made() -> nn.Module:
        module = make()
        module.register_forward_pre_hook(_Begin(faults), prepend=True)
        return module

    return made


class _Begin:
    """A forward pre-hook that injects the faults once the module has an engine."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._has_begun = False

    def __call__(self, module: nn.Module, *_: object) -> None:
        engine = engine_of(module)
        if self._has_begun or not isinstance(engine, AnyEngine) or engine.module is not module:
            return
        self._has_begun = True
        _check_ranks(self._faults, range(current().world_size))
        injection = Injection(engine, self._faults)
        # This forward has begun: the hook that has just been registered sees the next one first.
        injection.begin_forward()
        # Called the last one first: the engine is as it was before the check may raise.
        engine.mesh.call_at_close(injection.check)
        engine.mesh.call_at_close(injection.remove)


class Injection(Observer):
    """The faults of this rank, and where its training is.

    Args:
        engine: what trains.
        faults: of all ranks.
    """

    def __init__(self, engine: AnyEngine, faults: Sequence[Fault]) -> None:
        own_rank = engine.comm.ranks[engine.comm.rank]
        self._engine = engine
        self._faults = [fault for fault in faults if fault.rank == own_rank]
        self._happened: list[Fault] = []
        self._phase, self._step = Phase.SETUP, -1
        self._delays_s: dict[int, float] = {}
        self._hooks, self._of_phase = ExitStack(), ExitStack()
        if self._faults:
            self._watch()

    def check(self) -> None:
        """Raise RuntimeError if a fault of this rank has not happened."""
        if missing := [fault for fault in self._faults if fault not in self._happened]:
            raise RuntimeError(
                f"faults: {missing[0]} never happened; this rank came to step {self._engine.num_steps}, and such a "
                "fault needs a layer that is called, or a collective of the engine's, in that phase"
            )

    def remove(self) -> None:
        """Leave the engine as it was."""
        self._of_phase.close()
        self._hooks.close()

    def begin_forward(self, *_: object) -> None:
        """The module's forward begins."""
        if torch.is_grad_enabled():  # an evaluation belongs to no step
            self._step = self._engine.num_steps
            self._enter(Phase.FORWARD)

    def _watch(self) -> None:
        module, layer = self._engine.module, _middle_layer(self._engine.module)
        hooks = [
            # Before the engine's own hooks, which gather.
            module.register_forward_pre_hook(self.begin_forward, prepend=True),
            # Before the end of forward: the layer may be the module itself.
            layer.register_forward_hook(self._at_layer),
            module.register_forward_hook(self._end_forward),
            self._engine.optimizer.register_step_pre_hook(self._begin_step),
        ]
        for hook in hooks:
            self._hooks.callback(hook.remove)
        for comm in self._engine.comms:
            self._hooks.enter_context(comm.observed_by(self))
        self._replace_calls(self._engine.num_steps)

    def _end_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._enter(Phase.BACKWARD)

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._enter(Phase.STEP)
        params = (param for group in optimizer.param_groups for param in group["params"])
        gradient = next((param.grad for param in params if param.grad is not None), None)
        if gradient is not None and (changed := self._struck(Phase.STEP, gradient)) is not gradient:
            gradient.copy_(changed)

    def _enter(self, phase: Phase) -> None:
        """Enter a phase: restore what was replaced for the last one, and replace what this one needs."""
        self._of_phase.close()
        self._phase = phase
        if any(isinstance(fault, AtCollective) for fault in self._due()):
            for comm in self._engine.comms:
                for verb in _VERBS:
                    _replace(comm, verb, functools.partial(self._communicate, comm, verb), self._of_phase)
        if phase == Phase.STEP:
            self._replace_calls(self._step + 1)

    def _replace_calls(self, step: int) -> None:
        """Before the step's forward: in ``engine.backward(engine(x).mean())`` Python looks ``backward`` up first."""
        for fault in self._faults:
            if isinstance(fault, SkippedCall) and fault.step == step:
                _replace(self._engine, fault.phase, functools.partial(self._skip, fault), self._hooks)

    def _skip(self, fault: SkippedCall, *_: object, **__: object) -> None:
        vars(self._engine).pop(fault.phase)
        self._tell(fault)

    def _communicate(self, comm: Communicator, verb: Collective, *args: Any, tag: str = "", **_: object) -> Pending:
        fault = next(fault for fault in self._due() if isinstance(fault, AtCollective))
        self._of_phase.close()  # the fault's own collective, and all that follow, go the ordinary way
        self._tell(fault)
        return fault.communicate(comm, verb, args[0] if args else None, tag)

    def _at_layer(self, _: nn.Module, __: object, output: Any) -> Any:
        def watched(tensor: Tensor) -> Tensor:
            tensor = self._struck(Phase.FORWARD, tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._struck, Phase.BACKWARD))
            return tensor

        return map_tensors(watched, output)

    def _struck(self, phase: Phase, tensor: Tensor) -> Tensor:
        for fault in self._due() if phase == self._phase else []:
            if isinstance(fault, AtLayer):
                self._tell(fault)
                changed = fault.strike(tensor)
                tensor = tensor if changed is None else changed
        return tensor

    def issued(self, event: CollectiveEvent) -> None:
        """An observer's: note by how much this collective will be late."""
        for fault in self._of_step():
            if isinstance(fault, OnLink) and fault.phase == self._phase:
                self._tell(fault)
                self._delays_s[id(event)] = self._delays_s.get(id(event), 0.0) + fault.delay_s(event)

    def completed(self, event: CollectiveEvent) -> None:
        """Delay the end of the collective: sleep in the queue's thread, before anyone learns that it has ended.

        (Not where it is started: that may be the caller's thread, which must not sleep.)
        """
        if delay_s := self._delays_s.pop(id(event), 0.0):
            sleep(delay_s)
            event.end_ns = perf_counter_ns()

    def _of_step(self) -> list[Fault]:
        return [fault for fault in self._faults if fault.step == self._step]

    def _due(self) -> list[Fault]:
        """What is yet to happen in this phase."""
        of_phase = (fault for fault in self._of_step() if fault.phase == self._phase)
        return [fault for fault in of_phase if fault not in self._happened]

    def _tell(self, fault: Fault) -> None:
        if fault not in self._happened:
            self._happened.append(fault)
            current().emit(Happened(fault, perf_counter_ns()))


def _check_ranks(faults: Sequence[Fault], ranks: Sequence[int]) -> None:
    for fault in faults:
        if fault.rank not in ranks:
            raise ValueError(f"rank: {fault} is given; allowed are ranks {', '.join(map(str, ranks))}")


def _replace(owner: object, name: str, call: Callable[..., object], until: ExitStack) -> None:
    """Have ``owner.name`` be ``call`` until the stack is closed."""
    setattr(owner, name, call)
    until.callback(vars(owner).pop, name, None)


def _middle_layer(module: nn.Module) -> nn.Module:
    """The one in the middle of those that have parameters and no modules inside; the module itself if it has none."""
    called = called_modules(module).values()
    layers = [layer for layer in called if not any(True for _ in layer.children())]
    return layers[(len(layers) - 1) // 2] if layers else module
