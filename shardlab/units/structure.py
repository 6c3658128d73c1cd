"""What the structure of a module says: which modules are called, and which of them repeat.

A block is a module with modules inside that have parameters; a layer has none inside. Siblings repeat, at any depth,
if they are

- the entries of a ``ModuleList``;
- blocks of one class in a ``Sequential``;
- blocks whose names differ only in a number, such as ``down1`` and ``down2``, if at least two are of one class; in a
  ``ModuleDict`` layers too;
- blocks of one class in a ``ModuleDict`` inside which nothing repeats: two towers with layers are not two blocks.

The outermost repetition counts: a transformer gives its layers, and not the heads or experts inside them. A list, a
dict or a ``Sequential`` that repeats only groups what repeats inside it: the stages of a ResNet give their blocks.
"""

import re
from collections import Counter
from collections.abc import Iterable

from torch import nn

Modules = dict[str, nn.Module]
Classes = dict[str, type[nn.Module]]


def called_modules(module: nn.Module) -> Modules:
    """The modules inside ``module`` that have parameters and are called, by name, outer before inner.

    No hook runs for others. A ``ModuleList`` or ``ParameterDict`` has no forward, and torch's attention reads the
    weights of the projection inside it without calling that.
    """
    attentions = [child for child in module.modules() if isinstance(child, nn.MultiheadAttention)]
    only_read = {inner for attention in attentions for inner in attention.children()}
    return {
        name: child
        for name, child in module.named_modules()
        if child is not module and is_called(child) and _has_params(child) and child not in only_read
    }


def is_called(module: nn.Module) -> bool:
    """Whether it has a forward."""
    return type(module).forward is not nn.Module.forward


def numel(modules: Iterable[nn.Module]) -> int:
    """Elements of the parameters of all of them, tied ones once."""
    return sum(param.numel() for param in {param for module in modules for param in module.parameters()})


def repeated_modules(module: nn.Module) -> list[nn.Module]:
    """The units of a module by its structure; some of them may never be called.

    Its repeated blocks; the layers of one class in a ``Sequential``, where they hold most of the parameters; without
    either, its children, or those of the only child that it wraps.
    """
    blocks = _blocks(module)
    layers = _layers(module, set(blocks))
    if 2 * numel(layers) > numel([module]):
        blocks += layers
    return blocks or _children(module)


def _blocks(module: nn.Module, *, only_grouped: bool = False) -> list[nn.Module]:
    """The outermost repeated blocks; with ``only_grouped`` not those inside a module that computes by itself."""
    repeated, found = _repeated(module), []
    for name, child in module.named_children():
        if name in repeated:
            found += (_blocks(child, only_grouped=True) if _is_group(child) else []) or _nearest_called(child)
        elif _is_group(child) or not only_grouped:
            found += _blocks(child, only_grouped=only_grouped)
    if not found and isinstance(module, nn.ModuleDict):
        named = {name: child for name, child in _blocks_among(module).items() if not _is_group(child)}
        found = [named[name] for name in _several(_classes(named))]
    return found


def _repeated(module: nn.Module) -> set[str]:
    """Names of the children that repeat by their place, their name and their class."""
    if isinstance(module, nn.ModuleList) and not is_called(module):
        return {name for name, child in module.named_children() if _has_params(child)}
    if isinstance(module, nn.Sequential):
        return _several(_classes(_blocks_among(module)))
    could_be = dict(module.named_children()) if isinstance(module, nn.ModuleDict) else _blocks_among(module)
    classes = _classes({name: child for name, child in could_be.items() if _has_params(child)})
    return {name for alike in _numbered(classes) if _several(alike) for name in alike}


def _numbered(classes: Classes) -> list[Classes]:
    """The classes of children whose names differ only in a number: down1 and down2, or stage3a and stage4b."""
    found: dict[str, Classes] = {}
    for name, kind in classes.items():
        if re.search(r"\d", name):
            found.setdefault(re.sub(r"\d+[a-z]?(?![a-z])", "0", name), {})[name] = kind
    return list(found.values())


def _layers(module: nn.Module, blocks: set[nn.Module]) -> list[nn.Module]:
    """Layers of one class that hold most of the parameters of their ``Sequential``, outside of ``blocks``."""
    if module in blocks:
        return []
    found = [layer for child in module.children() for layer in _layers(child, blocks)]
    if isinstance(module, nn.Sequential):
        layers = {name: child for name, child in module.named_children() if _is_layer(child)}
        for kind in set(_classes(layers).values()):
            alike = [child for child in layers.values() if type(child) is kind]
            if len(alike) > 1 and 2 * numel(alike) > numel([module]):
                found += alike
    return found


def _children(module: nn.Module) -> list[nn.Module]:
    """The children with parameters; those of an only child where there is one."""
    children = [called for child in module.children() for called in _nearest_called(child)]
    if len(children) == 1 and not _is_layer(children[0]):
        return _children(children[0]) or children
    return children


def _nearest_called(module: nn.Module) -> list[nn.Module]:
    """The module, or if it is never called what it holds."""
    if not _has_params(module):
        return []
    return [module] if is_called(module) else [inner for child in module.children() for inner in _nearest_called(child)]


def _blocks_among(module: nn.Module) -> Modules:
    """The children that are blocks."""
    return {name: child for name, child in module.named_children() if _has_params(child) and not _is_layer(child)}


def _is_layer(module: nn.Module) -> bool:
    return _has_params(module) and not any(_has_params(child) for child in module.children())


def _is_group(module: nn.Module) -> bool:
    """Whether it computes nothing by itself."""
    groups = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    return groups and type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _classes(modules: Modules) -> Classes:
    return {name: type(child) for name, child in modules.items()}


def _several(classes: Classes) -> set[str]:
    """The names whose class occurs more than once."""
    count = Counter(classes.values())
    return {name for name, kind in classes.items() if count[kind] > 1}
