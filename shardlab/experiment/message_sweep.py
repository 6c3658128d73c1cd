"""Time of a message against its size, for any verb of the communicator or a function made of them.

The ranks meet before each message, and the time is the slowest rank's, from the call to the usable result. Of several
repetitions the best is kept: on a shared machine it repeats to a few percent where a mean does not. All sizes take
turns, so that a slow moment of the machine does not meet all repetitions of one.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import pandas as pd
import torch

from shardlab.comm import Communicator
from shardlab.comm.mesh import Mesh
from shardlab.launch import RankPool, current

Op = Callable[[Communicator, torch.Tensor], object]
NUM_WARM_UPS = 2
ELEMENT_BYTES = 4  # float32


def message_sweep(ops: Mapping[str, Op], num_bytes: Sequence[int], pool: RankPool, repeats: int = 10) -> pd.DataFrame:
    """Time each op on float32 tensors of each size over all ranks of the pool.

    Args:
        ops: by name, called as ``op(communicator, tensor)``; an op returns when its result may be used, so it waits.
        num_bytes: sizes of the tensor, multiples of 4 times the number of ranks.
        pool: the ranks.
        repeats: how often each message is timed, at least 1.

    Returns:
        One row per op and size, as ``analysis.with_fit`` takes them: ``op``, ``bytes``, ``time_us``, ``group_size``.

    Raises:
        ValueError: no ops, a size that is no such multiple, or ``repeats`` below 1.
    """
    multiple = ELEMENT_BYTES * pool.world_size
    if not ops:
        raise ValueError("ops: at least one is needed")
    if not num_bytes or any(size < 1 or size % multiple for size in num_bytes):
        raise ValueError(f"num_bytes: multiples of {multiple} above 0 are needed, got {list(num_bytes)}")
    if repeats < 1:
        raise ValueError(f"repeats: {repeats} is below 1")
    times_us = torch.tensor(pool.run(_time_all, dict(ops), list(num_bytes), repeats), dtype=torch.float64)
    slowest_rank = times_us.amax(dim=0)
    best = slowest_rank.amin(dim=-1).flatten().tolist()
    keys = [(name, size) for name in ops for size in num_bytes]
    return pd.DataFrame(
        [
            {"op": name, "bytes": size, "time_us": time_us, "group_size": pool.world_size}
            for (name, size), time_us in zip(keys, best, strict=True)
        ]
    )


def _time_all(rank: int, ops: dict[str, Op], num_bytes: list[int], repeats: int) -> list[Any]:
    """Microseconds by op, size and repetition, on this rank."""
    del rank
    context = current()
    with Mesh({"data": context.world_size}, device=context.device) as mesh:
        tensors = [torch.zeros(size // ELEMENT_BYTES, device=mesh.device) for size in num_bytes]
        for op in ops.values():
            for tensor in tensors:
                for _ in range(NUM_WARM_UPS):
                    op(mesh.data, tensor)
        rounds = [[[_time(op, mesh, tensor) for tensor in tensors] for op in ops.values()] for _ in range(repeats)]
    return torch.tensor(rounds, dtype=torch.float64).permute(1, 2, 0).tolist()


def _time(op: Op, mesh: Mesh, tensor: torch.Tensor) -> float:
    """Microseconds of one message on this rank."""
    mesh.data.barrier().wait()
    _synchronise(mesh.device)
    began_ns = perf_counter_ns()
    op(mesh.data, tensor)
    _synchronise(mesh.device)
    return (perf_counter_ns() - began_ns) / 1e3


def _synchronise(device: torch.device) -> None:
    """On CUDA a wait only orders the streams; the time of a message ends when its bytes are there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
