"""The same script in one process: a group of one, the weights of rank 0, the rows of one rank, its optimizer's options.

Each step begins with the weights that the ranks had, so that a step is judged by itself; and the optimizer is given
the gradients that the ranks stepped, so that what the step makes of them is judged apart from how they were made.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint, device_mesh, distributed_c10d
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.fsdp import FSDPModule

from shardlab.comm.mesh import Mesh
from shardlab.engines.any_engine import AnyEngine
from shardlab.engines.plain_mode import nothing
from shardlab.launch import RankPool
from shardlab.recording.global_hooks import replaced
from shardlab.same.capture import Capture
from shardlab.same.notes import Backward, Known, Notes, Part, Step, factor, kept
from shardlab.same.pieces import Pieces, part_of
from shardlab.same.rows import RowsAgain
from shardlab.same.steps import Enough
from shardlab.same.wholes import by_name, place_by_hand, whole


class Alone(Capture):
    """A single process of a script.

    Args:
        rows: of a rank.
        notes: of this process.
        ranks: notes of all ranks.
        options: see ``Capture``; its rank is the one whose rows these are.
    """

    keeps_local = True

    def __init__(self, rows: RowsAgain, notes: Notes, ranks: list[Notes], **options: Any) -> None:
        super().__init__(rows, notes, **options)
        self._ranks = ranks
        self._latest: list[Part] = []

    def pieces_of(self, root: nn.Module | AnyEngine, prefix: str) -> Pieces:
        """By the ranks' names: these may have a wrapper that the script leaves out in one process."""
        pieces, theirs = super().pieces_of(root, prefix), self._ranks[0].shapes
        names = [part.name.removeprefix(prefix) for part in pieces.weights()]
        for wrapped in () if all(prefix + name in theirs for name in names) else theirs:
            inner = wrapped.removeprefix(prefix).removesuffix(names[0])
            if wrapped.endswith(f".{names[0]}") and all(prefix + inner + name in theirs for name in names):
                return super().pieces_of(root, prefix + inner)
        return pieces

    def begin(self, pieces: Pieces) -> None:
        """Put the weights of rank 0 in place."""
        names = {name for names in pieces.names.values() for name in names}
        steps = self._theirs()
        place_by_hand(self._ranks, {part.name: part.shape for part in pieces.weights()})
        known = [[part for part in step.weights if part.name in names] for step in steps]
        if missing := sorted(names - {part.name for parts in known for part in parts}):
            self.refuse(f"in one process a module has parameters that no rank has, first {missing[0]!r}")
        _write(pieces.weights(), known, 0)

    def begin_inside(self, pieces: Pieces) -> None:
        """Put the buffers of the rank in place."""
        known = (part_of(name, one) for name, one in self._theirs()[self._rank].buffers.items())
        _write((part_of(name, one) for name, one in pieces.buffers.items()), [known], 0)

    def _theirs(self) -> list[Step]:
        """The same step of all ranks."""
        number = len(self.notes.steps)
        if any(number >= len(rank.steps) for rank in self._ranks):
            raise Enough
        return [rank.steps[number] for rank in self._ranks]

    def brought(self, backward: Backward, before: Known) -> None:
        """Note what a backward has left, and what it has added."""
        self._latest = [part._replace(value=kept(part.value)) for part in self._gradients()]
        backward.brought = [
            part._replace(value=kept(part.value - before[part.key].cpu())) if part.key in before else part
            for part in self._latest
        ]

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer what the ranks stepped."""
        step, theirs = self.step, self._theirs()
        if self._latest and not self.has_engines:
            # What this optimizer does not step may be scaled later, or belong to another loss.
            if step.gradients is not self._latest:
                own = [part for part in step.gradients if part.name in step.names]
                by = factor(self._latest, own)
                # What is clipped and no multiple, as where a buffer adds up steps, is judged by what backward brought.
                step.scale = by if not step.clipped or _is_multiple(self._latest, own, by) else 1.0
            step.gradients = self._latest
        stepped = (part for part in self._gradients() if part.name in step.names)
        _write(stepped, [one.stepped for one in theirs], self._rank)
        options = theirs[self._rank].options
        if len(options) == len(optimizer.param_groups):
            for group, given in zip(optimizer.param_groups, options, strict=True):
                group.update(given)


def _is_multiple(before: Iterable[Part], after: Iterable[Part], by: float) -> bool:
    known = {part.key: part.value for part in before}
    both = [(known[part.key] * by, part.value) for part in after if part.key in known]
    return all(float((one - other).norm()) <= 1e-3 * float(other.norm()) for one, other in both)


def _write(parts: Iterable[Part], ranks: Sequence[Iterable[Part]], rank: int) -> None:
    """Let pieces be those of wholes, as far as there are some: as a rank has them, or else another. One by one."""
    known = by_name(ranks)
    with torch.no_grad():
        for part in parts:
            if part.name in known:
                views = whole(part.name, known[part.name])
                part.value.copy_(part.of(next(one for one in (views[rank], *views) if one is not None)))


@contextlib.contextmanager
def in_a_group_of_one() -> Iterator[None]:
    """Inside, meshes and groups of a script that have fixed sizes have one rank, and nothing is saved."""

    def mesh(plain: Callable[..., Any], device_type: str, mesh_shape: tuple[int, ...], **kwargs: Any) -> Any:
        return plain(device_type, tuple(1 for _ in mesh_shape), **kwargs)

    def group(plain: Callable[..., Any], ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        return plain(None if ranks is None else [0], *args, **kwargs)

    def ours(plain: Callable[..., None], made: Mesh, axes: dict[str, int], **options: Any) -> None:
        plain(made, dict.fromkeys(axes, 1), **options | {"ranks": None})

    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        (Mesh, "__init__", ours),
        (RankPool, "__init__", lambda plain, pool, _, **options: plain(pool, 1, **options)),
        (FSDPModule, "set_requires_gradient_sync", nothing),  # so that each backward shows what it brings
        *((owner, "init_device_mesh", mesh) for owner in (device_mesh, dist)),
        *((owner, "new_group", group) for owner in (distributed_c10d, dist)),
        *((owner, "save", _saved) for owner in (torch, checkpoint, state_dict_saver)),
        *((owner, "async_save", _saved) for owner in (checkpoint, state_dict_saver)),
    ]
    with contextlib.ExitStack() as stack:
        for one in instead:
            stack.enter_context(replaced(*one))
        yield


def _saved(*_: object, **__: object) -> Future[None]:
    """In place of a checkpoint: that of the ranks stays."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """As torchrun gives it to a rank of one host."""
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) | {"GROUP_RANK": "0"}
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(num_ranks))
    kept = {name: one for name, one in os.environ.items() if not name.startswith("TORCHELASTIC")}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return kept | threads | numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
