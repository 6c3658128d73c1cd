"""Stand-ins for tensors of which this rank holds only a piece: they have shape and dtype, and refuse to be used.

A parameter that is sharded and not gathered has no data on this rank: a stub, one NaN expanded to the whole shape. So
that nobody computes with that, wherever the parameter is kept (in the module, a list, a closure, a partial), it is a
``StubbedParameter`` meanwhile: the same object, with its hooks and its version, which answers for shape, dtype, device
and name, and refuses every computation with an error that names it.

Where mean gradients are in pieces, ``param.grad`` would be None. Code that reads it, such as
``torch.nn.utils.clip_grad_norm_``, would silently do nothing. So ``param.grad`` is a ``PlaceholderGradient``. It holds
no memory, and is removed before autograd accumulates into ``param.grad``.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OF_PARAM = frozenset({"__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex"})
_FREEZES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]  # a bool in torch's stubs
_OF_STUB = _OF_PARAM - {"__get__"} | {
    "data_ptr", "untyped_storage", "storage_offset", "is_contiguous", "get_device", "register_hook",
    "register_post_accumulate_grad_hook", "__hash__", "empty_like", "zeros_like", "ones_like", "full_like",
}  # fmt: skip
_OF_GRADIENT = frozenset({"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "untyped_storage"})
_VIEWS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)


def sharded_parameter(name: str) -> str:
    """What to write instead where the sharded parameter ``name`` is used."""
    return (
        f"parameter {name!r} is sharded: this rank holds only its shard. Read it or copy it, or its module, inside "
        "'with engine.full_params():', or take engine.full_state_dict(), which returns copies. Write inside 'with "
        "engine.full_params(keep_changes=True):', into parameters asked of the module there. For another dtype or "
        "device, convert the module before the engine is built. In a forward, compute with it in the module that "
        "holds it, called inside engine(...), or choose larger FSDP units, as wrap='root', also for "
        "engine.call(function, ...). A penalty on weights is computed inside 'with engine.full_params():' after "
        "engine(...). Where activation checkpointing computes with it again, write engine.backward(loss) instead of"
        " loss.backward(), and use_reentrant=False for a weight that is used outside of it too."
    )


def sharded_gradient(name: str) -> str:
    """The error text for code that uses ``.grad`` of the module's parameter ``name`` where gradients are sharded."""
    return (
        f"gradient of {name!r}: this rank holds only a piece of it, the '.grad' of engine.step_tensors(); to clip by "
        "the norm, write engine.clip_grad_norm_(max_norm); what changes each element by itself, as "
        "torch.nn.utils.clip_grad_value_ or added noise does, takes engine.step_tensors() instead of "
        "model.parameters(); engine.zero_grad() clears gradients, and engine.full_gradients() returns them whole"
    )


class StubbedParameter(nn.Parameter):
    """What a parameter is while its data is a stub: the same object, which refuses to be computed with."""

    _shardlab_refusal: str
    _plain: type[nn.Parameter]

    @staticmethod
    def hide(param: nn.Parameter, text: str) -> None:
        """Let a parameter refuse, with this ``text``."""
        if not issubclass(type(param), StubbedParameter):  # isinstance() of a parameter calls Python
            param.__class__ = _stubbed(type(param))
        param._shardlab_refusal = text  # type: ignore[attr-defined]

    @staticmethod
    def show(param: nn.Parameter) -> None:
        """Let it be again what it was."""
        if issubclass(type(param), StubbedParameter):
            del param._shardlab_refusal  # type: ignore[attr-defined]  # or a copy would have it
            param.__class__ = param._plain  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Let all be asked and set but the data; refuse everything else."""
        name, is_gradient = getattr(func, "__name__", ""), getattr(func, "__self__", None) is Tensor.grad
        if func in _FREEZES or name in _OF_STUB or name == "__get__" or is_gradient:
            with torch._C.DisableTorchFunctionSubclass():
                answer = func(*args, **(kwargs or {}))
            if name != "__get__" or is_gradient or not isinstance(answer, Tensor):
                return answer
        raise _refusal((*args, *(kwargs or {}).values()), "a sharded parameter was used")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded parameter {tuple(self.shape)}"


@functools.cache
def _stubbed(kind: type[nn.Parameter]) -> type[StubbedParameter]:
    """A class of stubs of parameters of this class, which may be the user's."""
    return type(kind.__name__, (StubbedParameter, kind), {"_plain": kind})


def _refusal(given: Iterable[Any], otherwise: str) -> RuntimeError:
    """What the first stand-in among them says, or else."""
    # Functions such as torch.autograd.grad() take them in lists too.
    values = (value for some in given for value in (some if isinstance(some, list | tuple) else (some,)))
    stand_ins = (value for value in values if isinstance(value, StubbedParameter | PlaceholderGradient))
    texts = (getattr(value, "_shardlab_refusal", "") for value in stand_ins)  # a view of a gradient has none
    return RuntimeError(next(filter(None, texts), otherwise))


def refuse_loading(module: nn.Module, *_: Any) -> None:
    """A hook before a module loads a state dict; torch's own error would repeat that of each parameter.

    Raises:
        RuntimeError: its parameters are sharded.
    """
    if any(isinstance(param, StubbedParameter) for param in module._parameters.values()):
        raise RuntimeError(
            f"load_state_dict: parameters of the {type(module).__name__} are sharded; write "
            "engine.load_full_state_dict(state), or load inside 'with engine.full_params(keep_changes=True):'"
        )


class PlaceholderGradient(Tensor):
    """A gradient of which this rank holds only a piece."""

    _shardlab_refusal: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "PlaceholderGradient":
        """The placeholder for the gradient of ``param``: its shape, dtype and device, and no memory."""
        empty = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        empty.untyped_storage().resize_(0)
        made = empty.as_subclass(cls)
        made._shardlab_refusal = sharded_gradient(name)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer for metadata, refuse everything else."""
        if getattr(func, "__name__", "") in _OF_GRADIENT and getattr(func, "__self__", None) not in _VIEWS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise _refusal(args, sharded_gradient("a parameter"))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded gradient {tuple(self.shape)}"
