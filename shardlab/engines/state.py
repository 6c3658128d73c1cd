"""What of an engine outlives its process: full state dicts, and checkpoints that any strategy can load.

Every engine has these; how a state is put together and taken apart is in ``checkpoints``.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from shardlab.comm.slices import cut_state, merge_state
from shardlab.engines.checkpoint import Stateful, load_checkpoint, save_checkpoint
from shardlab.engines.checkpoints.first_rank import first_ranks_own
from shardlab.engines.checkpoints.gather import gather_gradients
from shardlab.engines.checkpoints.optimizer_state import (
    gather_named_state,
    gather_optimizer_state,
    install_full_state,
    install_named_state,
)

if TYPE_CHECKING:
    from shardlab.engines.base import Engine


class EngineState(ABC):
    """The part of ``Engine`` that reads and writes its state."""

    module: nn.Module

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:  # noqa: ARG002
        """Inside, the module has its full parameters on every rank; of a tensor-parallel model this rank's slices.

        Here they are so always, so that nothing is sent and what is written into them in place holds in any case.

        Args:
            keep_changes: where parameters are sharded, copy what was written into them back into the shards; else it
                is undone. Every rank must write the same, for nobody compares them.
        """
        yield self.module

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of the module's whole state, the same on every rank, which loads strict into the plain module.

        Buffers and extra state, which the ranks' own rows may have made different (a BatchNorm's statistics), are those
        of the first data rank, as in a checkpoint. Collective; sends nothing where the module has neither, unless
        parameters are sharded or sliced. The module itself stays as it is.
        """
        engine, state = self._engine, self.module.state_dict()
        if engine.tensor_comm is not None:
            return first_ranks_own(engine, merge_state(state, engine.slices, engine.tensor_comm))
        copies = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        return first_ranks_own(engine, copies)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict()`` or the plain module's ``state_dict()`` gave.

        Raises:
            RuntimeError: names or shapes differ; torch names them, and nothing has been changed.
        """
        given = cut_state(state, self._engine.slices)
        own = self.module.state_dict()
        misfits = {name for name in own.keys() | given.keys() if not _fits(own.get(name), given.get(name))}
        if misfits:
            # What fits is replaced by what is there already: torch would copy it before it refuses the rest.
            given = {name: value if name in misfits else own[name] for name, value in given.items()}
        self.module.load_state_dict(given, strict=True)

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's whole state, the same on every rank; collective.

        Returns:
            What the plain optimizer's ``state_dict()`` would be: full tensors, parameters numbered through the groups.
            An optimizer over ``list(model.parameters())``, or over the same groups, loads it.
        """
        return gather_optimizer_state(self._engine)

    def load_full_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_optimizer_state_dict()`` or the plain optimizer's ``state_dict()`` gave.

        Each rank keeps copies of its pieces. Communicates nothing.

        Raises:
            ValueError: other parameter groups, or state that this engine cannot cut in pieces.
        """
        install_full_state(self._engine, state)

    def named_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's whole state by parameter name, the same on every rank, copies; collective.

        Returns:
            Of each parameter that has been stepped, what the plain optimizer would hold of it: full tensors, such as
            ``["0.weight"]["exp_avg"]``, and step counters.
        """
        return gather_named_state(self._engine)

    def load_named_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what ``named_optimizer_state()`` gave, whatever the order of parameters and groups was there.

        A parameter that is not in it begins anew, without state. Options such as the learning rate stay the engine's.
        Communicates nothing.

        Args:
            state: full tensors, the same on every rank.

        Raises:
            ValueError: an unknown parameter, or state that this engine cannot cut in pieces.
        """
        install_named_state(self._engine, state)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Gradients by parameter name, means over the data ranks, the same on every rank, copies; collective.

        What is pending is finished first. After ``clip_grad_norm_`` they are clipped.

        Returns:
            Full tensors in the shapes of the whole model, also of one whose layers are divided; None for a parameter
            that no rank used.

        Raises:
            RuntimeError: inside ``no_sync()``, where gradients are not means yet.
        """
        if not self._engine._sync:
            raise RuntimeError(
                "full_gradients: inside no_sync() they are not means yet; call it after the last backward"
            )
        self._engine.finish_gradients()
        return self._gather_gradients()

    def save(self, directory: str | Path, *, extra: Any = None, **objects: Stateful) -> None:
        """Write a checkpoint that any strategy at any number of ranks can load; collective.

        The model, the optimizer, the number of steps and the random generators; not the gradients, so call it after
        ``step()``. A kill in the middle leaves the checkpoint that was there before.

        Args:
            directory: a directory all ranks share; one checkpoint is kept in it, the last that is complete.
            extra: numbers, text, lists, dicts and small tensors of your own, as the first rank has them.
            objects: what else is to go on, by a name of your choice: ``scheduler=scheduler, scaler=scaler``. Each is
                the same on all ranks.

        Raises:
            ValueError: something that no checkpoint can hold; on all ranks.
            RuntimeError: a rank could not write; on all ranks.
        """
        save_checkpoint(self._engine, Path(directory), extra, objects)

    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """Go on from a checkpoint; collective. Each rank reads what it holds. Gradients are forgotten.

        Random generators go on where they were on the ranks of the same number; a rank that has none keeps its own.

        Args:
            directory: that a checkpoint was saved in.
            objects: which of those that were saved with it to load.

        Returns:
            The ``extra`` it was saved with.

        Raises:
            ValueError: something is missing, damaged, or of another model or optimizer; on all ranks, and nothing has
                been changed, unless a file turned out damaged while it was read.
        """
        extra = load_checkpoint(self._engine, Path(directory), objects)
        self.zero_grad()
        return extra

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        return gather_gradients(self._engine)

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""

    @property
    def _engine(self) -> "Engine":
        return cast("Engine", self)


def _fits(own: Any, given: Any) -> bool:
    if isinstance(own, Tensor) and isinstance(given, Tensor):
        return own.shape == given.shape
    return own is not None and given is not None
