"""How a script is observed: by torch's global hooks, and by replacing six torch functions while it is recorded.

Modules: the outermost module that is called under gradients and has trainable parameters is a root; what a root wraps,
as DistributedDataParallel does, counts as the root when it is called by itself (in an evaluation). To find roots,
a global hook sees every call of a module (``register_module_forward_pre_hook``), but only until a step has shown no new
optimizer: from then on only the roots' own hooks remain, since the global one costs microseconds at every call.
Units: they have hooks in watched steps only.
Optimizers: ``register_optimizer_step_pre_hook`` and its counterpart.
Backward, clipping, the scaler and the loader have no global hook, so ``torch.autograd.backward`` (which
``loss.backward()`` calls), what ``clip_grad_norm_`` computes the norm by, ``GradScaler.scale``, ``GradScaler.update``,
and what ``iter()`` and ``next()`` of a DataLoader call are replaced. Not seen: ``torch.autograd.grad``, norms that are
computed in another way, and loaders that are none of torch's.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter  # private: a public iterator of another class is none
from torch.utils.hooks import RemovableHandle

from shardlab.engines.guards.ownership import engine_of
from shardlab.engines.plain_mode import nothing
from shardlab.recording.inferred_loop import Loop, scalars
from shardlab.recording.script_tensors import ScriptTensors
from shardlab.trace.units import SpanSink, watch_module, watched_modules

_UNSCALED = "_shardlab_unscaled"  # on a scaled loss: the loss itself


class Hooks:
    """Tells ``loop`` what the script does, and ``tensors`` which modules and optimizers it has.

    Args:
        loop: of this rank.
        tensors: gets them.
        sink: gets the spans of the units.
    """

    def __init__(self, loop: Loop, tensors: ScriptTensors, sink: SpanSink) -> None:
        self._loop, self._tensors, self._sink = loop, tensors, sink
        self._stack = contextlib.ExitStack()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the roots, and what is inside a wrapper
        self._outermost: nn.Module | None = None
        self._call: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # of the outermost module
        self._stepping: list[torch.optim.Optimizer] = []
        self._in_backward = False
        self._units: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # their names
        self._on_units: contextlib.ExitStack | None = None  # while they are watched
        self._looking: RemovableHandle | None = None
        self._saw_new_optimizer = False

    def __enter__(self) -> "Hooks":
        """Begin to listen."""
        self._look()
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        # Private: scripts that import ``clip_grad_norm_`` by name have it from before.
        self._stack.enter_context(replaced(clip_grad, "_get_total_norm", self._around_norm))
        scaler = torch.amp.GradScaler
        self._stack.enter_context(replaced(torch.autograd, "backward", self._around_backward))
        self._stack.enter_context(replaced(scaler, "scale", _around_scale))
        self._stack.enter_context(replaced(scaler, "update", self._around_update))
        # The first starts workers at each epoch, the second waits for them.
        self._stack.enter_context(replaced(DataLoader, "__iter__", self._around_fetch))
        self._stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._around_fetch))
        return self

    def __exit__(self, *_: object) -> None:
        """Take all hooks away."""
        self._stack.close()

    def watch_units(self, *, on: bool) -> None:
        """Watch the units of all roots, also of those that are found later, or no longer."""
        if on and self._on_units is None:
            self._on_units = self._stack.enter_context(contextlib.ExitStack())
            self._hook_units(self._units)
        elif not on and self._on_units is not None:
            self._on_units.close()
            self._on_units = None

    def _hook_units(self, units: Mapping[nn.Module, str]) -> None:
        if self._on_units is not None:
            for unit, name in units.items():
                _own(watch_module(name, unit, self._sink), self._on_units)

    def _look(self) -> None:
        if self._looking is None:
            self._looking = register_module_forward_pre_hook(self._found)
            self._stack.callback(self._looking.remove)

    def _look_no_longer(self) -> None:
        if self._looking is not None:
            self._looking.remove()
            self._looking = None

    @property
    def _is_inside(self) -> bool:
        """Whether a module that is called now is a part: of a forward, or of what backward computes again."""
        return self._outermost is not None or self._in_backward

    def _found(self, module: nn.Module, args: Any) -> None:
        # First: inside torch.compile the hook is traced, and must leave nothing behind.
        if torch.compiler.is_compiling() or self._is_inside or not torch.is_grad_enabled():
            return
        if module in self._watched or not any(param.requires_grad for param in module.parameters()):
            return
        if (engine := engine_of(module)) is not None:
            raise ValueError(
                f"record: shardlab's engine {engine.name!r} trains the module, which has a recorder of its own; write "
                "the loop with shardlab.TrainStep and that recorder, or use shardlab compare"
            )
        self._watch(module)
        # Torch has listed the hooks of this call already; what is given by name, only they are told.
        self._before_forward(module, args, {})

    def _watch(self, root: nn.Module) -> None:
        self._tensors.roots.add(root)
        for module in _wrapped(root):
            if module in self._watched:
                continue
            self._watched.add(module)
            # In front of the hooks that are there: what they send, FSDP2's gathers for example, belongs to the forward.
            hooks = (
                module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after_forward, always_call=True),
            )
            _own(hooks, self._stack)
        if not any(_is_compiled(module) for module in root.modules()):
            units = {unit: name for name, unit in watched_modules(inside(root)).items()}
            self._units.update(units)
            self._hook_units(units)

    def _before_forward(self, root: nn.Module, args: Any, named: Any) -> None:
        if torch.compiler.is_compiling() or self._is_inside:
            return
        self._outermost = root
        trains = torch.is_grad_enabled()
        self._call = self._loop.forward(root, (args, named)) if trains else self._loop.evaluation()
        self._call.__enter__()

    def _after_forward(self, root: nn.Module, *_: Any) -> None:
        if self._outermost is root and not torch.compiler.is_compiling():
            self._outermost = None
            self._call.__exit__(None, None, None)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            rate = optimizer.param_groups[0].get("lr", nan)
            on_host = not isinstance(rate, Tensor) or rate.device.type == "cpu"  # reading another would wait for it
            trains = len(args) > 1 or kwargs.get("closure") is not None
            self._loop.optimizer_begins(optimizer, float(rate) if on_host else nan, trains=trains)
        self._stepping.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._saw_new_optimizer |= optimizer not in self._tensors.optimizers
        self._tensors.optimizers.add(optimizer)
        while self._stepping and self._stepping.pop() is not optimizer:
            pass  # drop optimizers stepped inside this one whose step raised
        if not self._stepping:
            self._loop.optimizer_ends()
            # A new optimizer may step modules that have not been seen: look at the next step too.
            (self._look if self._saw_new_optimizer else self._look_no_longer)()
            self._saw_new_optimizer = False

    def _around_backward(self, plain: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._in_backward:  # reentrant checkpointing calls it inside a backward
            return plain(tensors, *args, **kwargs)
        self._in_backward = True
        try:
            with self._loop.backward(scalars(getattr(tensors, _UNSCALED, tensors))):
                return plain(tensors, *args, **kwargs)
        finally:
            self._in_backward = False

    def _around_norm(self, plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        norm = plain(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self._loop.clipped(scalars(norm))
        return norm

    def _around_fetch(self, plain: Callable[..., Any], loader: Any) -> Any:
        with self._loop.fetch():
            return plain(loader)

    def _around_update(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        self._loop.scaler_updated()


class _OwnHook:
    """A hook that does nothing in a copied or unpickled module."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._hook(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial, (nothing,)


