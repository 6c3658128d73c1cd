"""Parameters cut into the ranges that an owner map of the learner's gives to each rank, and sent piece by piece."""

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from shardlab.comm import Communicator
from shardlab.exercises.exercise import Function

Ranges = Mapping[str, tuple[int, int]]
Flat = dict[str, Tensor]


class Pieces:
    """In a buffer the ranges of rank 0 come first, then those of rank 1, and so on: one chunk for each rank.

    Args:
        sizes: elements of each parameter.
        owners: the learner's ``zero1_owners``.
        comm: the data axis.
    """

    def __init__(self, sizes: Mapping[str, int], owners: Function, comm: Communicator) -> None:
        self._sizes, self._comm = dict(sizes), comm
        self._ranges: list[Ranges] = [owners(dict(sizes), comm.num_ranks, rank) for rank in range(comm.num_ranks)]
        chunks = (sum(stop - start for start, stop in ranges.values()) for ranges in self._ranges)
        self._bounds = tuple(accumulate(chunks, initial=0))

    @property
    def own_ranges(self) -> Ranges:
        """This rank's."""
        return self._ranges[self._comm.rank]

    def own(self, values: Mapping[str, Tensor]) -> Flat:
        """Copies of this rank's ranges of whole tensors."""
        return {name: values[name].reshape(-1)[start:stop].clone() for name, (start, stop) in self.own_ranges.items()}

    def reduce(self, values: Mapping[str, Tensor]) -> Flat:
        """This rank's ranges of the mean over ranks of whole tensors; one reduce-scatter."""
        buffer = torch.cat([
            values[name].reshape(-1)[start:stop]
            for ranges in self._ranges
            for name, (start, stop) in ranges.items()
        ])  # fmt: skip
        rank = self._comm.rank
        chunk = buffer.new_empty(self._bounds[rank + 1] - self._bounds[rank])
        self._comm.reduce_scatter(buffer, chunk, bounds=self._bounds, tag="gradients").wait()
        parts = chunk.div_(self._comm.num_ranks).split([stop - start for start, stop in self.own_ranges.values()])
        return dict(zip(self.own_ranges, parts, strict=True))

    def start_gather(self, shards: Mapping[str, Tensor]) -> Callable[[], Flat]:
        """Start an all-gather of all ranks' ranges; what is returned waits for it and gives whole, flat tensors.

        Elements that no rank owns come back as NaN, so that nobody trains on what happened to lie in memory.
        """
        like = next(iter(shards.values()), torch.zeros(0, dtype=torch.float64))
        buffer = like.new_empty(self._bounds[-1])
        chunk = torch.cat([like[:0].detach(), *(shard.detach() for shard in shards.values())])
        pending = self._comm.all_gather(buffer, chunk, bounds=self._bounds, tag="parameters")

        def whole() -> Flat:
            pending.wait()
            values = {name: buffer.new_full((size,), torch.nan) for name, size in self._sizes.items()}
            offset = 0
            for ranges in self._ranges:
                for name, (start, stop) in ranges.items():
                    values[name][start:stop] = buffer[offset : offset + stop - start]
                    offset += stop - start
            return values

        return whole
