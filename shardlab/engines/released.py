"""What stands in a module where a parameter is sharded and not gathered: its shape and dtype, and a clear error.

A released parameter has no data on this rank. Its place in the module is taken by a stand-in on the meta device, which
answers for shape, dtype and name, and refuses every computation with an error that says whose parameter it is.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardlab.comm.trees import map_tensors
from shardlab.engines.checks import sharded_gradient

_ALLOWED = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "requires_grad_"}
)


class ReleasedParameter(nn.Parameter):
    """A parameter of which this rank holds a shard only.

    Attributes:
        released_as: the error's text.
        refused_gradient: the error's text for whoever looks for a gradient here, where none ever is.
    """

    released_as: str
    refused_gradient: str

    @classmethod
    def stand_in(cls, name: str, param: nn.Parameter) -> "ReleasedParameter":
        """The stand-in of ``param``, which has its shape, dtype and requires_grad."""
        made: ReleasedParameter = cls(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        made.released_as = (
            f"parameter {name!r} is released: this rank holds its shard only. Compute inside engine(...), by "
            "engine.call(function, ...) what is not forward, or inside 'with engine.full_params():'; engine."
            "full_state_dict() gives a copy of all parameters"
        )
        made.refused_gradient = sharded_gradient(name)
        return made

    @property
    def grad(self) -> NoReturn:
        """Torch's own clipping would take None for "has no gradient" and clip nothing."""
        raise RuntimeError(self.refused_gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise RuntimeError(self.refused_gradient if value is None else self.released_as)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer for metadata, refuse everything else."""
        if getattr(func, "__name__", "") in _ALLOWED and getattr(func, "__self__", None) is not Tensor.data:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        released = next((value for value in args if isinstance(value, ReleasedParameter)), None)
        raise RuntimeError(released.released_as if released is not None else "a released parameter was used")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"released parameter {tuple(self.shape)}"


def without_parameters(output: Any, params: Container[Tensor]) -> Any:
    """``output`` of a forward with copies in the place of parameters, which are released when it has ended."""
    return map_tensors(
        lambda tensor: tensor.clone() if isinstance(tensor, nn.Parameter) and tensor in params else tensor, output
    )


class Seats:
    """The places of one parameter in the module: several, where weights are tied."""

    def __init__(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self._param = param
        self.shape = tuple(param.shape)
        self._places = [
            (owner, attribute)
            for owner in module.modules()
            for attribute, held in owner._parameters.items()
            if held is param
        ]
        self._stand_in = ReleasedParameter.stand_in(name, param)

    def seat(self) -> None:
        """Put the parameter itself into its places."""
        self._param.requires_grad_(self._stand_in.requires_grad)  # frozen or thawed while it was away
        self._fill(self._param)

    def vacate(self) -> None:
        """Put the stand-in there."""
        self._stand_in.requires_grad_(self._param.requires_grad)
        self._fill(self._stand_in)

    def _fill(self, value: nn.Parameter) -> None:
        for owner, attribute in self._places:
            owner._parameters[attribute] = value


def seats_of(module: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, Seats]:
    """The places of each parameter, by name."""
    return {name: Seats(module, name, param) for name, param in params.items()}
