"""The units of a module as a table: what FSDP would gather together, before a rank starts."""

import pandas as pd
from torch import nn

from shardlab.units.policy import AUTO, ROOT, WrapPolicy, owners_of_parameters, wrapped_modules


def show_units(module: nn.Module, wrap: WrapPolicy = AUTO) -> pd.DataFrame:
    """The units of a module, in its order, the root last.

    Args:
        module: any module; on the meta device it needs no memory.
        wrap: which modules are units, see ``shardlab.units.policy``.

    Returns:
        One row per unit: ``unit`` (name), ``class``, ``parameters`` (elements), ``bytes`` (as the parameters are now)
        and ``trainable`` (share of the elements that train; NaN for none). A parameter that is used in several units,
        such as a tied weight, counts once, in the root, so the bytes add up to those of the module. The root has a row
        even if it has no parameters; other units without parameters of their own have none, as FSDP makes none.

    Raises:
        ValueError: nothing in the module fits ``wrap``; the message says what the module has.
    """
    params = dict(module.named_parameters())
    wrapped = wrapped_modules(module, wrap)
    members = owners_of_parameters(module, wrapped, params, ROOT)
    units = {name: names for name, names in members.items() if name != ROOT and names}
    rows = []
    for unit, names in {**units, ROOT: members[ROOT]}.items():
        kind = type(wrapped.get(unit, module)).__name__
        total = sum(params[name].numel() for name in names)
        trained = sum(params[name].numel() for name in names if params[name].requires_grad)
        num_bytes = sum(params[name].nbytes for name in names)
        rows.append((unit, kind, total, num_bytes, trained / total if total else float("nan")))
    return pd.DataFrame(rows, columns=["unit", "class", "parameters", "bytes", "trainable"])
