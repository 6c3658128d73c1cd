"""What stands at ``param.grad`` where the parameter is whole and its mean gradient lies in pieces: a clear error.

Without it ``param.grad`` would be None, and whoever looks there, as ``torch.nn.utils.clip_grad_norm_`` does, would find
nothing, do nothing and say nothing. The stand-in answers for shape and dtype and refuses every computation. It holds no
memory, it is taken away before autograd accumulates into ``param.grad``, and where somebody else has taken it away,
which for plain torch means that the gradient is to be forgotten, ``check`` says so.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.engines.checks import sharded_gradient

_ALLOWED = frozenset({"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "untyped_storage"})


class StandInGradient(Tensor):
    """A gradient of which this rank has a piece only.

    Attributes:
        refusal: the error's text.
    """

    refusal: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "StandInGradient":
        """The stand-in for the gradient of ``param``: its shape, dtype and device, no bytes."""
        empty = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        empty.untyped_storage().resize_(0)
        made = empty.as_subclass(cls)
        made.refusal = sharded_gradient(name)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer for metadata, refuse everything else."""
        if getattr(func, "__name__", "") in _ALLOWED:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = (value for some in args for value in (some if isinstance(some, list | tuple) else (some,)))
        refusals = (getattr(value, "refusal", None) for value in given if isinstance(value, StandInGradient))
        raise RuntimeError(next((text for text in refusals if text), sharded_gradient("a parameter")))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded gradient {tuple(self.shape)}"


class StandInGradients:
    """Those of an engine's parameters.

    Args:
        params: whole parameters by name.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = dict(params)
        self._stand_ins = {name: StandInGradient.of(name, param) for name, param in params.items()}
        self._placed: set[str] = set()
        self._hooks = [_before_gradient(self, name, param) for name, param in params.items() if _can_train(param)]

    def place(self) -> None:
        """The gradients are means: put a stand-in to every parameter that trains."""
        for name, param in self._params.items():
            if param.requires_grad:
                if self._stand_ins[name].dtype != param.dtype:  # inside full_params(), where parameters are rounded
                    self._stand_ins[name] = StandInGradient.of(name, param)
                param.grad = self._stand_ins[name]
                self._placed.add(name)

    def take_away(self) -> None:
        """Another backward follows, or the gradients are forgotten."""
        for name in tuple(self._placed):
            self.lift(name)

    def lift(self, name: str) -> None:
        """The parameter gets a gradient of its own, to be added to the mean."""
        if isinstance(self._params[name].grad, StandInGradient):
            self._params[name].grad = None
        self._placed.discard(name)

    def check(self) -> None:
        """Find out whether somebody has forgotten gradients without the engine.

        Raises:
            RuntimeError: a stand-in is gone.
        """
        for name in self._placed:
            if not isinstance(self._params[name].grad, StandInGradient):
                raise RuntimeError(
                    f"gradient of {name!r}: it was set or taken away at the parameter (by a submodule's zero_grad() or "
                    "by '.grad ='), but the mean lies in engine.step_tensors(); write engine.zero_grad()"
                )

    def close(self) -> None:
        """Leave the parameters as plain ones."""
        self.take_away()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _can_train(param: nn.Parameter) -> bool:
    return param.is_floating_point()


def _before_gradient(owner: StandInGradients, name: str, param: nn.Parameter) -> Any:
    """A hook that runs before autograd accumulates; it keeps nothing alive, as those of ``Engine``."""
    reference = weakref.ref(owner)

    def lift(_: Tensor) -> None:
        if (stand_ins := reference()) is not None:
            stand_ins.lift(name)

    frozen = not param.requires_grad
    param.requires_grad_(True)  # torch takes the hook only then; it may be thawed later
    hook = param.register_hook(lift)
    param.requires_grad_(not frozen)
    return hook
