"""A wrapped module and the parameters that are gathered for it.

Parameters of one dtype that all train (or all do not) make one ``ShardedUnit``; a module that mixes them has several,
so that frozen parameters never travel in a reduce-scatter.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from shardlab.engines.sharded_unit import ShardedUnit, UnitState


class Group:
    """One unit of the wrap policy.

    Args:
        name: of the module, or 'root'.
        module: whose forward and backward need the parameters.
        units: of this module alone, without those of units inside it.
    """

    def __init__(self, name: str, module: nn.Module, units: Sequence[ShardedUnit]) -> None:
        self.name, self.module, self.units = name, module, tuple(units)
        self.params = tuple(param for unit in self.units for param in unit.params.values())

    @property
    def is_spread(self) -> bool:
        """Whether ranks hold different elements, so that gathering it communicates."""
        return any(not unit.is_whole for unit in self.units)

    def start_unshard(self) -> bool:
        """Begin to gather; whether anything was left to gather."""
        was_sharded = any(unit.state is UnitState.SHARDED for unit in self.units)
        for unit in self.units:
            unit.start_unshard()
        return was_sharded

    def unshard(self) -> None:
        """Have the full parameters; all gathers are issued before the first is waited for."""
        self.start_unshard()
        for unit in self.units:
            unit.unshard()

    def reshard(self) -> None:
        """Let the full parameters go, unless the user holds them."""
        for unit in self.units:
            unit.reshard()

    def drop_gather(self) -> None:
        """Let go of what has been gathered ahead and not been used."""
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                unit.reshard()

    def hold(self, *, by_hand: bool) -> None:
        """Whether the user has gathered it by hand, so that nothing lets it go."""
        for unit in self.units:
            unit.held_by_hand = by_hand

    def start_reduce(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Begin to reduce the gradients; a unit that none of is due stays out, as frozen ones do."""
        for unit in self.units:
            if any(is_due(param) for param in unit.params.values()):
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
