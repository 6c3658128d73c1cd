"""Torch's own engines behind the interface of ours: the same loop, the same tables, the same tests.

They send through a group that notifies the observers of the mesh's axis (``comm.torch_engine_groups``), so their
collectives are recorded like ours. Torch reduces the gradients: they are means when ``loss.backward()`` returns. What
``no_sync()`` has left is sent by the next backward alone: clip and step before it use each rank's own, as in torch.
Nor is torch's clipping of slices refused here.
Torch's parts are imported when one of these engines is built, since that takes half a second.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm import BaseMesh
from shardlab.comm.torch_engine_groups import TorchGroup, torch_group
from shardlab.engines.base import Engine
from shardlab.engines.checks import check_types
from shardlab.engines.step_tensors import OptimizerFn
from shardlab.vocabulary import Collective, MeshAxis

STATE_IS_TORCHS = (
    "keeps its optimizer state in torch's own form; use full_state_dict() for the parameters and "
    "torch.distributed.checkpoint for the rest, or a strategy of shardlab"
)
"""``no_checkpoints`` of a peer whose optimizer state is in torch's own form."""


class Peer(Engine):
    """One of torch's own engines.

    Args:
        model: see ``Engine``.
        optimizer_fn: see ``Engine``.
        mesh: over all ranks of the default group; not None.
        observed: whether observers are told about its collectives; False gives torch its plain group, to time it.

    Raises:
        ValueError: the mesh leaves ranks out, emulates a link, or has several ranks on a GPU.
    """

    axis: ClassVar[str] = MeshAxis.DATA
    sends: ClassVar[Mapping[Collective, str]]
    """What each collective of a training step is for; in the tag, its number in the step follows."""

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None, *, observed: bool = True
    ) -> None:
        check_types(model, mesh)
        if mesh is None:
            raise ValueError(f"mesh: {self.name!r} needs one, over all ranks of a RankPool, launch or torchrun")
        self._occasion = "setup"
        self._counts: Counter[Collective] = Counter()
        # Weakly: the engine holds its group, and torch holds groups in C++, where Python's collector sees no cycles.
        engine = weakref.proxy(self)
        # Before the base, whose construction already builds torch's engine over this group.
        self._group = torch_group(mesh, self.axis, (lambda op: engine._tag(op)) if observed else None)
        super().__init__(model, optimizer_fn, mesh)
        # Only now: what was sent until here is no part of a training step.
        self._occasion = ""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, through torch's engine."""
        # The numbers in the tags begin again with each forward.
        self._counts.clear()
        return self._forward(*args, **kwargs)

    @override
    def step(self) -> None:
        """One optimizer step; afterwards the parameters are equal on all ranks."""
        self._counts.clear()
        super().step()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @override
    def _gather_gradients(self) -> dict[str, Tensor | None]:
        return {name: None if param.grad is None else param.grad.clone() for name, param in self.params.items()}

    @override
    def _reduce_gradients(self) -> None:
        """The gradients are already means, and torch's C++ code has waited for them: record when it did."""
        if isinstance(self._group, TorchGroup):
            self._group.end_waits()

    @override
    def _note_local(self) -> None:
        """Nothing: a plain ``loss.backward()``, which makes means of them, goes unnoticed here."""

    @override
    def guard_slices(self) -> None:
        """Nothing, for the same reason."""

    @override
    def _watch_params(self) -> None:
        """No hooks: torch's engines have their own."""

    @contextlib.contextmanager
    def _for(self, occasion: str) -> Iterator[None]:
        """Inside, collectives are tagged with the occasion."""
        before, self._occasion = self._occasion, occasion
        try:
            yield
        finally:
            self._occasion = before

    def _tag(self, op: Collective) -> str:
        if self._occasion:
            return self._occasion
        number, self._counts[op] = self._counts[op], self._counts[op] + 1
        return f"{self.sends.get(op, op)} {number}"
