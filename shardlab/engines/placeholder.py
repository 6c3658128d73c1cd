"""What stands in a module for a tensor of which this rank has a piece only: its shape and dtype, and a clear error.

A parameter that is sharded and not gathered has no data on this rank. In the module stands a placeholder on the meta
device, which answers for shape, dtype and name, and refuses every computation with an error that names the parameter.

Where parameters are whole and their mean gradients lie in pieces, ``param.grad`` would be None. Whoever looks there, as
``torch.nn.utils.clip_grad_norm_`` does, would find nothing, do nothing and say nothing. So a placeholder stands there
too. It holds no memory and is taken away before autograd accumulates into ``param.grad``; where somebody else has taken
it away, which for plain torch means that the gradient is to be forgotten, ``check`` says so.
"""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardlab.comm.trees import map_tensors
from shardlab.engines.checks import sharded_gradient

_OF_PARAMETER = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "requires_grad_"}
)
_OF_GRADIENT = frozenset({"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "untyped_storage"})


class PlaceholderParameter(nn.Parameter):
    """A parameter of which this rank holds a shard only.

    Attributes:
        refusal: the error's text.
        refused_gradient: the error's text for whoever looks for a gradient here, where none ever is.
    """

    refusal: str
    refused_gradient: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "PlaceholderParameter":
        """The placeholder of ``param``, which has its shape, dtype and requires_grad."""
        made: PlaceholderParameter = cls(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        made.refusal = (
            f"parameter {name!r} is sharded: this rank holds its shard only. Compute inside engine(...), by "
            "engine.call(function, ...) what is not forward, or inside 'with engine.full_params():'; engine."
            "full_state_dict() gives a copy of all parameters. A weight that is used inside activation checkpointing "
            "and outside of it needs use_reentrant=False there"
        )
        made.refused_gradient = sharded_gradient(name)
        return made

    @property
    def grad(self) -> NoReturn:
        """Torch's own clipping would take None for "has no gradient" and clip nothing."""
        raise RuntimeError(self.refused_gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise RuntimeError(self.refused_gradient if value is None else self.refusal)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer for metadata, refuse everything else."""
        if getattr(func, "__name__", "") in _OF_PARAMETER and getattr(func, "__self__", None) is not Tensor.data:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        used = next((value for value in args if isinstance(value, PlaceholderParameter)), None)
        raise RuntimeError(used.refusal if used is not None else "a sharded parameter was used")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded parameter {tuple(self.shape)}"


def without_parameters(output: Any, params: Container[Tensor]) -> Any:
    """``output`` of a forward with copies in the place of parameters, which are let go when it has ended."""
    return map_tensors(
        lambda tensor: tensor.clone() if isinstance(tensor, nn.Parameter) and tensor in params else tensor, output
    )


class ParameterSites:
    """Every attribute of a module that is one parameter: several, where weights are tied."""

    def __init__(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self._param = param
        self.shape = tuple(param.shape)
        self._sites = [
            (owner, attribute)
            for owner in module.modules()
            for attribute, held in owner._parameters.items()
            if held is param
        ]
        self._placeholder = PlaceholderParameter.of(name, param)

    def put_parameter(self) -> None:
        """Let the module have the parameter itself."""
        self._param.requires_grad_(self._placeholder.requires_grad)  # frozen or thawed while it was away
        self._put(self._param)

    def put_placeholder(self) -> None:
        """Let the module have the placeholder."""
        self._placeholder.requires_grad_(self._param.requires_grad)
        self._put(self._placeholder)

    def _put(self, value: nn.Parameter) -> None:
        for owner, attribute in self._sites:
            owner._parameters[attribute] = value


def sites_of(module: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, ParameterSites]:
    """The sites of each parameter, by name."""
    return {name: ParameterSites(module, name, param) for name, param in params.items()}


class PlaceholderGradient(Tensor):
    """A gradient of which this rank has a piece only.

    Attributes:
        refusal: the error's text.
    """

    refusal: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "PlaceholderGradient":
        """The placeholder for the gradient of ``param``: its shape, dtype and device, no bytes."""
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
        if getattr(func, "__name__", "") in _OF_GRADIENT:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = (value for some in args for value in (some if isinstance(some, list | tuple) else (some,)))
        refusals = (getattr(value, "refusal", None) for value in given if isinstance(value, PlaceholderGradient))
        raise RuntimeError(next((text for text in refusals if text), sharded_gradient("a parameter")))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded gradient {tuple(self.shape)}"


class PlaceholderGradients:
    """Those of an engine's parameters.

    Args:
        params: whole parameters by name.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = dict(params)
        self._placeholders = {name: PlaceholderGradient.of(name, param) for name, param in params.items()}
        self._placed: set[str] = set()
        self._hooks = [_before_gradient(self, name, param) for name, param in params.items() if _can_train(param)]

    def place(self) -> None:
        """The gradients are means: put a placeholder at every parameter that trains."""
        for name, param in self._params.items():
            if param.requires_grad:
                if self._placeholders[name].dtype != param.dtype:  # inside full_params(), where parameters are rounded
                    self._placeholders[name] = PlaceholderGradient.of(name, param)
                param.grad = self._placeholders[name]
                self._placed.add(name)

    def take_away(self) -> None:
        """Another backward follows, or the gradients are forgotten."""
        for name in tuple(self._placed):
            self.lift(name)

    def lift(self, name: str) -> None:
        """The parameter gets a gradient of its own, to be added to the mean."""
        if isinstance(self._params[name].grad, PlaceholderGradient):
            self._params[name].grad = None
        self._placed.discard(name)

    def check(self) -> None:
        """Find out whether somebody has forgotten gradients without the engine.

        Raises:
            RuntimeError: a placeholder is gone.
        """
        for name in self._placed:
            if not isinstance(self._params[name].grad, PlaceholderGradient):
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


def _before_gradient(owner: PlaceholderGradients, name: str, param: nn.Parameter) -> Any:
    """A hook that runs before autograd accumulates; it keeps nothing alive, as those of ``Engine``."""
    reference = weakref.ref(owner)

    def lift(_: Tensor) -> None:
        if (placeholders := reference()) is not None:
            placeholders.lift(name)

    frozen = not param.requires_grad
    param.requires_grad_(True)  # torch takes the hook only then; it may be thawed later
    hook = param.register_hook(lift)
    param.requires_grad_(not frozen)
    return hook
