"""A wrapped module and the parameters that are gathered for it.

Parameters of one dtype that all train (or all do not) make one ``ShardedUnit``; a module that mixes them has several,
so that frozen parameters never travel in a reduce-scatter.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from shardlab.engines.sharded_unit import ShardedUnit


class Group:
    """One unit of the wrap policy.

    Args:
        name: of the module, or 'root'.
        module: whose forward and backward need the parameters.
        units: of this module alone, without those of units inside it.
    """

    def __init__(self, name: str, module: nn.Module, units: Sequence[ShardedUnit]) -> None:
        self.name, self.module, self.units = name, module, tuple(units)
        self.waiting: set[nn.Parameter] = set()  # trainable parameters whose gradient this backward still owes
        self.reduced = False  # in this round of gradients
        self.held_by_user = False

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(unit.trainable for unit in self.units)

    def arm(self) -> None:
        """Expect a gradient from every parameter that is trainable now."""
        self.waiting = {param for unit in self.units for param in unit.params.values() if param.requires_grad}

    def start_unshard(self) -> None:
        """Begin to gather."""
        for unit in self.units:
            unit.start_unshard()

    def unshard(self) -> None:
        """Have the full parameters; all gathers are issued before the first is waited for."""
        self.start_unshard()
        for unit in self.units:
            unit.unshard()

    def reshard(self) -> None:
        """Let the full parameters go, unless the user holds them."""
        if not self.held_by_user:
            for unit in self.units:
                unit.reshard()

    def start_reduce(self) -> None:
        """Begin to reduce the gradients."""
        self.reduced = True
        for unit in self.units:
            if unit.trainable:
                unit.start_reduce()

    def finish_reduce(self) -> None:
        """Have the means."""
        for unit in self.units:
            unit.finish_reduce()


def owners_of_parameters(
    module: nn.Module, wrapped: Mapping[str, nn.Module], params: Mapping[str, nn.Parameter], root: str
) -> dict[str, list[str]]:
    """Parameter names by group: the innermost wrapped module that holds every use of the parameter, else the root."""
    groups: dict[str, list[str]] = {root: [], **{name: [] for name in wrapped}}
    uses: dict[nn.Parameter, set[str]] = {param: set() for param in params.values()}
    for name, param in module.named_parameters(remove_duplicate=False):
        uses[param].add(_innermost(name, wrapped, root))
    for name, param in params.items():
        homes = uses[param]
        groups[homes.pop() if len(homes) == 1 else root].append(name)
    return groups


def _innermost(parameter: str, wrapped: Mapping[str, nn.Module], root: str) -> str:
    holders = [name for name in wrapped if parameter.startswith(f"{name}.")]
    return max(holders, key=len, default=root)
