"""Which modules of a model are units: one argument, ``wrap``, for FSDP's gathers, for spans and for memory marks.

The parameters of an FSDP unit are gathered together: many small units need less memory for gathered parameters and more
messages; few large ones the other way round.

=======================================  ============================================================================
wrap                                     units
=======================================  ============================================================================
``"auto"``                               the blocks that repeat, wherever they stand, see ``structure``
``"root"``                               none: the whole module is one unit
``"blocks.*"``                           modules whose full name fits; ``*`` stands for one name between two dots
``Block``                                modules of this class
``("encoder.*", "decoder.*", Block)``    modules that fit any of these
``100_000``                              the innermost modules with at least so many parameters
``lambda name, module: ...``             modules for which the function is true
=======================================  ============================================================================

The module itself is a unit too, ``root``, with the parameters of no other unit and those that several units use.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from shardlab.units.structure import Modules, called_modules, numel, repeated_modules

Selector = str | type[nn.Module]
WrapPolicy = Selector | int | Sequence[Selector] | Callable[[str, nn.Module], bool]
AUTO, ROOT = "auto", "root"
WORDS = (AUTO, ROOT)
NUM_SUGGESTED = 8


def wrapped_modules(module: nn.Module, wrap: WrapPolicy = AUTO) -> Modules:
    """The modules that become units, by name, outer before inner; without the root, which holds the rest.

    Only modules that are called: parameters in a ``ParameterDict``, say, belong to the module around it.

    Args:
        module: the user's module; it may be on the meta device.
        wrap: see the table above.

    Raises:
        ValueError: nothing in the module fits; the message says what the module has. Or ``wrap`` is none of these.
    """
    called = called_modules(module)
    if isinstance(wrap, str | type):
        wrap = wrap if wrap in WORDS else (wrap,)
    if wrap == ROOT:
        return {}
    if wrap == AUTO:
        chosen = set(repeated_modules(module))
        return {name: child for name, child in called.items() if child in chosen}
    if isinstance(wrap, tuple | list) and wrap and all(isinstance(selector, str | type) for selector in wrap):
        fitting = {name for selector in wrap for name in _selected(module, called, selector)}
        # In the module's order: that of a set of names differs from process to process, and so between ranks.
        return {name: child for name, child in called.items() if name in fitting}
    if isinstance(wrap, int) and not isinstance(wrap, bool):
        return _by_size(called, wrap)
    if callable(wrap):
        return _by_function(called, wrap)
    raise ValueError(
        f"wrap: {wrap!r} is not one of {', '.join(WORDS)}, a pattern of names such as 'blocks.*', a class of modules, "
        "a tuple of these, a number of parameters, or a function of (name, module)"
    )


def units_of(module: nn.Module, wrap: WrapPolicy = AUTO) -> dict[str, list[str]]:
    """Names of the parameters of each unit except the root, by the name of the unit; without units that are empty."""
    params = dict(module.named_parameters())
    members = owners_of_parameters(module, wrapped_modules(module, wrap), params, ROOT)
    return {name: names for name, names in members.items() if name != ROOT and names}


def owners_of_parameters(
    module: nn.Module, wrapped: Mapping[str, nn.Module], params: Mapping[str, nn.Parameter], root: str
) -> dict[str, list[str]]:
    """Parameter names by unit: the innermost wrapped module that contains all uses of a parameter, else the root."""
    units: dict[str, list[str]] = {root: [], **{name: [] for name in wrapped}}
    uses: dict[nn.Parameter, set[str]] = {param: set() for param in params.values()}
    for name, param in module.named_parameters(remove_duplicate=False):
        holders = [unit for unit in wrapped if name.startswith(f"{unit}.")]
        uses[param].add(max(holders, key=len, default=root))
    for name, param in params.items():
        # Used in two units: the root has it, as the only one that is gathered while either of them computes.
        homes = uses[param]
        units[homes.pop() if len(homes) == 1 else root].append(name)
    return units


def _selected(module: nn.Module, called: Modules, selector: Selector) -> Modules:
    if isinstance(selector, type):
        found = {name: child for name, child in called.items() if isinstance(child, selector)}
        if not found:
            classes = ", ".join(dict.fromkeys(type(child).__name__ for child in called.values()))
            raise ValueError(f"wrap: no unit can be a {selector.__name__}; the module has {classes or 'no modules'}")
        return found
    found = {name: child for name, child in called.items() if _fits(name, selector)}
    if not found:
        raise ValueError(f"wrap: {selector!r} {_why_none(module, selector)}; the module has {_suggested(called)}")
    return found


def _fits(name: str, pattern: str) -> bool:
    """A pattern is compared name by name, so that ``blocks.*`` is the blocks and not all that is inside them."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _why_none(module: nn.Module, pattern: str) -> str:
    for name, child in module.named_modules():
        if name and _fits(name, pattern):
            return f"is a {type(child).__name__} that is never called, or has no parameters"
    is_word = re.fullmatch(r"\w+", pattern) is not None
    return f"matches no module, and is not one of {', '.join(WORDS)}" if is_word else "matches no module"


def _suggested(called: Modules) -> str:
    """Patterns for what the module has, the outermost first."""
    patterns = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in called)
    few = sorted(patterns, key=lambda pattern: pattern.count("."))[:NUM_SUGGESTED]
    return ", ".join(map(repr, few)) + (", ..." if len(patterns) > len(few) else "") if few else "no modules"


def _by_size(called: Modules, least: int) -> Modules:
    if least < 1:
        raise ValueError(f"wrap: {least} parameters is below 1; give the least number of parameters of a unit")
    sizes = {name: numel([child]) for name, child in called.items()}
    large = [name for name, size in sizes.items() if size >= least]
    if not large:
        raise ValueError(
            f"wrap: no module has {least:,} parameters; the largest has {max(sizes.values(), default=0):,}. Give a "
            "smaller number, or 'root' for one unit"
        )
    inner = [name for name in large if not any(other.startswith(f"{name}.") for other in large)]
    return {name: called[name] for name in inner}


def _by_function(called: Modules, function: Callable[[str, nn.Module], bool]) -> Modules:
    found = {name: child for name, child in called.items() if function(name, child)}
    if not found:
        raise ValueError(f"wrap: the function is true for no module; the module has {_suggested(called)}")
    return found
