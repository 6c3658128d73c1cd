"""Starts the processes of a comparison and waits for them: the ranks, then for each one a process alone."""

import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

import torch

from shardlab.launch.placement import TorchrunEnv
from shardlab.same.alone import environment
from shardlab.same.notes import Notes
from shardlab.same.process import ALONE, RANK, Job, ended_in, main, notes_in, read, run

GRACE_S = 20.0  # for the others, when a rank has ended
POLL_S = 0.05


def compared(job: Job, limit_s: float) -> tuple[list[Notes], list[Notes]]:
    """Run the script on all ranks, and alone with the rows of each; the notes of both."""
    with tempfile.TemporaryDirectory(prefix="shardlab-same-") as name:
        folder = Path(name)
        _run(job, folder, RANK, limit_s)
        ranks = read(folder, RANK, job.ranks)
        return ranks, _alone(job, folder, ranks, limit_s)


def under_torchrun(job: Job, env: TorchrunEnv, limit_s: float) -> tuple[list[Notes], list[Notes]] | None:
    """As ``compared``, where torchrun has started this process and the other ranks; None on all but rank 0.

    Raises:
        ValueError: ranks are on several hosts.
    """
    if env.local_world_size != env.world_size:
        raise ValueError("ranks are on several hosts, and their notes are files of one: start all of them on this host")
    # Of this start of torchrun, whose agent is the parent of all ranks.
    folder = Path(tempfile.gettempdir()) / f"shardlab-same-{os.getppid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    run(job, folder, RANK, env.rank)
    if env.rank != 0:
        return None
    sys.modules["__main__"] = ModuleType("__main__")  # a new process would import the script under this name
    try:
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and not all(ended_in(folder, rank).exists() for rank in range(job.ranks)):
            time.sleep(POLL_S)
        ranks = read(folder, RANK, job.ranks)
        return ranks, _alone(job, folder, ranks, limit_s)
    finally:
        shutil.rmtree(folder)


def _alone(job: Job, folder: Path, ranks: Sequence[Notes], limit_s: float) -> list[Notes]:
    """Run it alone with the rows of each rank, whose notes are in the folder."""
    if any(one.refused or not one.steps for one in ranks):
        return []
    _run(job, folder, ALONE, limit_s)
    return read(folder, ALONE, job.ranks)


def _run(job: Job, folder: Path, kind: str, limit_s: float) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "shardlab.same.process"])
    ports = _free_ports(job.ranks)
    started: list[ForkServerProcess] = []
    for rank in range(job.ranks):
        env = environment(rank, job.ranks, ports[0]) if kind == RANK else environment(0, 1, ports[rank])
        started.append(context.Process(target=main, args=(job, folder, kind, rank, env, str(Path.cwd()))))
        started[-1].start()
    try:
        _wait(started, limit_s, GRACE_S if kind == RANK else limit_s)
        cut = [rank for rank, process in enumerate(started) if process.is_alive()]
    finally:
        for process in started:
            process.kill()
            process.join()
    for rank in range(job.ranks):
        path = notes_in(folder, kind, rank)
        notes = torch.load(path, weights_only=False) if path.exists() else Notes(error="the process ended at once")
        if rank in cut:
            notes.error = "it did not end: it waits for something that does not come, or takes too long"
            notes.left_by_others = True
            torch.save(notes, path)
        elif not path.exists():
            torch.save(notes, path)


def _wait(started: Sequence[ForkServerProcess], limit_s: float, grace_s: float) -> None:
    """Until all have ended, or for a while longer where some have."""
    end = time.monotonic() + limit_s
    first = 0.0
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        time.sleep(POLL_S)
        if not first and any(not process.is_alive() for process in started):
            first = time.monotonic()
            end = min(end, first + grace_s)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
