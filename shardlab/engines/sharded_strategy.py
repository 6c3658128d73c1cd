"""What strategies with sharded parameters share: the step on shards, full parameters on demand, what is held."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardlab.comm.events import wait_all
from shardlab.comm.trees import map_tensors
from shardlab.engines.holdings import Holding
from shardlab.engines.plain_mode import nothing
from shardlab.engines.saved_tensors import saved_as_it_is, saved_by_reference
from shardlab.engines.sharded_params import ByAddress, Shards
from shardlab.engines.strategy import Given, LaidOut, Strategy
from shardlab.engines.unit import Unit


class Sharded(Strategy):
    """Parameters, gradients and optimizer state are sharded; ``make_units`` says how."""

    steps_pieces = full_gathers = True
    units: Sequence[Unit] = ()

    def lay_out(self, given: Given) -> LaidOut:
        """Shard the parameters, which frees the full ones; the optimizer steps pieces of the shards."""
        super().lay_out(given)
        self.device, self._note_backward = given.device, given.note_backward
        self.at: ByAddress = {}
        self.units = self.make_units(given)
        self._unit_of = {id(param): unit for unit in self.units for param in unit.params}  # hashing one calls Python
        self._unit_of_shards = {one: unit for unit in self.units for one in unit.shards}
        pieces = {name: piece for one in self._unit_of_shards for name, piece in one.pieces.items()}
        return LaidOut({name: pieces[name] for name in self.params}, [one.division for one in self._unit_of_shards])

    def make_units(self, given: Given) -> Sequence[Unit]:
        """Shard the parameters; the units in the order of the module."""
        raise NotImplementedError

    def saving_by_reference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, autograd keeps no gathered parameter in memory."""
        self.note_writes()
        return saved_by_reference(self.at, lambda shards: self._unit_of_shards[shards].gather())

    @contextlib.contextmanager
    def kept_gathered(self, *, as_stored: bool = False) -> Iterator[None]:
        """Inside, all units are gathered; at the end they are resharded, unless an outer call still needs them.

        Args:
            as_stored: in the dtype that is stepped, and not in the one to compute in.
        """
        for unit in self.units:
            if as_stored and not unit.is_as_stored:
                unit.reshard()
            unit.gather(as_stored=as_stored)
            unit.num_holders += 1
        try:
            yield
        finally:
            for unit in self.units:
                unit.num_holders -= 1
                unit.reshard()

    @contextlib.contextmanager
    def stepping(self, *, loads: bool = False) -> Iterator[None]:
        """Inside, pieces are stepped: they lie in the shards, or are gathered into them at the end."""
        for unit in self.units:
            unit.reshard()  # what was kept for a backward that did not come, or left by torch.autograd.grad
        for one in self._unit_of_shards:
            one.is_stepped = True
        with self.visiting():
            try:
                yield
            finally:
                for one in self._unit_of_shards:
                    one.is_stepped = False
                    one.changed()
                # An optimizer that raised may have stepped first, and those of other ranks have.
                due = [one for one in self._unit_of_shards if loads or any(map(self.is_due, one.params.values()))]
                wait_all([one.gather_stepped() for one in due if one.is_split])

    def make_means(self) -> None:
        """Make means of what has been sent: the sums of all units are waited for, in one order on all ranks."""
        for unit in self.units:
            unit.finish()

    def drop(self) -> None:
        """The gradients of all units are cleared."""
        for unit in self.units:
            unit.drop()

    @contextlib.contextmanager
    def full(self, *, keep_changes: bool) -> Iterator[None]:
        """Inside, all units are gathered, in the dtype they are stored in."""
        versions = {one: _writes(one) for one in self._unit_of_shards}
        try:
            # What plain code saves is for a backward that may come when this is sharded again.
            with self.kept_gathered(as_stored=True), saved_as_it_is(self.saw_other_graph):
                yield
                if keep_changes:  # not after an error: half of a change must not reach the shards
                    for one in self._unit_of_shards:
                        one.check_replaced()
                    for one in self._unit_of_shards:
                        one.write_back()
        finally:
            for one, version in versions.items():
                if _writes(one) != version:  # a forward inside may have saved what is lost now
                    one.outdate()

    def saw_other_graph(self) -> None:
        """Plain code has computed with full parameters, and a backward may come through that."""

    def without_parameters(self, output: Any) -> Any:
        """The output of a forward with copies in the place of parameters, which are resharded when it has ended."""
        return map_tensors(lambda tensor: tensor.clone() if id(tensor) in self._unit_of else tensor, output)

    def note_writes(self) -> None:
        """What a graph has saved is refused in its backward where pieces have been written to since."""
        for one in self._unit_of_shards:
            one.note_writes()

    def holdings(self) -> Iterator[Holding]:
        """What the shards hold."""
        for one in self._unit_of_shards:
            yield from one.holdings()


def _writes(shards: Shards) -> int:
    """How often the parameters have been written to."""
    return sum(param._version for param in shards.params.values())


class ModuleHook:
    """A forward hook or forward pre-hook that is not traced, and that does nothing in copies of the module.

    A copy of a wrapped module (``copy.deepcopy``, pickle, ``torch.save``) is a plain module that trains alone. If it
    kept the hooks, its forward would gather the original's parameters.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        # Now: made lazily inside a trace it would belong to that trace alone, and the next model's would be None.
        self._hook = torch.compiler.disable(hook, reason="shardlab gathers and reshards parameters here")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ModuleHook, (nothing,)
