"""Parameters of a model that was built on the meta device, made unit by unit: no rank ever holds the whole model.

    with torch.device("meta"):
        model = GPT(config)                       # shapes and dtypes, no memory
    engine = FSDP(model, optimizer_fn, mesh, init_fn=init_weights)

Each unit is made on every rank, initialised, made equal to the first rank's and sharded before the next is made.
"""

from collections.abc import Iterable

import torch
from torch import nn

from shardlab.meta import InitFn


def materialize(
    root: nn.Module, names: Iterable[str], params: dict[str, nn.Parameter], device: torch.device, init_fn: InitFn
) -> bool:
    """Make those of ``names`` that are on the meta device, in ``params`` and in the module; whether there were any.

    ``init_fn`` is called for every module that holds one of them itself, with its name; it runs without gradients.
    """
    meta = {params[name]: name for name in names if params[name].is_meta}
    made = {old: nn.Parameter(torch.empty_like(old, device=device), old.requires_grad) for old in meta}
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
