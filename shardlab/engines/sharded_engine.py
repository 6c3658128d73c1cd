"""What strategies share whose parameters live as shards: ownership, full parameters on demand, state dicts."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.engines.agreement import all_or_none
from shardlab.engines.base import OptimizerFn
from shardlab.engines.holdings import ShardRow, held, in_whole_parameters
from shardlab.engines.mixed_precision import MixedPrecision
from shardlab.engines.optimizer_fit import check_partition, refused_by_partition
from shardlab.engines.sharded_unit import ShardedUnit
from shardlab.engines.state import Stateful
from shardlab.engines.step_tensors import StepTensors
from shardlab.vocabulary import Partition, Role


class ShardedEngine(MixedPrecision):
    """An engine whose parameters belong to units; ``partition`` says what a piece of a parameter is."""

    shards_gradients = True
    units: list[ShardedUnit]
    _num_keeping: int  # full_params(keep_changes=True) that are open
    partition: Partition = Partition.ELEMENTS
    _pieces_are_rows = False
    """Whether no piece begins or ends inside a row."""

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        for unit in self.units:
            unit.finish_reduce()
            unit.drop_gradients()

    def step(self) -> None:
        """One optimizer step on the shards; what the user holds in full is gathered anew, all else let go."""
        for unit in self.units:
            if self._num_keeping:
                unit.keep_changes()
            unit.reshard()
        super().step()
        for unit in self.units:
            if unit.gradient_shard is not None:
                unit.values_changed()
            unit.refresh()

    def step_tensors(self) -> StepTensors:
        """This rank's pieces, by name, in the module's order."""
        return self._tensors

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The ranks of the shard group that hold a piece of each parameter, in the module's order."""
        holders: dict[str, list[int]] = {name: [] for name in self.params}
        for unit in self.units:
            for rank in range(self.comm.num_ranks):
                for piece in unit.layout.pieces(0 if unit.is_whole else rank):
                    holders[piece.name].append(rank)
        return {name: tuple(ranks) for name, ranks in holders.items()}

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) of each flattened parameter that this rank holds; only what it does hold."""
        spans = {name: span for unit in self.units for name, span in unit.owned.items()}
        return {name: spans[name] for name in self.params if name in spans}

    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """This rank's shards."""
        return {name: (self._tensors.by_name(name), *span) for name, span in self.owned().items()}

    @property
    def padding_bytes(self) -> int:
        """Bytes of one full copy of the parameters that are padding, over all units."""
        return sum(unit.padding_bytes for unit in self.units)

    def shard_map(self) -> list[ShardRow]:
        """Every piece of a parameter, gradient or optimizer state that this rank holds; ``bucket`` is the unit."""
        rows = (
            ShardRow(name, unit.seats[name].shape, role, index, *span, num_bytes)
            for index, unit in enumerate(self.units)
            for name, span in unit.owned.items()
            for role, num_bytes in held(
                unit.pieces[name], self.optimizer.state.get(unit.pieces[name], {}), unit.pieces[name].grad
            )
        )
        return in_whole_parameters(rows, self.slices)

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """The engine's tensors by role; gathered parameters are there only while they are gathered."""
        live = super().live_tensors()
        live[Role.PARAMETER] = [tensor for unit in self.units for tensor in unit.live_shards()]
        live[Role.GATHERED_PARAMETER] = [tensor for unit in self.units for tensor in unit.gathered()]
        live[Role.GRADIENT] = [tensor for unit in self.units for tensor in unit.live_gradients()]
        return live

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """Inside, the module has its full parameters on every rank, in the dtype they are stored in; collective.

        Of a tensor-parallel model these are this rank's slices; ``full_state_dict()`` has the whole ones.

        Args:
            keep_changes: copy what was written into them in place back into the shards; else it is undone. Every rank
                must write the same, for nobody compares them.
        """
        for unit in self.units:
            unit.hold()
        self._num_keeping += keep_changes
        try:
            yield self.module
            if keep_changes:
                for unit in self.units:
                    unit.keep_changes()
        finally:
            self._num_keeping -= keep_changes
            for unit in self.units:
                unit.let_go()

    def full_state_dict(self) -> dict[str, Any]:
        """As the base; collective in any case."""
        with self.full_params():
            return super().full_state_dict()

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a full state; each rank keeps its shards of it. Collective."""
        with self.full_params(keep_changes=True):
            super().load_full_state_dict(state)

    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """As the base. What is gathered is let go first, since it would be stale.

        Raises:
            ValueError: also where the user holds full parameters, on all ranks.
        """
        if any(unit.is_held for unit in self.units):
            raise ValueError(
                "load: leave 'with engine.full_params():' first, and let go of units by engine.reshard(unit): what is "
                "held would stay as it was"
            )
        for unit in self.units:
            unit.reshard()
        extra = super().load(directory, **objects)
        for unit in self.units:
            unit.values_changed()
        return extra

    def close(self) -> None:
        """Put the full parameters back into the module for good: it trains alone again. Collective the first time."""
        if self._hooks:
            self._give_back()
        super().close()

    def __exit__(self, exc_type: object, *exc: object) -> None:
        # After an error the other ranks may never come to the gather.
        if exc_type is None:
            self.close()

    def _prepare(self) -> None:
        self._num_keeping = 0
        self.units = self._make_units()
        self._cast_buffers()
        pieces = {name: piece for unit in self.units for name, piece in unit.pieces.items()}
        are_parts = self._num_shards > 1 or bool(self.slices)
        self._tensors = StepTensors({name: pieces[name] for name in self.params}, are_parts=are_parts)

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        try:
            if self._num_shards == 1:
                return super()._make_optimizer(optimizer_fn)
            # Pieces differ by rank, so one rank's may be refused and another's not: then all refuse.
            return all_or_none(self.comms, self.mesh.device, lambda: self._make_of_pieces(optimizer_fn))
        except Exception:
            self._give_back()  # all ranks have raised, so all come to the gathers
            raise

    def _make_of_pieces(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        stepped, num_ranks, by_rows = self._stepped(), self._num_shards, self._pieces_are_rows
        with refused_by_partition(optimizer_fn, stepped, self.partition, num_ranks, by_rows=by_rows):
            optimizer = super()._make_optimizer(optimizer_fn)
        check_partition(optimizer, stepped, self.partition, num_ranks, by_rows=by_rows)
        return optimizer

    def _give_back(self) -> None:
        """Put the full parameters back into the module; collective."""
        for unit in self.units:
            unit.release()
            unit.unshard(as_stored=True)

    @property
    def _has_stored_params(self) -> bool:
        return any(unit.is_held_as_stored for unit in self.units)

    @property
    def _num_shards(self) -> int:
        """Ranks that a parameter is spread over; where nothing is sharded every optimizer is right."""
        return 1 if self.sharded_over is None else self.sharded_over.num_ranks

    @abstractmethod
    def _make_units(self) -> list[ShardedUnit]:
        """Shard the parameters."""
