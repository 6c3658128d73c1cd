"""Which engine a module and a parameter belong to, and what the module's and the optimizer's own methods do meanwhile.

An engine marks every module of its tree and every parameter, so that a second engine around a part of it, around
something larger, or around another module that shares a parameter is refused before it changes anything.

What is not the engine's way to do a thing is made it (``module.zero_grad()``, ``optimizer.zero_grad()``) or refused
(``optimizer.step()``, which would move this rank's pieces and leave the others' as they were).
"""

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from shardlab.engines.base import Engine

_CLAIM = "_shardlab_claim"
_ZERO_GRAD = "zero_grad"


class EngineReference:
    """A weak reference to an engine; a copy of what carries it, or a pickle, belongs to no engine."""

    def __init__(self, engine: "Engine | None") -> None:
        self._reference = None if engine is None else weakref.ref(engine)

    def forget(self) -> None:
        """Refer to nothing from now on."""
        self._reference = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineReference":
        return EngineReference(None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Something empty that torch.load(weights_only=True) accepts: parameters carry this with them.
        return OrderedDict, ()

    @staticmethod
    def engine_of(found: object) -> "Engine | None":
        """The engine that ``found`` refers to, if it is such a reference and the engine still lives."""
        if isinstance(found, EngineReference) and found._reference is not None:
            return found._reference()
        return None


def check_free(model: nn.Module) -> None:
    """A model no part of which belongs to an engine.

    Raises:
        ValueError: it is wrapped, contains a wrapped module or is inside one, or shares a parameter with one.
    """
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


def claim(engine: "Engine") -> EngineReference:
    """Mark all that belongs to an engine, until ``release``; the mark."""
    mark = EngineReference(engine)
    for thing in (*engine.module.modules(), *engine.params.values()):
        object.__setattr__(thing, _CLAIM, mark)
    return mark


def release(engine: "Engine", mark: EngineReference) -> None:
    """Let others have it, also what has been taken out of the module since."""
    mark.forget()
    for thing in (*engine.module.modules(), *engine.params.values()):
        if getattr(thing, _CLAIM, None) is mark:
            object.__delattr__(thing, _CLAIM)


class ZeroGrad:
    """In the place of a ``zero_grad`` method: forgets the gradients of the engine, wherever they lie.

    Args:
        owner: a module or an optimizer; of a deep copy it is the copy, whose own method is called.
        engine: whose gradients.
    """

    def __init__(self, owner: nn.Module | torch.optim.Optimizer, engine: "Engine") -> None:
        self._owner, self._engine = owner, EngineReference(engine)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As ``Engine.zero_grad``."""
        engine = EngineReference.engine_of(self._engine)
        if engine is None:
            type(self._owner).zero_grad(self._owner, *args, **kwargs)  # type: ignore[arg-type]
        else:
            engine.zero_grad(*args, **kwargs)


def divert_zero_grad(engine: "Engine") -> None:
    """Let the module's and the optimizer's ``zero_grad`` be the engine's, until ``restore_zero_grad``."""
    for owner in (engine.module, engine.optimizer):
        object.__setattr__(owner, _ZERO_GRAD, ZeroGrad(owner, engine))


def restore_zero_grad(engine: "Engine") -> None:
    """Give them their own back."""
    for owner in (engine.module, engine.optimizer):
        if isinstance(vars(owner).get(_ZERO_GRAD), ZeroGrad):
            object.__delattr__(owner, _ZERO_GRAD)


def refuse_direct_steps(engine: "Engine") -> RemovableHandle:
    """Let ``optimizer.step()`` raise, until the handle is removed, unless ``engine.step()`` calls it."""
    reference = weakref.ref(engine)

    def refuse(*_: Any) -> None:
        if (engine := reference()) is not None and not engine.is_stepping:
            raise RuntimeError(
                "engine.optimizer.step(): it moves what this rank holds, with gradients that may not be means yet, and "
                "tells no other rank; write engine.step(), or scaler.step(engine) with shardlab.engines.GradScaler"
            )

    return engine.optimizer.register_step_pre_hook(refuse)


def _owner(thing: object) -> "Engine | None":
    return EngineReference.engine_of(getattr(thing, _CLAIM, None))
