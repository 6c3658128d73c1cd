"""Full tensors from stretches on several ranks, in a few large messages.

First every rank announces what it has (names, shapes, ranges). Then each message carries the stretches of many tensors
of one dtype, rank by rank, and one tensor after another for each rank. So no tensor needs a collective of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.comm.coalesced import packed
from shardlab.comm.communicator import Communicator
from shardlab.comm.same_on_all_ranks import share_json
from shardlab.comm.slices import merge
from shardlab.engines.any_engine import AnyEngine
from shardlab.engines.checkpoint.held_stretches import TensorShard, gradient_shards, is_counter, shape_of
from shardlab.vocabulary import dtype_name

Key = tuple[str, str]  # parameter name, key in its state


class Stretch(NamedTuple):
    """A ``TensorShard`` without its values."""

    name: str
    key: str
    shape: list[int]
    dtype: str
    device: str  # type of device: step counters stay on the CPU
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return prod(self.shape) * itemsize


def gather_whole(engine: AnyEngine, shards: Iterable[TensorShard], *, tag: str) -> dict[Key, Tensor]:
    """Copies of tensors of the whole model by name and key, the same on every rank; collective.

    Args:
        engine: the one whose parameters they belong to.
        shards: what this rank has of them.
        tag: of the collectives.
    """
    sharded_over, spread = engine.sharded_over, engine.spread_over()
    first = sharded_over is None or sharded_over.rank == 0
    # Each tensor once, from the first of the ranks that hold it alike; of a tensor-parallel model each slice once.
    mine = [shard for shard in shards if first or sharded_over in spread[shard.name]]
    full = gather_shards(mine, sharded_over, engine.mesh.device, tag=tag)
    # In the order of the messages, the same on all ranks: merging slices is collective too.
    return {
        (name, key): _merged(engine, name, value, tag=f"{tag}: {key} of {name}") for (name, key), value in full.items()
    }


def full_gradients(engine: AnyEngine) -> dict[str, Tensor | None]:
    """See ``Engine.full_gradients``; the gradients must already be means."""
    full = gather_whole(engine, gradient_shards(engine), tag="full gradients")
    by_name = {name: gradient for (name, _), gradient in full.items()}
    return {name: by_name.get(name) for name in engine.params}


def gather_shards(
    mine: Sequence[TensorShard], comm: Communicator | None, device: torch.device, *, tag: str
) -> dict[Key, Tensor]:
    """Copies of full tensors by name and key, the same on every rank; collective.

    Args:
        mine: what this rank has, each tensor once.
        comm: the ranks that have the rest; None if this rank has everything.
        device: where tensors of ``comm`` are.
        tag: of the collectives.
    """
    if comm is None:
        return {(shard.name, shard.key): shard.tensor.clone().view(shard.shape) for shard in mine}
    by_rank = [
        {(name, key): Stretch(name, key, *rest) for name, key, *rest in described}
        for described in share_json([comm], device, [_describe(shard) for shard in mine])
    ]
    for key in {key for described in by_rank for key in described}:
        held = [described[key] for described in by_rank if key in described]
        if is_counter([(stretch.shape, stretch.start, stretch.stop) for stretch in held]):
            for described in by_rank:
                if key in described and described.pop(key).start == 0:
                    described[key] = held[0]._replace(shape=[1], start=0, stop=1)
    own = {(shard.name, shard.key): shard.tensor for shard in mine if (shard.name, shard.key) in by_rank[comm.rank]}
    full: dict[Key, Tensor] = {}
    for keys in _messages(by_rank):
        full.update(_gather_message(keys, by_rank, own, comm, device, tag))
    return full


def _merged(engine: AnyEngine, name: str, value: Tensor, *, tag: str) -> Tensor:
    if engine.tensor_comm is None or name not in engine.slices or tuple(value.shape) != shape_of(engine, name):
        return value
    return merge(value, engine.slices[name], engine.tensor_comm, tag=tag)


def _describe(shard: TensorShard) -> Stretch:
    dtype, kind = dtype_name(shard.tensor.dtype), shard.tensor.device.type
    return Stretch(shard.name, shard.key, list(shard.shape), dtype, kind, shard.start, shard.stop)


def _messages(by_rank: Sequence[Mapping[Key, Stretch]]) -> list[list[Key]]:
    """Keys that are sent together, message by message."""
    # From what all ranks announced, in the order of the ranks: so every rank makes the same messages.
    known = {key: stretch for described in by_rank for key, stretch in described.items()}
    return packed(known, lambda key: known[key].dtype, lambda key: known[key].num_bytes)


def _gather_message(
    keys: Sequence[Key], by_rank: Sequence[Mapping[Key, Stretch]], own: Mapping[Key, Tensor], comm: Communicator,
    device: torch.device, tag: str,
) -> dict[Key, Tensor]:  # fmt: skip
    stretches = [[described[key] for key in keys if key in described] for described in by_rank]
    sizes = [sum(stretch.stop - stretch.start for stretch in held) for held in stretches]
    bounds = tuple(accumulate(sizes, initial=0))
    dtype: torch.dtype = next(getattr(torch, stretch.dtype) for held in stretches for stretch in held)
    buffer = torch.empty(bounds[-1], dtype=dtype, device=device)
    parts = [own[key].to(device) for key in keys if key in own]
    # A rank that has nothing of these tensors joins all the same: the others wait for it.
    chunk = torch.cat(parts) if parts else buffer[:0]
    comm.all_gather(buffer, chunk, bounds=bounds, tag=tag).wait()
    # Copied out of the buffer: it may have 64 MiB, and any view of it would keep all of it in memory.
    full: dict[Key, Tensor] = {}
    place = 0
    for stretch in (stretch for held in stretches for stretch in held):
        key = (stretch.name, stretch.key)
        if key not in full:
            place_on = device if stretch.device == device.type else "cpu"
            full[key] = torch.empty(stretch.shape, dtype=dtype, device=place_on)
        numel = stretch.stop - stretch.start
        full[key].view(-1)[stretch.start : stretch.stop] = buffer[place : place + numel]
        place += numel
    return full
