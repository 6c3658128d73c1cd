"""Placeholders for tensors of which this rank holds only a piece: they have shape and dtype, and refuse to be used.

A parameter that is sharded and not gathered has no data on this rank. Three tensors stand for it then. The module has a
placeholder, which answers for shape, dtype, device and name, and refuses every computation with an error that names the
parameter. The parameter itself stays in ``engine.params``, since hooks and autograd's version are on it;
its data is a stub, one NaN expanded to the whole shape. So that nobody computes with that who has kept the parameter
elsewhere (in a list, a closure, a partial), it is a ``StubbedParameter`` meanwhile, which refuses the same. The
optimizer steps the piece that this rank keeps.

Where parameters are whole and their mean gradients are in pieces, ``param.grad`` would be None. Code that reads it,
such as ``torch.nn.utils.clip_grad_norm_``, would silently do nothing. So ``param.grad`` is a placeholder too. It holds
no memory, and is removed before autograd accumulates into ``param.grad``. If other code has removed it, which in plain
torch means "clear this gradient", ``check`` raises.
"""

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm.trees import map_tensors
from shardlab.engines.hooks import gradient_node
from shardlab.vocabulary import dtype_name

_OF_PARAMETER = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex"}
)
# Answered as of the gathered parameter. Of the placeholder itself the device is meta, and what a user makes there is
# silently computed with as memory without values: torch multiplies by it, and indexes with it.
_AS_GATHERED = (Tensor.device, Tensor.is_cpu, Tensor.is_cuda, Tensor.is_meta, Tensor.dtype, Tensor.requires_grad)
_FREEZES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]  # a bool in torch's stubs
_OF_STUB = _OF_PARAMETER - {"__get__"} | {
    "data_ptr", "untyped_storage", "storage_offset", "is_contiguous", "get_device", "register_hook",
    "register_post_accumulate_grad_hook", "__hash__",
}  # fmt: skip
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_WRITES = frozenset({"__set__", "__setitem__"})
_READS = frozenset({"__get__", "detach", "clone", "numpy", "tolist", "item", "__array__", "__reduce_ex__"})
_OF_GRADIENT = frozenset({"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "untyped_storage"})
_VIEWS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)
_MOVES = (Tensor.data.__set__, torch._has_compatible_shallow_copy_type)  # type: ignore[attr-defined]
_CONVERT = frozenset({"to", "float", "double", "half", "bfloat16", "cpu", "cuda"})  # as module.to() does to gradients


def sharded_parameter(name: str, use: str = "") -> str:
    """What to write instead where a sharded parameter is used.

    Args:
        name: the parameter's.
        use: the function of torch that it was given to, if it has an advice of its own.
    """
    if use in _HOOKS:
        advice = "register its hooks before the engine is built"
    elif use in _CONVERT:
        advice = (
            "convert the module before the engine is built, or leave it as it is and compute in fewer bits with "
            "precision='bf16'; its values are there inside 'with engine.full_params():'"
        )
    elif use in _WRITES or (use.endswith("_") and not use.startswith("__")):
        advice = (
            "write inside 'with engine.full_params(keep_changes=True):', into parameters asked of the module there, or "
            "use engine.load_full_state_dict(state)"
        )
    elif use in _READS:
        advice = (
            "read or copy it, or its module, inside 'with engine.full_params():' (to write, with keep_changes=True), "
            "or take engine.full_state_dict(), which returns copies"
        )
    else:
        advice = (
            "in a forward, compute with it in the module that holds it, called inside engine(...), or choose larger "
            "FSDP units, as wrap='root', also for engine.call(function, ...); elsewhere, as for a penalty on weights "
            "(after engine(...)), compute inside 'with engine.full_params():' with parameters asked of the module "
            "there; a weight used both inside and outside activation checkpointing needs use_reentrant=False there"
        )
    return f"parameter {name!r} is sharded: this rank holds only its shard; {advice}"


def sharded_gradient(name: str) -> str:
    """The error text for code that uses ``.grad`` of the module's parameter ``name`` where gradients are sharded."""
    return (
        f"gradient of {name!r}: this rank holds only a piece of it, the '.grad' of engine.step_tensors(); to clip by "
        "the norm, write engine.clip_grad_norm_(max_norm); what changes each element by itself, as "
        "torch.nn.utils.clip_grad_value_ or added noise does, takes engine.step_tensors() instead of "
        "model.parameters(); engine.zero_grad() clears gradients, and engine.full_gradients() returns them whole"
    )


class PlaceholderParameter(nn.Parameter):
    """A parameter of which this rank holds only a shard."""

    # What it stands for, which is frozen and unfrozen with it. Tensor parallelism, which cannot import this class,
    # looks for an attribute of this name, so it must be one that no parameter of a user's has.
    _shardlab_param: nn.Parameter
    _shardlab_name: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "PlaceholderParameter":
        """The placeholder of ``param``, with its shape, dtype and requires_grad."""
        made: PlaceholderParameter = cls(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        made._shardlab_param, made._shardlab_name = param, name
        return made

    @property  # type: ignore[explicit-override]  # mypy misses @override on a property with a setter
    @override
    def grad(self) -> NoReturn:
        """Always refused: torch's clipping would take None for "has no gradient" and clip nothing."""
        raise RuntimeError(sharded_gradient(self._shardlab_name))

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        raise RuntimeError(sharded_gradient(self._shardlab_name))

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer for metadata, freeze and unfreeze, refuse everything else."""
        if func in _FREEZES:
            # The parameter at once, and not when it is gathered: whether its gradient is due is asked before that, and
            # where only some ranks have gathered it, they would not agree.
            func(args[0]._shardlab_param, *args[1:], **(kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name = getattr(func, "__name__", "")
        if name == "get_device" or getattr(func, "__self__", None) in _AS_GATHERED:
            return func(args[0]._shardlab_param)
        if name in _OF_PARAMETER:
            answer = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            # Getters of attributes are all called __get__, and .data, .T and others return what can be computed with.
            if not isinstance(answer, Tensor):
                return answer
        raise _refusal(func, (*args, *(kwargs or {}).values()))

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded parameter {tuple(self.shape)}"


class StubbedParameter(nn.Parameter):
    """What a parameter is while its data is a stub: the same object, which refuses to be computed with."""

    _shardlab_name: str
    _plain: type[nn.Parameter]

    @staticmethod
    def hide(param: nn.Parameter, name: str) -> None:
        """Let a parameter refuse."""
        if not isinstance(param, StubbedParameter):
            param.__class__ = _stubbed(type(param))
        param._shardlab_name = name  # type: ignore[attr-defined]

    @staticmethod
    def show(param: nn.Parameter) -> None:
        """Let it be again what it was."""
        if isinstance(param, StubbedParameter):
            del param._shardlab_name  # or a copy would have it
            param.__class__ = param._plain  # type: ignore[assignment]

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Let all be asked and set but the data; refuse everything else."""
        of = getattr(func, "__self__", None)
        if func in _FREEZES or getattr(func, "__name__", "") in _OF_STUB or (of is Tensor.grad):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if getattr(func, "__name__", "") == "__get__":
            answer = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if not isinstance(answer, Tensor):
                return answer
        raise _refusal(func, (*args, *(kwargs or {}).values()))

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded parameter {tuple(self.shape)}"


@functools.cache
def _stubbed(kind: type[nn.Parameter]) -> type[StubbedParameter]:
    """A class of stubs of parameters of this class, which may be the user's."""
    return type(kind.__name__, (StubbedParameter, kind), {"_plain": kind})


def _refusal(func: Callable[..., Any], given: Iterable[Any]) -> RuntimeError:
    # Functions such as torch.autograd.grad() take them in lists too.
    values = (value for some in given for value in (some if isinstance(some, list | tuple) else (some,)))
    used = next((value for value in values if isinstance(value, PlaceholderParameter | StubbedParameter)), None)
    if used is None:
        return RuntimeError("a sharded parameter was used")
    use = getattr(func, "__name__", "")
    if use in ("__get__", "__set__") and getattr(func, "__self__", None) is not Tensor.data:
        use = ""
    return RuntimeError(sharded_parameter(used._shardlab_name, use))


def is_at(param: Tensor, view: Tensor) -> bool:
    """Whether a parameter's data is still the engine's ``view``, and not what the user has put there by ``.data =``."""
    same = param.shape == view.shape and param.stride() == view.stride()
    return same and (not view.numel() or param.data_ptr() == view.data_ptr())


def check_replaced(param: nn.Parameter, view: Tensor, name: str) -> None:
    """Check what the user has put in the place of ``view``.

    Raises:
        RuntimeError: it has another shape, dtype or device.
    """
    if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"parameter {name!r}: its data was replaced by {tuple(param.shape)} of {dtype_name(param.dtype)} on "
            f"{param.device}, and the engine keeps {tuple(view.shape)} of {dtype_name(view.dtype)} on {view.device}; "
            "convert the module before the engine is built"
        )


def without_parameters(output: Any, params: Container[Tensor]) -> Any:
    """The output of a forward with copies in place of parameters, which are resharded when it has ended."""
    return map_tensors(
        lambda tensor: tensor.clone() if isinstance(tensor, nn.Parameter) and tensor in params else tensor, output
    )


class ParameterSites:
    """All attributes of a module that hold one parameter: several if weights are tied."""

    def __init__(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self._name, self._param = name, param
        self.shape = tuple(param.shape)
        # All of them: where a tied weight is left out, forward would compute with the stub of a resharded parameter.
        self._sites = [
            (owner, attribute)
            for owner in module.modules()
            for attribute, found in owner._parameters.items()
            if found is param
        ]
        self._placeholder = PlaceholderParameter.of(name, param)

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that have it."""
        return [owner for owner, _ in self._sites]

    def check(self) -> None:
        """Find out whether the user has put another parameter into the module.

        Raises:
            RuntimeError: an attribute has something else than the parameter or its placeholder.
        """
        for owner, attribute in self._sites:
            found = owner._parameters.get(attribute)
            if found is not self._param and found is not self._placeholder:
                raise RuntimeError(
                    f"parameter {self._name!r}: {attribute!r} of the {type(owner).__name__} was replaced, and the "
                    "engine trains the one that was there; copy values into that inside 'with engine.full_params("
                    "keep_changes=True):', or engine.close() and build another engine; torch.func.functional_call, "
                    "which puts others there for one call, needs wrap='root'"
                )

    def put_parameter(self) -> None:
        """Put the parameter itself into the module, to be computed with wherever it is."""
        StubbedParameter.show(self._param)
        self._put(self._param)

    def put_placeholder(self) -> None:
        """Put the placeholder into the module; where the parameter is kept elsewhere, it refuses too."""
        StubbedParameter.hide(self._param, self._name)
        self._put(self._placeholder)

    def _put(self, value: nn.Parameter) -> None:
        for owner, attribute in self._sites:
            # What the user has put there stays: closing the engine must not take it away.
            if owner._parameters.get(attribute) is self._param or owner._parameters.get(attribute) is self._placeholder:
                owner._parameters[attribute] = value


def refuse_loading(module: nn.Module, *_: Any) -> None:
    """A hook before a module loads a state dict.

    Raises:
        RuntimeError: its parameters are sharded.
    """
    if any(isinstance(param, PlaceholderParameter) for param in module._parameters.values()):
        raise RuntimeError(
            f"load_state_dict: parameters of the {type(module).__name__} are sharded: this rank holds only its shards; "
            "write engine.load_full_state_dict(state), or load inside 'with engine.full_params(keep_changes=True):'"
        )


def sites_of(module: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, ParameterSites]:
    """The sites of each parameter, by name."""
    return {name: ParameterSites(module, name, param) for name, param in params.items()}


class PlaceholderGradient(Tensor):
    """A gradient of which this rank holds only a piece.

    Attributes:
        refusal: the error text.
    """

    refusal: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "PlaceholderGradient":
        """The placeholder for the gradient of ``param``: its shape, dtype and device, and no memory."""
        return cls._without_memory(sharded_gradient(name), param, param.shape)

    @classmethod
    def _without_memory(cls, refusal: str, like: Tensor, shape: torch.Size) -> "PlaceholderGradient":
        empty = torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)
        empty.untyped_storage().resize_(0)
        made = empty.as_subclass(cls)
        made.refusal = refusal
        return made

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer for metadata, let a module be converted, refuse everything else."""
        name = getattr(func, "__name__", "")
        if name in _CONVERT:
            # Asked of one element, since this tensor has no memory to read.
            like = func(torch.zeros((), dtype=args[0].dtype, device=args[0].device), *args[1:], **(kwargs or {}))
            return cls._without_memory(args[0].refusal, like, args[0].shape)
        is_view = getattr(func, "__self__", None) in _VIEWS
        if (name in _OF_GRADIENT and not is_view) or func in _MOVES:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = (value for some in args for value in (some if isinstance(some, list | tuple) else (some,)))
        refusals = (getattr(value, "refusal", None) for value in given if isinstance(value, PlaceholderGradient))
        raise RuntimeError(next((text for text in refusals if text), sharded_gradient("a parameter")))

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"sharded gradient {tuple(self.shape)}"


class PlaceholderGradients:
    """The placeholder gradients of an engine's parameters.

    Args:
        params: whole parameters by name.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = dict(params)
        self._placeholders = {name: PlaceholderGradient.of(name, param) for name, param in params.items()}
        self._placed: set[str] = set()
        self._hooks = [_before_gradient(self, name, param) for name, param in params.items() if _can_train(param)]

    def place(self, names: Iterable[str]) -> None:
        """Set ``.grad`` of parameters to a placeholder, where they are trainable: their gradients are elsewhere."""
        for name in names:
            param = self._params[name]
            if param.requires_grad:
                if self._placeholders[name].dtype != param.dtype:
                    # Rounded since construction, or inside full_params(); torch wants equal dtypes.
                    self._placeholders[name] = PlaceholderGradient.of(name, param)
                param.grad = self._placeholders[name]
                self._placed.add(name)

    def take_away(self) -> None:
        """Remove all: another backward follows, or the gradients are cleared."""
        # Over a copy, since ``lift()`` takes the name out of the set.
        for name in tuple(self._placed):
            self.lift(name)

    def lift(self, name: str) -> None:
        """Remove one: the parameter gets a gradient of its own, to be added to the mean."""
        # Only ours: a gradient that is there was accumulated in no_sync(), and is still to be sent.
        if isinstance(self._params[name].grad, PlaceholderGradient):
            self._params[name].grad = None
        self._placed.discard(name)

    @property
    def gone(self) -> list[str]:
        """Where other code has cleared or set the gradient."""
        return [name for name in self._placed if not isinstance(self._params[name].grad, PlaceholderGradient)]

    def check(self) -> None:
        """Find out whether other code has cleared or set gradients without the engine.

        Raises:
            RuntimeError: a placeholder is gone.
        """
        for name in self.gone:
            raise RuntimeError(
                f"gradient of {name!r}: it was set or cleared at the parameter (by a submodule's zero_grad() or by "
                "'.grad ='), but the mean is in engine.step_tensors(); write engine.zero_grad()"
            )

    def close(self) -> None:
        """Leave the parameters plain."""
        self.take_away()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _can_train(param: nn.Parameter) -> bool:
    return param.is_floating_point()


def _accumulates_into(param: nn.Parameter) -> bool:
    """Whether this backward does: ``torch.autograd.grad`` calls the same hooks and accumulates nothing."""
    try:
        # Private: there is no public way to ask. The answer itself does not count, since the parameter may have another
        # node by now; but torch has none where torch.autograd.grad was called for this very parameter.
        torch._C._will_engine_execute_node(gradient_node(param))
    except RuntimeError:
        return False
    return True


def _before_gradient(owner: PlaceholderGradients, name: str, param: nn.Parameter) -> Any:
    """A hook that runs before autograd accumulates."""
    # Weakly, as in ``gradients``: torch holds hooks in C++, where Python's collector sees no cycles.
    reference = weakref.ref(owner)

    def lift(_: Tensor) -> None:
        placeholders = reference()
        if placeholders is not None and name in placeholders._placed and _accumulates_into(placeholders._params[name]):
            placeholders.lift(name)

    frozen = not param.requires_grad
    param.requires_grad_(True)  # torch takes the hook only then, and the parameter may be unfrozen later
    hook = param.register_hook(lift)
    param.requires_grad_(not frozen)
    return hook
