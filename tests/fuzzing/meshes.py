"""The meshes of a rank of the pool, kept from scenario to scenario: to make one takes longer than a training step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab.comm.mesh import Mesh
from shardlab.launch import current
from tests.fuzzing.engines import EngineSpec

_KEPT: dict[Any, Mesh] = {}  # of this process; the same keys on every rank of its pool


class Meshes:
    """Meshes over some of a pool's ranks, and one over all of them beside the engines'.

    Args:
        rank: of the pool.
        num_ranks: of the pool.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._used: list[Any] = []
        self._of_torch: list[Mesh] = []
        if num_ranks > 1 and "control" not in _KEPT:
            _KEPT["control"] = Mesh({"data": num_ranks})

    def of(self, spec: EngineSpec) -> Mesh:
        """An engine's; collective over the pool. Torch's get a new one, for they make groups of their own in it."""
        ranks = spec.ranks(self.rank, self.num_ranks)
        if self.num_ranks == 1:
            return Mesh(dict(spec.axes))
        transport = None if dist.get_backend() == "nccl" else spec.transport
        if spec.name.startswith("torch"):
            self._of_torch.append(Mesh(dict(spec.axes), transport=transport))
            return self._of_torch[-1]
        key = (spec.axes, transport, spec.place)
        if key not in _KEPT:
            _KEPT[key] = Mesh(dict(spec.axes), ranks=ranks, transport=transport)
        self._used.append(key)
        return _KEPT[key]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, place by place; collective over the pool."""
        found = torch.tensor(values, dtype=torch.float64, device=current().device)
        if self.num_ranks > 1:
            _KEPT["control"].data.all_reduce(found, reduction="max", tag="answer").wait()
        return found.tolist()

    def close_those_of_torch(self) -> None:
        """Close them: each of their groups has threads, which turn even where nothing is sent."""
        while self._of_torch:
            self._of_torch.pop().close()

    def forget(self) -> None:
        """Keep none of those that have been asked for: something may be left in them."""
        for key in self._used:
            _KEPT.pop(key, None)


def close_all() -> None:
    while _KEPT:
        _KEPT.popitem()[1].close()
