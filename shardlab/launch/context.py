"""Where a function runs when it runs in a rank: ``current()``."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shardlab.launch.hang_board import BoardWriter
from shardlab.launch.placement import Placement, TorchrunEnv, place, torchrun_env


def no_emit(message: object) -> None:
    """Drop ``message``: there is no parent to send it to."""


@dataclass(frozen=True)
class RankContext:
    """The surroundings of a rank.

    Attributes:
        rank: this rank, from 0.
        world_size: number of ranks.
        device: where this rank's tensors belong.
        placement: devices and backend of all ranks.
        board: this rank's slot of the hang board, an observer for communicators; None under torchrun.
        emit: send a progress message to the parent's ``on_message`` while the function runs; not from a child process.
    """

    rank: int
    world_size: int
    device: torch.device
    placement: Placement
    board: BoardWriter | None
    emit: Callable[[object], None]


class _Process:
    """A process is one rank for its whole life and for all of its threads."""

    context: RankContext | None = None


def current() -> RankContext:
    """The context of the rank this code runs in.

    Raises:
        RuntimeError: this process is not a rank.
    """
    if _Process.context is None:
        env = torchrun_env()
        if env is None:
            raise RuntimeError(
                "current(): this process is not a rank; call it in a function run by RankPool or launch()"
            )
        enter(torchrun_context(env, "auto"))
        return current()
    return _Process.context


def enter(context: RankContext) -> None:
    """Make this process the rank that ``context`` says."""
    _Process.context = context


def is_inside_rank() -> bool:
    """Whether this process is a rank that a pool started."""
    return _Process.context is not None and torchrun_env() is None


def torchrun_context(env: TorchrunEnv, device: str) -> RankContext:
    """The context of a process that torchrun started; every host is taken to be like this one."""
    local = place(env.local_world_size, device)
    rank_device = local.devices[env.local_rank]
    # devices[i] of other hosts is a guess by symmetry; this rank's own entry is exact.
    devices = tuple(local.devices[rank % env.local_world_size] for rank in range(env.world_size))
    devices = (*devices[: env.rank], rank_device, *devices[env.rank + 1 :])
    placement = replace(local, world_size=env.world_size, devices=devices)
    return RankContext(env.rank, env.world_size, torch.device(rank_device), placement, None, no_emit)
