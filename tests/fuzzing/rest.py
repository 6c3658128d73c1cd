"""Bytes at rest: what an engine holds between operations against the planner's arithmetic, role by role."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from shardlab.planner import SGD, Setup, described
from shardlab.planner.groups import Group, groups_of
from shardlab.planner.memory import bytes_at_rest
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.units import units_of
from shardlab.vocabulary import Role
from tests.fuzzing.engines import NAMED, OURS, EngineSpec

KEPT = (Role.PARAMETER, Role.MASTER_WEIGHT)
"""Roles whose bytes never change."""


@dataclass(frozen=True)
class AtRest:
    """What the planner says of an engine."""

    setup: Setup
    groups: tuple[Group, ...] = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module, spec: EngineSpec) -> "AtRest | None":
        """Of a model that no engine has changed yet; None where the planner does not know the strategy."""
        if spec.name not in OURS:
            return None
        setup = _setup(model, spec)
        return cls(setup, tuple(_thawed(group) for group in groups_of(described(model), setup)))

    def differences(self, live: Mapping[Role, list[Tensor]], rank: int, state_bytes: int) -> Iterator[str]:
        """What is held otherwise than planned.

        Args:
            live: of the engine.
            rank: among the data ranks.
            state_bytes: of the optimizer's state, as the one process has it, of what this rank steps.
        """
        found, wanted = bytes_by_role(live), bytes_at_rest(self.groups, self.setup, rank)
        offloads_all = self.setup.strategy == "fsdp" and self.setup.offload == "all"
        for role in KEPT:
            if found[role] != wanted[role]:
                yield f"{role}: {found[role]} bytes at rest instead of {wanted[role]}"
        if found[Role.OPTIMIZER_STATE] != (0 if offloads_all else state_bytes):
            yield f"optimizer state: {found[Role.OPTIMIZER_STATE]} bytes at rest instead of {state_bytes}"
        if found[Role.GRADIENT] > wanted[Role.GRADIENT]:
            yield f"gradients: {found[Role.GRADIENT]} bytes at rest instead of at most {wanted[Role.GRADIENT]}"
        if self.setup.strategy == "fsdp" and self.setup.offload != "none":
            yield from self._offloaded(found, rank, state_bytes)

    def _offloaded(self, found: Mapping[Role, int], rank: int, state_bytes: int) -> Iterator[str]:
        """Shards, and where all is offloaded the state, and perhaps gradients."""
        planned = bytes_at_rest(self.groups, replace(self.setup, offload="none"), rank)
        offloads_all = self.setup.offload == "all"
        least = planned[Role.PARAMETER] + offloads_all * state_bytes
        if not least <= found[Role.OFFLOADED] <= least + offloads_all * planned[Role.GRADIENT]:
            yield f"offloaded: {found[Role.OFFLOADED]} bytes at rest instead of {least} and gradients"


def state_bytes(states: Mapping[str, Mapping[str, Any]], params: Mapping[str, Tensor], owned: Mapping[str, Any]) -> int:
    """Bytes of the one process's optimizer state, of the elements that a rank steps."""
    return sum(
        (stop - start) * value.element_size()
        for name, (start, stop) in owned.items()
        for key, value in states.get(name, {}).items()
        if isinstance(value, Tensor) and value.shape == params[name].shape and key != "step"
    )


def _thawed(group: Group) -> Group:
    return replace(group, params={name: replace(param, trainable=True) for name, param in group.params.items()})


def _setup(model: nn.Module, spec: EngineSpec) -> Setup:
    options = {name: NAMED.get(name, {}).get(value, value) for name, value in spec.options}
    units = units_of(model, options.pop("wrap", "auto")) if spec.name == "fsdp" else {}
    precision = options.pop("precision", None)
    dtypes = {"compute_dtype": precision and precision.compute, "reduce_dtype": precision and precision.reduce}
    named = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype is not None}
    size = dict(spec.axes).get("shard") if options.get("sharding") == "hybrid_shard" else None
    return Setup(spec.name, spec.num_data_ranks, units=units, optimizer=SGD, shard_group_size=size, **named, **options)
