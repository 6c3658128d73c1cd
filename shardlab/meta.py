"""How a module that was built on the meta device, with shapes and no memory, gets its values.

An ``InitFn`` is called as (name, module) for each module that holds parameters itself, once they have memory.
"""

from collections.abc import Callable

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
