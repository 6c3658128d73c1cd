"""Which modules are units: the parameters of a unit are gathered together.

Many small units need less memory for gathered parameters and more messages; few large ones the other way round.
"""

from collections.abc import Callable

from torch import nn

WrapPolicy = str | int | Callable[[str, nn.Module], bool]
NAMED_POLICIES = ("block", "root")
ROOT = "root"


def wrapped_modules(module: nn.Module, policy: WrapPolicy) -> dict[str, nn.Module]:
    """The modules that become units, by name, outer before inner; without the root, which holds the rest.

    Only modules with a forward of their own: a ``ModuleList`` or ``ParameterDict`` is never called, so parameters it
    holds itself belong to the module around it.

    Args:
        module: the user's module.
        policy: 'block' takes every entry of a ``ModuleList`` (the blocks of a transformer) or, where there is none,
            every child with parameters; 'root' takes nothing, so that the whole module is one unit; a number takes
            the innermost modules with at least that many parameters; a function of (name, module) decides itself.

    Raises:
        ValueError: an unknown name, or a number below 1.
    """
    candidates = {name: child for name, child in module.named_modules() if name and _can_be_unit(child)}
    if callable(policy):
        return {name: child for name, child in candidates.items() if policy(name, child)}
    if isinstance(policy, int):
        return _by_size(candidates, policy)
    if policy == "root":
        return {}
    if policy == "block":
        blocks = {name: child for name, child in candidates.items() if _in_list(module, name)}
        return blocks or {name: child for name, child in candidates.items() if "." not in name}
    raise ValueError(
        f"wrap: {policy!r} is not one of {', '.join(NAMED_POLICIES)}, a number of parameters or a function"
    )


def parse_wrap(text: str) -> str | int:
    """A policy as typed in a terminal: a name or a number of parameters, for example '100000'.

    Raises:
        ValueError: it is neither.
    """
    if text in NAMED_POLICIES:
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"wrap: {text!r} is not one of {', '.join(NAMED_POLICIES)} or a number of parameters above 0")


def _by_size(candidates: dict[str, nn.Module], least: int) -> dict[str, nn.Module]:
    if least < 1:
        raise ValueError(f"wrap: {least} parameters is below 1; give the least number of parameters of a unit")
    large = {name: child for name, child in candidates.items() if _numel(child) >= least}
    return {
        name: child for name, child in large.items() if not any(other.startswith(f"{name}.") for other in large)
    }  # fmt: skip


def _in_list(module: nn.Module, name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    return isinstance(module.get_submodule(parent), nn.ModuleList)


def _can_be_unit(module: nn.Module) -> bool:
    """Whether it has parameters, and a forward to gather them for: a list or dict is never called."""
    return next(module.parameters(), None) is not None and type(module).forward is not nn.Module.forward


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
