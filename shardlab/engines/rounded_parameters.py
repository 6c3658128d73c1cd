"""What changes for the user where whole parameters are rounded copies: the model is what the master weights say.

State dicts, checkpoints and ``full_params()`` are theirs, in the dtype
that the model came with, as with ``zero3`` and ``fsdp``; and what is written into a rounded parameter is refused.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardlab.engines.buckets import Bucket
from shardlab.engines.master_shards import MasterShards
from shardlab.engines.mixed_precision import MixedPrecision
from shardlab.engines.shards import ParameterShards
from shardlab.engines.state import Stateful
from shardlab.vocabulary import Role


class RoundedParameters(MixedPrecision):
    """An engine that steps ``shards``; where those are the parameters themselves, everything is as without it."""

    shards: ParameterShards

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """As the base; rounded parameters are replaced by the master weights inside, which is collective.

        Args:
            keep_changes: copy what was written into them in place into the master weights; else it is undone where
                parameters are rounded. Every rank must write the same, for nobody compares them.
        """
        masters = self._masters
        with contextlib.nullcontext() if masters is None else masters.held(keep_changes=keep_changes):
            yield self.module

    def full_state_dict(self) -> dict[str, Any]:
        """As the base: the master weights, where there are such."""
        with self.full_params():
            return super().full_state_dict()

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the base; each rank keeps its part of the master weights. Collective where there are such."""
        if self._masters is not None:
            self._masters.forget_writes()
        with self.full_params(keep_changes=True):
            super().load_full_state_dict(state)

    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """The master weights this rank steps, where there are such; else whole parameters."""
        if self._masters is None:
            return super().resident_params()
        return {name: (self.step_tensors().by_name(name), *span) for name, span in self.owned().items()}

    def save(self, directory: str | Path, *, extra: Any = None, **objects: Stateful) -> None:
        """As the base: the master weights, where there are such."""
        self._update_masters()
        super().save(directory, extra=extra, **objects)

    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """As the base; what each rank has read is then rounded and gathered.

        Raises:
            ValueError: also inside ``full_params()``, where parameters are rounded outside, on all ranks.
        """
        if self._masters is not None and self._masters.is_held:
            raise ValueError("load: leave 'with engine.full_params():' first: what is held would stay as it was")
        extra = super().load(directory, **objects)
        if self._masters is not None:
            self._masters.gather(lambda _: True)
        return extra

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """As the base, with the master weights; all of them, inside ``full_params()``, count as gathered."""
        live = super().live_tensors()
        if self._masters is not None:
            live[Role.PARAMETER] = list(self.shards.flat)
            live[Role.GATHERED_PARAMETER] = self._masters.stored
            live[Role.MASTER_WEIGHT] = self._masters.masters
        return live

    def close(self) -> None:
        """As the base. Rounded parameters become the master weights: collective the first time."""
        if self._hooks:
            self._give_back()
        super().close()

    def __exit__(self, exc_type: object, *exc: object) -> None:
        # After an error the other ranks may never come to a gather.
        if exc_type is None or self._masters is None:
            self.close()

    def _shards_of_parameters(self, buckets: Sequence[Bucket]) -> ParameterShards:
        """What is stepped, with master weights where parameters have another dtype than is computed in."""
        if any(self.precision.compute_dtype_of(param) != param.dtype for param in self.params.values()):
            return MasterShards(self.params, buckets, self.comm, self.precision)
        return ParameterShards(self.params, buckets, self.comm)

    def _update_masters(self) -> None:
        """Before they are stepped or saved: take what the user has written, or refuse it."""
        if self._masters is not None:
            self._masters.check_unwritten()
            self._masters.keep_changes()

    def _give_back(self) -> None:
        """Put the master weights into the module; collective where there are such."""
        if self._masters is not None:
            self._masters.give_back()

    @property
    def _has_stored_params(self) -> bool:
        return self._masters is not None and self._masters.is_held

    @property
    def _masters(self) -> MasterShards | None:
        return self.shards if isinstance(self.shards, MasterShards) else None
