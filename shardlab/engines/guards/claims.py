"""Which engine a module and a parameter belong to, and what the module's and the optimizer's own methods do meanwhile.

An engine marks every parameter and every module of its tree that has some. So a second engine around a part of it,
around something larger, or around another module that shares a parameter is refused before it changes anything.

Calls that would bypass the engine are redirected to it (``module.zero_grad()``, ``optimizer.zero_grad()``) or refused
(``optimizer.step()``, which would step this rank's pieces without the collectives before and after). The engine is told
of every other optimizer that steps, since one may have been built from the same parameters.
"""

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from shardlab.comm.communicator import Communicator
from shardlab.engines.hooks import refuse_replacing, weakly

_CLAIM = "_shardlab_claim"
_KEPT = "_shardlab_engine"
_ZERO_GRAD = "zero_grad"
PIECES = "shardlab_pieces"
"""In an optimizer's state dict: of which pieces it is."""


class StepsPieces(Protocol):
    """What tells one rank's pieces from another's."""

    @property
    def tensor_comm(self) -> Communicator | None: ...  # noqa: D102
    def owned(self) -> dict[str, tuple[int, int]]: ...  # noqa: D102


class Claimant(StepsPieces, Protocol):
    """What a claim asks of its engine."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def replaces_params(self) -> bool: ...  # noqa: D102
    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    def zero_grad(self, set_to_none: bool = True) -> None: ...  # noqa: D102
    def spread_over(self) -> dict[str, tuple[Communicator, ...]]: ...  # noqa: D102


class EngineReference:
    """A reference to an engine that does not survive copying or pickling: a copied module belongs to no engine.

    Args:
        engine: None for an empty reference.
        keeps: whether this reference keeps the engine alive.
    """

    def __init__(self, engine: Claimant | None, *, keeps: bool = False) -> None:
        self._reference: Callable[[], Claimant | None] | None = None
        if engine is not None:
            self._reference = (lambda: engine) if keeps else weakref.ref(engine)

    @property
    def engine(self) -> Claimant | None:
        """The engine; None once it is garbage or ``forget()`` was called."""
        return None if self._reference is None else self._reference()

    def forget(self) -> None:
        """Drop the reference."""
        self._reference = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineReference":
        return EngineReference(None)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # An empty dict, since torch.load(weights_only=True) accepts it: parameters are saved with their marks.
        return OrderedDict, ()


def check_free(model: nn.Module) -> None:
    """Check that no part of a model belongs to an engine.

    Raises:
        ValueError: it is wrapped, contains a wrapped module or is inside one, or shares a parameter with one.
    """
    if any(_owner(thing) is not None for thing in (*model.modules(), *model.parameters())):
        gc.collect()  # an engine that an error left open may be garbage: it and its module refer to each other
    for name, module in model.named_modules():
        if (engine := _owner(module)) is not None:
            if module is model is engine.module:
                raise ValueError("model: it is wrapped by an engine already; close() that engine first")
            what = f"its module {name!r}" if name else "it"
            how = "is wrapped by an engine" if module is engine.module else "is inside a module that an engine wraps"
            raise ValueError(
                f"model: {what} {how} ({engine.name}) already; close() that engine first, or give both one engine"
            )
    for name, param in model.named_parameters():
        if (engine := _owner(param)) is not None:
            raise ValueError(
                f"model: its parameter {name!r} is also in a module that an engine wraps ({engine.name}); close() that "
                "engine first, or give both modules one engine"
            )


class Claim:
    """Marks a module, its parameters and an optimizer as an engine's, until ``release()``.

    Args:
        engine: the owner, with its module.
        params: the module's.
        optimizer: the engine's.
        before_others_step: told of every other optimizer that is about to step outside of the engine's own step.
    """

    def __init__(
        self,
        engine: Claimant,
        params: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        before_others_step: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self._mark = EngineReference(engine)
        self._module, self._optimizer = engine.module, optimizer
        self._params, self._before_others_step = tuple(params), before_others_step
        self.is_stepping = False
        self.is_installing = False
        self._hooks = [*_watch_steps(self), *_mark_states(self)]
        if before_others_step is not None:
            self._hooks.append(_watch_others(self))
        # Modules without parameters stay unmarked: two models may share an activation.
        claimed = [module for module in self._module.modules() if next(module.parameters(), None) is not None]
        # Of the module too, which may have others in their place by now (torch's own engines).
        for thing in (*claimed, *self._params, *self._module.parameters()):
            object.__setattr__(thing, _CLAIM, self._mark)
        # Gradient hooks refer to the engine weakly. So the module keeps it alive, for users who keep only the module.
        object.__setattr__(self._module, _KEPT, EngineReference(engine, keeps=True))
        for owner in (self._module, self._optimizer):
            object.__setattr__(owner, _ZERO_GRAD, ZeroGrad(owner, self._mark))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, ``optimizer.step()`` is the engine's own call."""
        # Also taken back after a step that raised, or the user could step past the engine from then on.
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    @contextlib.contextmanager
    def installing(self) -> Iterator[None]:
        """Inside, ``optimizer.load_state_dict()`` is the engine's own call."""
        self.is_installing = True
        try:
            yield
        finally:
            self.is_installing = False

    def check_step(self, *_: Any) -> None:
        """Refuse a step that the engine has not called.

        Raises:
            RuntimeError: outside ``stepping()``, while the engine lives.
        """
        if not self.is_stepping and self._mark.engine is not None:
            raise RuntimeError(
                "engine.optimizer.step(): it would step this rank's tensors, perhaps before gradients are averaged, "
                "and gather nothing; write engine.step(), or scaler.step(engine) with shardlab.engines.GradScaler"
            )

    def check_state(self, _: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Refuse state that was saved for other pieces.

        Raises:
            ValueError: it is another rank's, or that of a plain optimizer.
        """
        engine = self._mark.engine
        if engine is not None and not self.is_installing and state.get(PIECES) != pieces_of(engine):
            raise ValueError(
                "engine.optimizer.load_state_dict: this rank steps pieces of the parameters, and the state is not of "
                "these pieces; write engine.load_full_optimizer_state_dict(state), with a plain optimizer's state or "
                "that of engine.full_optimizer_state_dict(), or engine.load(directory)"
            )

    def check_others(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Tell of a step of any optimizer but the engine's own."""
        if self._mark.engine is not None and optimizer is not self._optimizer and not self.is_stepping:
            assert self._before_others_step is not None
            self._before_others_step(optimizer)

    def release(self) -> None:
        """Free everything for other engines."""
        # First, since it also frees modules that were taken out of the tree, which the loop below does not reach.
        self._mark.forget()
        for hook in self._hooks:
            hook.remove()
        # The module's only strong reference: from here on the engine lives as long as the user holds it.
        object.__setattr__(self._module, _KEPT, None)
        for thing in (*self._module.modules(), *self._params):
            # A module added since may be another engine's.
            if getattr(thing, _CLAIM, None) is self._mark:
                object.__delattr__(thing, _CLAIM)
        for owner in (self._module, self._optimizer):
            if isinstance(vars(owner).get(_ZERO_GRAD), ZeroGrad):
                object.__delattr__(owner, _ZERO_GRAD)


class ZeroGrad:
    """Replaces a ``zero_grad`` method, to clear the gradients of the engine wherever they are.

    Args:
        owner: a module or an optimizer; in a deep copy it is the copy, and its class's own method is called.
        mark: refers to the engine.
    """

    def __init__(self, owner: nn.Module | torch.optim.Optimizer, mark: EngineReference) -> None:
        self._owner, self._mark = owner, mark

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As ``Engine.zero_grad``."""
        engine = _engine_behind(self._mark)
        if engine is None:
            type(self._owner).zero_grad(self._owner, *args, **kwargs)  # type: ignore[arg-type]
        else:
            engine.zero_grad(*args, **kwargs)


def pieces_of(engine: StepsPieces) -> dict[str, Any]:
    """The elements of each parameter that this rank steps, in plain types, with its place on the tensor axis."""
    tensor_rank = 0 if engine.tensor_comm is None else engine.tensor_comm.rank
    return {"tensor_rank": tensor_rank, "owned": {name: list(span) for name, span in engine.owned().items()}}


def _watch_steps(claim: Claim) -> list[RemovableHandle]:
    try:
        return [claim._optimizer.register_step_pre_hook(weakly(claim.check_step))]
    except AttributeError:
        # A wrapper around another optimizer that never called Optimizer.__init__ has no hooks and is not watched.
        return []


def _mark_states(claim: Claim) -> list[RemovableHandle]:
    """Where tensors are pieces, mark the optimizer's state dicts with whose pieces they are of, and refuse others'."""
    engine, optimizer = claim._mark.engine, claim._optimizer
    if engine is None or not any(engine.spread_over().values()):
        return []
    mark = pieces_of(engine)
    try:
        return [
            optimizer.register_state_dict_post_hook(lambda _, state: state.update({PIECES: mark})),
            optimizer.register_load_state_dict_pre_hook(weakly(claim.check_state)),
        ]
    except AttributeError:  # as above
        return []


def _watch_others(claim: Claim) -> RemovableHandle:
    handle: RemovableHandle = register_optimizer_step_pre_hook(weakly(claim.check_others))
    weakref.finalize(claim, handle.remove)  # an engine that nobody closes leaves none
    return handle


def engine_of(module: nn.Module) -> Claimant | None:
    """The engine that trains a module; None if none does."""
    return _owner(module)


def _owner(thing: object) -> Claimant | None:
    return _engine_behind(getattr(thing, _CLAIM, None))


def _engine_behind(mark: object) -> Claimant | None:
    """The engine that a mark refers to; None for what unpickling left in place of a mark."""
    return mark.engine if isinstance(mark, EngineReference) else None


# Once, and not by each claim: whether somebody owns a parameter is written on it.
refuse_replacing(_owner)
