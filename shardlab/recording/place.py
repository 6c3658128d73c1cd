"""What a rank knows of a record without asking the others: its number, the directory, the origin of time."""

import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from shardlab.launch.placement import torchrun_env


def claim(directory: Path, rank: int) -> None:
    """Make the directory of a record. The other ranks of this record may have begun to write: that is allowed.

    Raises:
        ValueError: it holds anything else, is a file, or cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ValueError(f"out: {directory} cannot be made: {error.strerror}; name another directory") from error
    of_others = {name for name in names if re.fullmatch(r"rank\d+\.journal", name) and name != journal_of(rank)}
    if names - of_others - {"manifest.json", "manifest.json.part"} or (rank == 0 and "manifest.json" in names):
        raise ValueError(f"out: {directory} holds another run; name a new or an empty directory")


def journal_of(rank: int) -> str:
    """The name of a rank's journal."""
    return f"rank{rank}.journal"


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
