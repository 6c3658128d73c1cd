"""What the two engines of torch that keep parameters as ``DTensor`` share: ``torch_fsdp2`` and ``torch_tp``."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor
from typing_extensions import override

from shardlab.engines.holdings import Holding
from shardlab.engines.peers.base import STATE_IS_TORCHS, Peer
from shardlab.vocabulary import Role


class DTensorPeer(Peer):
    """A peer whose parameters, gradients and optimizer state are distributed tensors.

    Torch changes the module for good: ``close()`` cannot give the plain one back, ``full_state_dict()`` has its values.
    """

    no_checkpoints = STATE_IS_TORCHS
    replaces_params = True

    @override
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As in ``Engine``; torch reduces the norm."""
        from shardlab.engines.peers.dtensors import clip_mixed_

        self.finish_gradients()
        with self._for("gradient norm"):
            return clip_mixed_(self.step_tensors(), max_norm, norm_type)

    @override
    def full_state_dict(self) -> dict[str, Any]:
        """As in ``Engine``; always collective."""
        from shardlab.engines.peers.dtensors import whole

        # In the order of the state dict, which is the same on all ranks: each whole tensor is a collective of its own.
        with self._for("full parameters"):
            state = {
                name: whole(value) if isinstance(value, Tensor) else value
                for name, value in self.module.state_dict().items()
            }
        return self.checkpointer.first_ranks_own(self, state)

    @override
    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict()`` or the plain module's ``state_dict()`` returned; communicates nothing."""
        from shardlab.engines.peers.dtensors import distributed_like

        own = self.module.state_dict()
        cut = {name: distributed_like(value, own[name]) if name in own else value for name, value in state.items()}
        self.module.load_state_dict(cut, strict=True)

    @override
    def _gather_gradients(self) -> dict[str, Tensor | None]:
        from shardlab.engines.peers.dtensors import whole

        with self._for("full gradients"):
            return {name: None if param.grad is None else whole(param.grad) for name, param in self.params.items()}

    @override
    def owned(self) -> dict[str, tuple[int, int]]:
        """Always refused: a piece may be many ranges; use ``shard_map()``."""
        self._refuse_ranges("owned")

    @override
    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """Always refused: a piece may be many ranges; use ``shard_map()``."""
        self._refuse_ranges("resident_params")

    def _refuse_ranges(self, method: str) -> NoReturn:
        raise NotImplementedError(f"{method}: a piece of strategy {self.name!r} may be many ranges; use shard_map()")

    @override
    def _parameter_holdings(self) -> Iterator[Holding]:
        for name, param in self.params.items():
            yield from _pieces(Role.PARAMETER, param, param, name)

    @override
    def _gradient_holdings(self) -> Iterator[Holding]:
        for name, param in self.params.items():
            if param.grad is not None:
                yield from _pieces(Role.GRADIENT, param.grad, param, name)

    @override
    def _state_holdings(self) -> Iterator[Holding]:
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    yield from _pieces(Role.OTHER if key == "step" else Role.OPTIMIZER_STATE, value, param, name)


def _pieces(role: Role, tensor: Tensor, param: Tensor, name: str) -> Iterator[Holding]:
    """What this rank has of a tensor that is distributed like its parameter: one piece for each range of elements."""
    from shardlab.engines.peers.dtensors import local, ranges

    own = local(tensor)
    if role is Role.OTHER or own.shape != local(param).shape:
        yield Holding(role, own)
        return
    spans = ranges(param)
    for span, part in zip(spans, own.reshape(-1).chunk(len(spans)) if spans else (), strict=True):
        yield Holding(role, part, name, span)