def _own(hooks: Iterable[RemovableHandle], stack: contextlib.ExitStack) -> None:
    """Turn these hooks into ones that do nothing in a copy of the module; the stack removes them."""
    for hook in hooks:
        table: Any = hook.hooks_dict_ref()  # of the module that has the hook
        table[hook.id] = _OwnHook(table[hook.id])
        stack.callback(hook.remove)


def _around_scale(plain: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = plain(scaler, outputs)
    if isinstance(outputs, Tensor) and scaled is not outputs:
        setattr(scaled, _UNSCALED, outputs.detach())
    return scaled


@contextlib.contextmanager
def replaced(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``owner.name(...)`` is ``around(owner.name, ...)``."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(plain, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def inside(root: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel and the like."""
    while isinstance(root, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(root, "_orig_mod"):
        wrapped = root.module if hasattr(root, "module") else root._orig_mod
        assert isinstance(wrapped, nn.Module)
        root = wrapped
    return root


def _wrapped(root: nn.Module) -> Iterator[nn.Module]:
    """The root and what it wraps: each module inside has all that trains, as DDP's ``module``, and may be evaluated."""
    module: nn.Module | None = root
    while module is not None:
        yield module
        trained = {id(param) for param in module.parameters() if param.requires_grad}
        # Not inside a compiled one: a hook there would cut its graph.
        children = () if _is_compiled(module) else module.children()
        module = next((child for child in children if trained <= set(map(id, child.parameters()))), None)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile traces it: then hooks in it would cut its graph."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
