"""What is wrong with a strategy on one rank, whatever it computes: messages not waited for, holdings not said."""

import contextlib
from collections.abc import Iterator

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.comm.process import observing_new
from shardlab.engines import Engine


class Unwaited(Observer):
    """Which messages nobody has waited for."""

    def __init__(self) -> None:
        self._under_way: dict[int, CollectiveEvent] = {}

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        self._under_way[id(event)] = event

    def waited(self, event: CollectiveEvent) -> None:
        """As the base."""
        self._under_way.pop(id(event), None)

    @contextlib.contextmanager
    def observing(self, mesh: BaseMesh) -> Iterator[None]:
        """Inside, the messages of a mesh count, and those of meshes that are made."""
        with mesh.observed_by(self), observing_new(self):
            yield

    def told(self) -> str:
        """The first of them, in a sentence; empty if all were waited for."""
        first = next(iter(self._under_way.values()), None)
        if first is None:
            return ""
        return (
            f"{len(self._under_way)} messages were never waited for, first the {first.op} {first.tag!r}, so what it "
            "brings may be read before it is there; keep the Pending, and call its wait() before the result is used"
        )


def held_wrong(engine: Engine) -> str:
    """What is wrong with what an engine says that it holds, in a sentence; empty if nothing is.

    Whatever has memory of a parameter, a piece or a gradient must be in one of ``holdings()``, and a holding has the
    elements that it names.
    """
    held = {holding.tensor.untyped_storage().data_ptr() for holding in engine.holdings()}
    for name, tensor in (*engine.params.items(), *engine.step_tensors().items()):
        for what, one in (("the parameter", tensor), ("the gradient", tensor.grad)):
            if one is None or one.untyped_storage().data_ptr() in held:
                continue
            # What stands for a sharded parameter has one element, however large that is.
            is_placeholder = engine.strategy.keeps_pieces and one is engine.params[name] and one.numel() == 1
            if not is_placeholder and one.untyped_storage().nbytes() >= one.nbytes > 0:
                return f"holdings(): {what} of {name!r} is in none, so that no table would count it"
    for holding in engine.holdings():
        start, stop = holding.span
        if holding.name and holding.tensor.numel() != stop - start:
            return (
                f"holdings(): {holding.tensor.numel()} elements are said to be elements {start} to {stop} of "
                f"{holding.name!r}"
            )
    return ""
