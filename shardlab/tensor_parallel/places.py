"""Where modules and parameters sit in a model, so that one that sits in several places is made or replaced in all."""

from collections.abc import Mapping
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from shardlab.meta_device import InitFn
from shardlab.partition.slices import SLICES
from shardlab.tensor_parallel.flow import is_layer
from shardlab.tensor_parallel.styles import OnSequence, Row, Style


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
                with a style is never called.
        """
        for name in styles:
            if is_layer(self._model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
                raise ValueError(
                    f"plan: {name!r} is inside of an nn.MultiheadAttention, whose forward calls none of its layers; "
                    "give it no style, or write an attention whose forward calls it"
                )
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
                style = styles.get(name)
                on_part = isinstance(style, Row) and style.sequence_dim is not None and key == "bias"
                if isinstance(style, OnSequence) or on_part:
                    raise ValueError(
                        f"plan: {key!r} of {name!r} is tied; a tied parameter cannot work on parts of the sequence, "
                        "so untie it"
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
        # A list, a closure or an object of the user's may still hold the plain layer, and go on to call it untrained.
        old.forward = partial(_refuse_replaced, type(old).__name__)
        old._parameters = dict.fromkeys(old._parameters)

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
            # In all its places, so that tied weights are made once and stay tied.
            for owner, key in self._of[param]:
                self._model.get_submodule(owner)._parameters[key] = made
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
        "modules still holds it (a list, a closure, an object of your own): read it from the model there"
    )
