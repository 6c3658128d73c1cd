"""What ``torchrun`` (or a cluster's own launcher) told this process about its place."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class TorchrunEnv:
    """This process's place among all processes, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def torchrun_env() -> TorchrunEnv | None:
    """The place torchrun gave this process; None where no launcher started it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    if "TORCHELASTIC_RUN_ID" not in os.environ and not all(name in os.environ for name in names):
        return None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A launcher that does not tell the local place has one host: anything else needs LOCAL_RANK for its devices.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return TorchrunEnv(rank, world_size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
