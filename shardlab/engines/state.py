"""What outlives an engine's process: full state dicts, and checkpoints that any strategy can load.

``EngineState`` has the methods that users call. Functions in ``engines/checkpoint`` do the work. No engine imports
them: ``shardlab.engines`` connects the two, so that you can read a strategy, and train with it, without a line of
checkpoint code.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn


class Stateful(Protocol):
    """What can be saved with an engine: a scheduler, a scaler, anything with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...  # noqa: D102


class EngineState(ABC):
    """The part of ``Engine`` that reads and writes its state."""

    name: str = ""
    module: nn.Module
    checkpointer: ClassVar[Any]
    """The package ``engines/checkpoint``; set by ``shardlab.engines``."""
    no_checkpoints: ClassVar[str] = ""
    """Why a checkpoint cannot hold this strategy's optimizer state, and what to use instead; empty where it can."""
    _sync: bool

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:  # noqa: ARG002
        """Inside, the module has its full parameters on every rank; of a tensor-parallel model this rank's slices.

        In this engine they always are, so nothing is sent, and every change in place stays.

        Args:
            keep_changes: where parameters are sharded, copy changes in place back into the shards; without it they
                are lost. Every rank must write the same values; nothing checks that.
        """
        yield self.module

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of the module's whole state, the same on every rank, which loads strict into the plain module.

        Buffers and extra state may differ between ranks (a BatchNorm's statistics of their rows); the first data rank's
        are returned, as in a checkpoint. Collective; sends nothing if the module has neither and its parameters are
        neither sharded nor sliced. The module itself does not change.
        """
        return self.checkpointer.full_state_dict(self)  # type: ignore[no-any-return]

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict()`` or the plain module's ``state_dict()`` returned.

        Raises:
            RuntimeError: names or shapes differ; torch's message names them, and nothing has changed.
        """
        self.checkpointer.load_full_state_dict(self, state)

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's whole state, the same on every rank; collective.

        Returns:
            What the plain optimizer's ``state_dict()`` would be: full tensors, parameters numbered through the groups.
            An optimizer over ``list(model.parameters())``, or over the same groups, loads it.
        """
        return self._checkpointer_for("full_optimizer_state_dict").full_optimizer_state_dict(self)  # type: ignore[no-any-return]

    def load_full_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_optimizer_state_dict()`` or the plain optimizer's ``state_dict()`` returned.

        Each rank keeps copies of its pieces. Communicates nothing.

        Raises:
            ValueError: the parameter groups differ, or this engine cannot cut the state into pieces.
        """
        self._checkpointer_for("load_full_optimizer_state_dict").load_full_optimizer_state_dict(self, state)

    def named_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """A copy of the optimizer's whole state by parameter name, the same on every rank; collective.

        Returns:
            For each parameter that has been stepped, what the plain optimizer would hold for it: full tensors, such as
            ``["0.weight"]["exp_avg"]``, and step counters.
        """
        return self._checkpointer_for("named_optimizer_state").named_optimizer_state(self)  # type: ignore[no-any-return]

    def load_named_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what ``named_optimizer_state()`` returned, whatever the order of its parameters and groups.

        A parameter that is not in it starts without state. Options such as the learning rate stay the engine's own.
        Communicates nothing.

        Args:
            state: full tensors, the same on every rank.

        Raises:
            ValueError: a parameter is unknown, or this engine cannot cut the state into pieces.
        """
        self._checkpointer_for("load_named_optimizer_state").load_named_optimizer_state(self, state)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients by parameter name: means over the data ranks, the same on every rank; collective.

        Pending reductions are finished first. After ``clip_grad_norm_`` the gradients are clipped.

        Returns:
            Full tensors in the shapes of the whole model, also where tensor parallelism divides its layers; None for
            a parameter that no rank used.

        Raises:
            RuntimeError: inside ``no_sync()``, where gradients are not means yet.
        """
        if not self._sync:
            raise RuntimeError(
                "full_gradients: inside no_sync() gradients are not means yet; call it after the last backward"
            )
        self.finish_gradients()
        return self._gather_gradients()

    def save(self, directory: str | Path, *, extra: Any = None, **objects: Stateful) -> None:
        """Write a checkpoint that any strategy at any number of ranks can load; collective.

        Saves the model, the optimizer, the number of steps and the random generators, but no gradients: call it after
        ``step()``. If the run is killed while it saves, the previous checkpoint stays intact.

        Args:
            directory: a directory all ranks share. It keeps the last complete checkpoint of this engine; what another
                run has written there stays beside it.
            extra: numbers, text, lists, dicts and small tensors of your own; the first rank's are saved.
            objects: what else to save, by a name of your choice: ``scheduler=scheduler, scaler=scaler``. Each must be
                the same on all ranks.

        Raises:
            ValueError: a checkpoint cannot hold what was given; on all ranks.
            RuntimeError: a rank could not write; on all ranks.
        """
        self._checkpointer_for("save").save_checkpoint(self, Path(directory), extra, objects)

    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """Continue from a checkpoint; collective. Each rank reads what it holds. Gradients are cleared.

        Each rank restores the random generators of the rank with its number; if there was none, they are seeded with
        that number and the state of the first rank, so that each rank draws numbers of its own.
        The ranks first read all files to compare their checksums, each rank its share of them.

        Args:
            directory: where a checkpoint was saved: its last one is loaded. Or the folder of one version in it.
            objects: which of the objects saved with it to load.

        Returns:
            The ``extra`` it was saved with.

        Raises:
            ValueError: something is missing, damaged, or of another model or optimizer; on all ranks. Nothing of the
                engine has changed.
            RuntimeError: one of ``objects``, or a module's ``set_extra_state``, raised; on all ranks. No tensor of the
                engine has changed, but objects before that one have.
        """
        extra = self._checkpointer_for("load").load_checkpoint(self, Path(directory), objects)
        # The gradients belong to the values that were just replaced.
        self.zero_grad()
        return extra

    @abstractmethod
    def finish_gradients(self) -> None:
        """Return when the gradients are means over the data axes."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        return self.checkpointer.full_gradients(self)  # type: ignore[no-any-return]

    def _checkpointer_for(self, method: str) -> Any:
        """The checkpointer, for a method that needs the optimizer's state in our form.

        Raises:
            NotImplementedError: the strategy keeps it in another form.
        """
        if self.no_checkpoints:
            raise NotImplementedError(f"{method}: strategy {self.name!r} {self.no_checkpoints}")
        return self.checkpointer
