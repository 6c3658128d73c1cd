"""What a rank knows of a record without asking the others: its number, the directory, the origin of time."""

import os
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from shardlab.experiment.directory import OF_A_RANK, OF_FIRST, another, made
from shardlab.launch.placement import torchrun_env

_MANIFEST, _PART = "manifest.json", "manifest.json.part"


class Place(NamedTuple):
    """A process among those that are recorded."""

    rank: int
    num_ranks: int

    @classmethod
    def here(cls) -> "Place":
        """As torch's default group says if there is one, else as torchrun says, else alone."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        env = torchrun_env()
        return cls(0, 1) if env is None else cls(env.rank, env.world_size)


def claim(directory: Path, place: Place, *, overwrite: bool = False) -> None:
    """Make the directory of a record. The other ranks of this record may have begun to write: that is allowed.

    Args:
        directory: of the record.
        place: this rank; to overwrite, each rank removes its own files, and rank 0 also those of no current rank.
        overwrite: remove the record that is in it.

    Raises:
        ValueError: it holds anything else, is a file, or cannot be made. Then nothing was removed.
    """
    names = made(directory)
    owners = {name: int(found[1]) for name in names if (found := OF_A_RANK.fullmatch(name))}
    others = {name for name, rank in owners.items() if rank != place.rank}
    if overwrite and (foreign := sorted(names - owners.keys() - OF_FIRST)):
        raise ValueError(
            f"overwrite: {directory} also holds {', '.join(foreign[:3])}, which no record has; name another directory"
        )
    begun = {name for name in others if name.endswith(".journal")} | {_PART} | ({_MANIFEST} if place.rank else set())
    if not overwrite and names - begun:
        raise ValueError(f"out: {directory} holds {another(directory)}")
    if overwrite:
        of_none = {name for name, rank in owners.items() if rank >= place.num_ranks}
        for name in (owners.keys() - others) | (of_none | (OF_FIRST & names) if place.rank == 0 else set()):
            (directory / name).unlink(missing_ok=True)


def origin_ns(num_ranks: int) -> int:
    """Where times count from, in ``time.perf_counter_ns``: of several ranks on a host the start of their parent."""
    now_ns = time.perf_counter_ns()
    if num_ranks == 1:
        return now_ns
    stat = Path(f"/proc/{os.getppid()}/stat")
    if not stat.is_file():  # no Linux: here ranks may differ by the microseconds between two readings of a clock
        return now_ns - time.time_ns() + int(psutil.Process(os.getppid()).create_time() * 1e9)
    # The name, in brackets, may have spaces. Field 22 counts ticks of CLOCK_BOOTTIME, so for all ranks the same.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def directory_by_date() -> Path:
    """``runs/DATE``; under torchrun the date is that of its start, so that the ranks of a host have the same."""
    if torchrun_env() is None:
        return Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    began = psutil.Process(os.getppid()).create_time()
    return Path("runs") / datetime.fromtimestamp(int(began)).strftime("%Y%m%d-%H%M%S")
