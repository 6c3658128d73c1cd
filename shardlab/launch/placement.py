"""Where ranks run: which device each gets, which backend sends for them, and what torchrun says of this process.

=====================  =======  ======  ======================================================
this machine           backend  staged  why
=====================  =======  ======  ======================================================
a GPU for every rank   nccl     no      the fast path
no GPU                 gloo     no      CPU tensors, through shared memory or over loopback
fewer GPUs than ranks  gloo     yes     ranks share GPUs; NCCL refuses two ranks on one GPU
the same, NCCL told    nccl     no      from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1
=====================  =======  ======  ======================================================
"""

import os
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

MOST_RANKS = 1024  # that one machine starts: each is a process with a torch of its own
DEVICES = ("auto", "cpu", "cuda")
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own switch, in the environment; an NCCL before 2.30 refuses the ranks
_GPU_OF = "shardlab/gpu of rank {}"


@dataclass(frozen=True)
class Placement:
    """One device per rank and the backend between them.

    Attributes:
        world_size: number of ranks.
        device_type: ``cpu`` or ``cuda``, the same for all ranks.
        backend: ``gloo`` or ``nccl``.
        devices: one torch device string per rank, for example ``("cuda:0", "cuda:1")``.
        staged: collectives of CUDA tensors go through pinned host memory.
        banner: a notice to print before the first run; None if none is needed.
    """

    world_size: int
    device_type: str
    backend: str
    devices: tuple[str, ...]
    staged: bool = False
    banner: str | None = None

    def __post_init__(self) -> None:
        assert len(self.devices) == self.world_size, "one device per rank"


def place(world_size: int, device: str = "auto") -> Placement:
    """Choose devices and backend for ``world_size`` ranks on this machine. CUDA is not initialised here.

    Args:
        world_size: number of ranks, at least 1.
        device: ``auto`` (GPUs where there are any), ``cpu`` or ``cuda``.

    Raises:
        ValueError: ``world_size`` below 1 or too large, an unknown ``device``, or ``cuda`` on a machine without a GPU.
    """
    check_world_size(world_size)
    if world_size > MOST_RANKS:
        raise ValueError(f"world_size: {world_size} is given; one machine starts at most {MOST_RANKS} ranks")
    if device not in DEVICES:
        raise ValueError(f"device: {device!r} is not one of {', '.join(DEVICES)}")
    # device_count asks the driver's management library; it leaves this process free of a CUDA context.
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and num_gpus == 0:
        raise ValueError(
            "device: 'cuda' is given, but torch sees no GPU on this machine; allowed values here are auto, cpu"
        )
    if num_gpus == 0:
        return Placement(world_size, "cpu", "gloo", ("cpu",) * world_size)
    return _on_gpus(world_size, num_gpus)


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless ``world_size`` is an integer of at least 1."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size: {world_size!r} is given; allowed values are integers from 1")


def _on_gpus(world_size: int, num_gpus: int) -> Placement:
    devices = tuple(f"cuda:{rank % num_gpus}" for rank in range(world_size))
    return _sending(Placement(world_size, "cuda", "nccl", devices), num_gpus)


def _sending(placement: Placement, num_gpus: int) -> Placement:
    """By NCCL if every rank has one of the GPUs, or if NCCL lets ranks share; else staged."""
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    share = f"{placement.world_size} ranks share {gpus}" if num_gpus < placement.world_size else None
    if not dist.is_nccl_available():
        why = "this torch is built without NCCL"
    elif share is not None and os.environ.get(SHARING) != "1":
        why = f"{share} (NCCL refuses two ranks on one GPU)"
    else:
        banner = share and f"{share} and send by NCCL ({SHARING}=1): they take turns, so each computes more slowly"
        return replace(placement, backend="nccl", staged=False, banner=banner)
    banner = f"{why}: collectives are staged through pinned host memory, so their times are not NCCL's"
    return replace(placement, backend="gloo", staged=True, banner=banner)


class Store(Protocol):
    """Keys and values that all ranks share, as torch's stores are."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read it; waits until it has been written."""


def agreed(placement: Placement, rank: int, gpu: str, store: Store) -> Placement:
    """The placement once every rank has said which GPU it has: by NCCL if no two have the same.

    One process cannot tell from the GPUs it sees: under ``srun`` it may see its own GPU only, or all GPUs of a host
    that runs some of the ranks. Every rank calls this.

    Args:
        placement: what this rank sees; ``devices[rank]`` is its own.
        rank: of this process.
        gpu: a unique id of this rank's GPU, such as its UUID.
        store: shared by all ranks.
    """
    # Before anything is read: each get waits until the rank it asks for has written.
    store.set(_GPU_OF.format(rank), f"{placement.devices[rank]} {gpu}")
    found = [store.get(_GPU_OF.format(other)).decode().split(" ", 1) for other in range(placement.world_size)]
    devices, gpus = zip(*found, strict=True)
    return _sending(replace(placement, devices=devices), len(set(gpus)))


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
    # A launcher that does not set LOCAL_RANK is taken to use one host: on several, LOCAL_RANK must choose the devices.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return TorchrunEnv(rank, world_size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
