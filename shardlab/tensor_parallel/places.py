"""Where modules and parameters sit in a model, so that one that sits in several places is made or replaced in all."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from shardlab.meta_device import InitFn
from shardlab.partition.slices import SLICES
from shardlab.tensor_parallel.styles import OnSequence, Row, Scatter, Style

_CONTAINERS = (list, tuple, set, frozenset, deque, dict)


class Places:
    """The places of every parameter of a model, as they are when this object is made.

    Args:
        model: the plain one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        held: dict[nn.Parameter, list[tuple[str, str]]] = {}
        for name, module in model.named_modules():
            for key, param in module._parameters.items():
                if param is not None:
                    held.setdefault(param, []).append((name, key))
        self._tied = [together for together in held.values() if len(together) > 1]
        # Only those without memory, which ``make`` replaces: others are to be freed as soon as they are divided.
        self._of = {param: together for param, together in held.items() if param.is_meta}

    def check(self, styles: Mapping[str, Style]) -> None:
        """Refuse tied weights that a plan would separate, and gradients that it would sum twice.

        Raises:
            ValueError: one of the modules of a tied weight has a style, another has none; a replicated parameter on
                parts of the sequence is tied, or is in a module with a style inside one that is ``OnSequence``; a layer
                with a style is never called, or is held where it cannot be replaced.
        """
        self._check_calls(styles)
        for name in (name for name, style in styles.items() if isinstance(style, OnSequence)):
            if inside := [other for other in styles if other.startswith(f"{name}.")]:
                raise ValueError(
                    f"plan: {name!r} is OnSequence with all that it holds; give {inside[0]!r} no style of its own"
                )
        for together in self._tied:
            styled = [name for name, _ in together if name in styles]
            plain = [name for name, _ in together if name not in styles]
            if styled and plain:
                raise ValueError(
                    f"plan: {styled[0]!r} has a style, and {plain[0]!r}, whose weight is tied to it, has none; give "
                    "both one, or untie them"
                )
            for name, key in together:
                if _is_summed(styles.get(name), key):
                    raise ValueError(
                        f"plan: {key!r} of {name!r} is tied; a tied parameter cannot work on parts of the sequence, "
                        "so untie it"
                    )

    def _check_calls(self, styles: Mapping[str, Style]) -> None:
        """Refuse layers that are never called, and those whose plain form would go on to be called."""
        styled = {self._model.get_submodule(name): name for name in styles}
        for owner_name, owner in self._model.named_modules():
            for key, child in owner.named_children() if isinstance(owner, nn.MultiheadAttention) else ():
                if child in styled and _never_calls(owner, key):
                    raise ValueError(
                        f"plan: {styled[child]!r} is inside of an nn.MultiheadAttention, whose forward calls none of "
                        "its layers; give it no style, or write an attention whose forward calls it"
                    )
            for key, module in _held_apart(owner):
                # Modules with these styles stay what they are.
                if module in styled and not isinstance(styles[styled[module]], OnSequence | Scatter):
                    attribute = f"{owner_name}.{key}" if owner_name else key
                    raise ValueError(
                        f"plan: {styled[module]!r} is also held in {attribute!r}, which torch does not search for "
                        "modules and which would keep the plain layer; use an nn.ModuleList or nn.ModuleDict there"
                    )

    def replace(self, old: nn.Module, new: nn.Module) -> None:
        """Put ``new`` wherever ``old`` is."""
        if new is old:
            return
        new.train(old.training)  # a new module is in training mode, whatever the old one was in
        for owner in self._model.modules():
            for key, child in owner._modules.items():
                if child is old:
                    owner._modules[key] = new
        # A closure or an object of the user's may still hold the plain layer, and go on to call it untrained.
        old.forward = partial(_refuse_replaced, type(old).__name__)
        old._parameters = dict.fromkeys(old._parameters)

    def put(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put the parameter ``new`` wherever ``old``, on the meta device, was."""
        for name, key in self._of[old]:
            self._model.get_submodule(name)._parameters[key] = new

    def make(self, name: str, module: nn.Module, device: torch.device, init_fn: InitFn) -> None:
        """Make the parameters that ``module`` itself holds on the meta device, and fill them.

        Raises:
            ValueError: a buffer is on the meta device, and nothing says what it shall hold.
        """
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ValueError(f"model: buffer {key!r} of {name!r} is on the meta device; make buffers on the device")
        meta = [param for param in module._parameters.values() if param is not None and param.is_meta]
        for param in meta:
            made = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            self.put(param, made)  # in all its places, so that tied weights are made once and stay tied
        if meta:
            with torch.no_grad():
                init_fn(name, module)

    def tie(self) -> None:
        """Tie the slices of tied weights again: one parameter in all places.

        Raises:
            ValueError: they are different slices.
        """
        for (first, first_key), *others in self._tied:
            module = self._model.get_submodule(first)
            for name, key in others:
                other = self._model.get_submodule(name)
                if getattr(module, SLICES, {}).get(first_key) != getattr(other, SLICES, {}).get(key):
                    raise ValueError(
                        f"plan: the tied weights of {first!r} and {name!r} would be sliced differently; give both "
                        "the same slices"
                    )
                other._parameters[key] = module._parameters[first_key]


def _refuse_replaced(kind: str, *_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        f"a plain {kind} was called that parallelize_module has replaced; something that torch does not search for "
        "modules still holds it (a closure, a functools.partial, an object of your own): read it from the model there"
    )


def _never_calls(attention: nn.MultiheadAttention, key: str) -> bool:
    """Whether it computes by torch's forward, which calls no layer: its own, or the one that its own hands on to.

    Only where that is sure: a forward may call a layer in many ways that its code does not show.
    """
    kinds = type(attention).__mro__
    before = kinds[: kinds.index(nn.MultiheadAttention)]
    own = [vars(kind)["forward"] for kind in before if "forward" in vars(kind)]
    return "forward" not in vars(attention) and all(_hands_on(forward, key) for forward in own)


def _hands_on(forward: object, key: str) -> bool:
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return {"super", "forward"} <= set(names) and key not in names


def _held_apart(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in an owner's plain attributes, also deep in lists, tuples, sets and dicts, by the attribute's name."""
    for key, value in vars(owner).items():
        seen: set[int] = set()
        ahead: list[Collection[object]] = [] if key == "_modules" else [(value,)]
        for container in ahead:  # which grows
            held = container.values() if isinstance(container, dict) else container
            # A vocabulary has millions of entries: the kinds of all are known at once, and mostly are no more to see.
            if not any(issubclass(kind, (nn.Module, *_CONTAINERS)) for kind in set(map(type, held))):
                continue
            for entry in held:
                if isinstance(entry, nn.Module):
                    yield key, entry
                elif isinstance(entry, _CONTAINERS) and id(entry) not in seen:
                    seen.add(id(entry))  # a container may hold itself
                    ahead.append(entry)


def _is_summed(style: Style | None, key: str) -> bool:
    on_part = isinstance(style, Row) and style.sequence_dim is not None and key == "bias"
    return isinstance(style, OnSequence) or on_part
