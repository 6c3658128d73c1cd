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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardlab.engines.any_engine import AnyEngine

_CLAIM = "_shardlab_claim"
_KEPT = "_shardlab_engine"
_ZERO_GRAD = "zero_grad"


class EngineReference:
    """A reference to an engine that does not survive copying or pickling: a copied module belongs to no engine.

    Args:
        engine: None for an empty reference.
        keeps: whether this reference keeps the engine alive.
    """

    def __init__(self, engine: AnyEngine | None, *, keeps: bool = False) -> None:
        self._reference: Callable[[], AnyEngine | None] | None = None
        if engine is not None:
            self._reference = (lambda: engine) if keeps else weakref.ref(engine)

    @property
    def engine(self) -> AnyEngine | None:
        """The engine; None once it is garbage or ``forget()`` was called."""
        return None if self._reference is None else self._reference()

    def forget(self) -> None:
        """Drop the reference."""
        self._reference = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineReference":
        return EngineReference(None)

    def __reduce__(self) -> tuple[Any, ...]:
        # An empty dict, since torch.load(weights_only=True) accepts it: parameters are saved with their marks.
        return OrderedDict, ()


def check_free(model: nn.Module, strategy: object = None) -> None:
    """Check that no part of a model belongs to an engine, nor the strategy.

    Raises:
        ValueError: it is wrapped, contains a wrapped module or is inside one, or shares a parameter with one; or the
            strategy is another engine's.
    """
    if any(engine_of(thing) is not None for thing in (*model.modules(), *model.parameters(), strategy)):
        gc.collect()  # an engine that an error left open may be garbage: it and its module refer to each other
    for name, thing in (*model.named_modules(), *model.named_parameters()):
        if (engine := engine_of(thing)) is not None:
            what = f"its {'module' if isinstance(thing, nn.Module) else 'parameter'} {name!r}" if name else "it"
            how = "is wrapped by" if thing is engine.module else "is in a module of"
            raise ValueError(
                f"model: {what} {how} an engine ({engine.name}) already; close() that engine first, or give both one "
                "engine"
            )
    if engine_of(strategy) is not None:
        kind = type(strategy).__name__
        raise ValueError(
            f"strategy: this {kind} is another engine's, whose parameters it knows; make one for each engine, here a "
            f"second {kind}(...), or close() that engine first"
        )


def _weakly(method: Any) -> Callable[..., None]:
    """A hook that calls a method while its object lives; torch keeps hooks where no garbage collector looks."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(*args: Any) -> None:
        if (known := owner()) is not None:
            function(known, *args)

    return hook


class Claim:
    """Marks a module, its parameters and an optimizer as an engine's, until ``release()``.

    Args:
        engine: the owner, with its module.
        params: the module's.
        optimizer: the engine's.
        before_others_step: told of every other optimizer that is about to step outside of the engine's own step.
        strategy: the engine's, which is marked too.
    """

    def __init__(
        self, engine: AnyEngine, params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, before_others_step:
        Callable[[torch.optim.Optimizer], None] | None = None, strategy: object = None,
    ) -> None:  # fmt: skip
        self._mark = EngineReference(engine)
        self._module, self._optimizer = engine.module, optimizer
        self._params, self._before_others_step = tuple(params), before_others_step
        self.verb = ""
        self._hooks = []
        with contextlib.suppress(AttributeError):  # a wrapper that never called Optimizer.__init__ is not watched
            self._hooks.append(optimizer.register_step_pre_hook(_weakly(self.check_step)))
            if any(engine.spread_over().values()):
                self._hooks.append(optimizer.register_load_state_dict_pre_hook(_weakly(self.check_load)))
        if before_others_step is not None:
            self._hooks.append(register_optimizer_step_pre_hook(_weakly(self.check_others)))
            weakref.finalize(self, self._hooks[-1].remove)  # an engine that nobody closes leaves none
        # Modules without parameters stay unmarked: two models may share an activation.
        claimed = [module for module in self._module.modules() if next(module.parameters(), None) is not None]
        # Of the module too, which may have others in their place by now (torch's own engines).
        marked = (*claimed, *self._params, *self._module.parameters(), *([] if strategy is None else [strategy]))
        for thing in marked:
            object.__setattr__(thing, _CLAIM, self._mark)
        # Gradient hooks refer to the engine weakly. So the module keeps it alive, for users who keep only the module.
        object.__setattr__(self._module, _KEPT, EngineReference(engine, keeps=True))
        for owner in (self._module, self._optimizer):
            object.__setattr__(owner, _ZERO_GRAD, ZeroGrad(owner, self._mark))

    @contextlib.contextmanager
    def during(self, verb: str) -> Iterator[None]:
        """Inside, the engine itself calls the optimizer, to 'step' or to 'load'."""
        self.verb = verb
        try:
            yield
        finally:
            self.verb = ""

    def check_step(self, *_: Any) -> None:
        """Refuse a step that the engine has not called.

        Raises:
            RuntimeError: outside of the engine's step, while the engine lives.
        """
        if self.verb != "step" and self._mark.engine is not None:
            raise RuntimeError(
                "engine.optimizer.step(): it would step this rank's tensors, perhaps before gradients are averaged, "
                "and gather nothing; write engine.step(), or scaler.step(engine) with shardlab.GradScaler"
            )

    def check_load(self, *_: Any) -> None:
        """Refuse state where tensors are pieces: nothing says of which it is.

        Raises:
            ValueError: the engine has not called it.
        """
        if self.verb != "load" and self._mark.engine is not None:
            raise ValueError(
                "engine.optimizer.load_state_dict: this rank steps pieces of the parameters, and nothing says of which "
                "the state is; write engine.load_full_optimizer_state_dict(state), with a plain optimizer's state or "
                "that of engine.full_optimizer_state_dict(), or engine.load(directory)"
            )

    def check_others(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Tell of a step of any optimizer but the engine's own."""
        if self._mark.engine is not None and optimizer is not self._optimizer and self.verb != "step":
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


def engine_of(thing: object) -> AnyEngine | None:
    """The engine that trains a module, a parameter, or by a strategy; None if none does."""
    return _engine_behind(getattr(thing, _CLAIM, None))


def _engine_behind(mark: object) -> AnyEngine | None:
    """The engine that a mark refers to; None for what unpickling left in place of a mark."""
    return mark.engine if isinstance(mark, EngineReference) else None
