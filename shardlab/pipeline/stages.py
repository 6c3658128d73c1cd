"""A model cut into stages: consecutive parts, each a module with the model's own names.

A model has parts if it is an ``nn.Sequential``, whose children they are, or has a method ``parts()``. That returns, in
the order in which forward runs them, each on the output of the one before, the name of each part (a module of the
model, or a method of it) and the modules and parameters that it uses:

    def parts(self):
        return {"embed": ("token_embedding",), "blocks.0": ("blocks.0",), "logits": ("final_norm", "head")}

A stage has its parameters under the whole model's names, so that checkpoints and tables do not depend on the cut.
"""

import copy
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from shardlab.partition.chunks import ParamSpec
from shardlab.partition.owners import assign_owners
from shardlab.vocabulary import Partition

Cut = tuple[tuple[str, ...], ...]
"""The names of the parts of each stage."""


def parts_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The parts of a model, in order, with the modules and parameters of each.

    Raises:
        ValueError: it does not say, or not in this way.
    """
    if callable(parts := getattr(model, "parts", None)):
        try:
            return {name: tuple(map(str, used)) for name, used in parts().items() if [attrgetter(name)(model)]}
        except (AttributeError, TypeError) as error:
            raise ValueError(f"model: parts() has to return a dict, of each part the names it uses; {error}") from error
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return {name: (name,) for name in model._modules}  # named_children() leaves out a module that is there twice
    raise ValueError(
        f"model: {type(model).__name__} does not say where it may be cut; give an nn.Sequential, or a model with a "
        "method parts() (notebooks/guide/pipeline.md)"
    )


def cut(model: nn.Module, num_stages: int, begins: Sequence[str] = (), costs: Mapping[str, float] | None = None) -> Cut:
    """Divide a model's parts into stages.

    Args:
        model: with parts.
        num_stages: how many.
        begins: the first part of each stage but the first; none: the largest stage has as few parameters as can be.
        costs: by part, such as measured seconds, instead of numbers of parameters.

    Raises:
        ValueError: there are fewer parts than stages, ``begins`` does not fit, a part has no cost, a parameter that
            trains is in no part, or the model has hooks of its own.
    """
    # Private: there is no public way to ask.
    if model._forward_pre_hooks or model._forward_hooks or model._backward_pre_hooks or model._backward_hooks:
        raise ValueError("model: it has hooks of its own, and stages call its parts alone; register them on a part")
    names = list(parts_of(model))
    used = {id(param) for _, param in params_of(model, names)}
    if left := [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in used]:
        raise ValueError(f"model: {left[0]!r} is in no part; name in parts() all that forward runs, and what each uses")
    if not 1 <= num_stages <= len(names):
        raise ValueError(f"stages: {num_stages} of a model with {len(names)} parts; give 1 to {len(names)}")
    if begins:
        places = [names.index(name) if name in names else -1 for name in begins]
        if len(places) != num_stages - 1 or places != sorted(set(places) - {-1, 0}):
            wanted = f"{num_stages - 1} of {', '.join(names[1:])}, in this order"
            raise ValueError(f"begins: {', '.join(begins)} cannot begin the stages behind the first; give {wanted}")
        return _from(places, names)
    if costs is None:
        costs = {name: sum(param.numel() for _, param in params_of(model, [name])) for name in names}
    if missing := [name for name in names if not 0 <= costs.get(name, -1) < inf]:
        raise ValueError(f"costs: part {missing[0]!r} has none from 0; give one for each of {', '.join(names)}")
    unit = (max(costs.values()) or 1) / 1e9
    specs = [ParamSpec(name, (round(costs[name] / unit),), 1) for name in names]
    owners = assign_owners(specs, num_stages, Partition.CONTIGUOUS)
    return _from([bisect_left(owners, stage) for stage in range(1, num_stages)], names)


def _from(places: Iterable[int], names: Sequence[str]) -> Cut:
    return tuple(tuple(names[first:stop]) for first, stop in pairwise([0, *places, len(names)]))


def params_of(model: nn.Module, parts: Iterable[str]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that some parts of a model use, by all of their names."""
    kept = [path for part in parts for path in parts_of(model)[part]]
    return [pair for pair in model.named_parameters(remove_duplicate=False) if any(_is_in(pair[0], at) for at in kept)]


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(path + ".")


def module_of(model: nn.Module, stages: Mapping[int, Sequence[str]], borrowed: Sequence[str] = ()) -> nn.Module:
    """Some stages of a model as one module, which shares the model's parameters; call it with a stage and its input.

    Args:
        model: with parts; it stays as it is.
        stages: the names of the parts of each.
        borrowed: parameters that are left out; before it is called, ``lend`` puts tensors in their place.
    """
    parts = parts_of(model)
    kept = {path for names in stages.values() for name in names for path in parts[name]}
    module = _with_only(model, kept, borrowed, "")
    # Or it would hold itself, and its parameters would stay until cycles are collected.
    itself: Any = weakref.ref(module)

    def forward(*given: Any, **named: Any) -> Any:
        if named or len(given) != 2 or given[0] not in stages:
            raise ValueError("model: these are stages of one; call pipeline.run(engine, loss_fn, inputs, targets)")
        return reduce(lambda value, name: reduce(getattr, name.split("."), itself())(value), stages[given[0]], given[1])

    object.__setattr__(module, "forward", forward)
    return module


def lend(module: nn.Module, names: Iterable[str], value: Tensor | None) -> None:
    """Put a tensor in the places of a parameter that was left out; None takes it away."""
    for path, _, last in (name.rpartition(".") for name in names):
        vars(module.get_submodule(path))[last] = value


def _with_only(module: nn.Module, kept: Iterable[str], borrowed: Sequence[str], prefix: str) -> nn.Module:
    """A copy of a module that has only some of the modules, parameters and buffers inside it, which it shares."""
    twin = copy.copy(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        own: dict[str, nn.Module | Tensor | None] = {}
        for name, value in vars(module)[kind].items():
            path = prefix + name
            is_kept = any(_is_in(path, other) for other in kept)
            if is_kept and not any(_is_in(other, path) for other in borrowed):
                own[name] = value
            elif isinstance(value, nn.Module) and (is_kept or any(_is_in(other, path) for other in kept)):
                own[name] = _with_only(value, kept, borrowed, path + ".")
        object.__setattr__(twin, kind, own)
    return twin
