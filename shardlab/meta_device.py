"""How a module that was built on the meta device, with shapes and no memory, gets its values.

    with torch.device("meta"):
        model = GPT(config)
    engine = FSDP(model, optimizer_fn, mesh, init_fn=init_weights)

An ``InitFn`` is called as (name, module) for each module that holds parameters itself, once they have memory. FSDP
makes each unit on every rank, initialises it, makes it equal to the first rank's and shards it before it makes the
next, so that no rank ever holds the whole model.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

InitFn = Callable[[str, nn.Module], None]


def reset_parameters(name: str, module: nn.Module) -> None:
    """Initialise a module the way torch's own layers do.

    Raises:
        ValueError: it has no ``reset_parameters``.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"init_fn: module {name!r} ({type(module).__name__}) has parameters on the meta device and no "
            "reset_parameters(); pass init_fn, a function of (name, module) that fills its own parameters"
        )
    reset()


def materialize(
    root: nn.Module, names: Iterable[str], params: dict[str, nn.Parameter], device: torch.device, init_fn: InitFn
) -> bool:
    """Make those of ``names`` that are on the meta device, in ``params`` and in the module; whether there were any.

    Each new parameter has the class and the attributes of the one that it replaces.
    ``init_fn`` is called for every module that holds one of them itself, with its name; it runs without gradients.
    """
    meta = {params[name]: name for name in names if params[name].is_meta}
    made = {old: _with_memory(old, device) for old in meta}
    owners = {}
    for owner_name, owner in root.named_modules():
        for attribute, held in owner._parameters.items():
            if held in made:
                owner._parameters[attribute] = made[held]
                owners[owner_name] = owner
    for old, name in meta.items():
        params[name] = made[old]
    with torch.no_grad():
        for owner_name, owner in owners.items():
            init_fn(owner_name, owner)
    return bool(meta)


def _with_memory(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    # As ``nn.Parameter`` itself does: a class derived from it may have a constructor of its own.
    data = torch.empty_like(param.data, device=device)
    made: nn.Parameter = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    vars(made).update(vars(param))
    return made
