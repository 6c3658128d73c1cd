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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardlab.comm.mesh import check_transport
from shardlab.comm.torch_engine_groups import check_torch_engines
from shardlab.launch.hang_board import BoardWriter

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
    devices = tuple(f"cuda:{rank % num_gpus}" for rank in range(world_size))
    return _sending(Placement(world_size, "cuda", "nccl", devices), num_gpus)


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless ``world_size`` is an integer of at least 1."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size: {world_size!r} is given; allowed values are integers from 1")


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


def agreed(placement: Placement, rank: int, gpu: str, store: Any) -> Placement:
    """The placement once every rank has said which GPU it has: by NCCL if no two have the same.

    One process cannot tell from the GPUs it sees: under ``srun`` it may see its own GPU only, or all GPUs of a host
    that runs some of the ranks. Every rank calls this.

    Args:
        placement: what this rank sees; ``devices[rank]`` is its own.
        rank: of this process.
        gpu: a unique id of this rank's GPU, such as its UUID.
        store: of torch, shared by all ranks.
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


def check_ranks(
    ranks: int, device: str, strategies: Sequence[str], transport: str | None, link: str | None = None
) -> None:
    """Check that ranks can start here, that they can send as asked, and that torch's own engines can, if named.

    Args:
        ranks: their number, at least 1.
        device: see ``RankPool``.
        strategies: names from ``engines.STRATEGIES``.
        transport: see ``Mesh``.
        link: see ``Mesh``.

    Raises:
        ValueError: they cannot; the message names the field.
    """
    env = torchrun_env()
    if env is not None and env.world_size != ranks:
        raise ValueError(f"ranks: {ranks}, but torchrun started {env.world_size} processes; the numbers must be equal")
    if env is None and ranks > MOST_RANKS:
        raise ValueError(f"ranks: {ranks} was given; one machine starts at most {MOST_RANKS}")
    placement = place(ranks, device)
    check_transport(placement.backend, transport, link)
    # Under torchrun a process may see its own GPU alone; there the engines themselves refuse.
    if env is None and any(strategy.startswith("torch_") for strategy in strategies):
        check_torch_engines(placement.device_type, placement.backend)


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


def make_group(context: RankContext, store: Any, timeout: timedelta) -> None:
    """Make the default process group, for the context's device; ranks find each other by torch's ``store``."""
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)  # before the group: NCCL takes the current device
    dist.init_process_group(
        context.placement.backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout,
        # NCCL then connects now, and not in the middle of the first step.
        device_id=context.device if context.placement.backend == "nccl" else None,
    )  # fmt: skip
