"""Starts the processes of a comparison and waits for them: the ranks, then for each one a process alone."""

import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import prod
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from shardlab.launch.placement import TorchrunEnv
from shardlab.launch.processes import hidden_main
from shardlab.same.alone import environment
from shardlab.same.answer import UNKNOWN, Answer, answer, early
from shardlab.same.causes import in_forward, named
from shardlab.same.compare import Found, among
from shardlab.same.notes import Notes, UnlikeError
from shardlab.same.process import ALONE, RANK, TOGETHER, Job, main, read, run, write

GRACE_S = 20.0  # for the others, when a rank has ended
POLL_S = 0.05
FULL = ("out of memory", "t allocate memory", "MemoryError", "exit code -9")
"""What a process says that memory has not sufficed for, or is said of it when the system has ended it."""


def judged(job: Job, limit_s: float) -> Answer:
    """Run the script on all ranks, and alone with the rows of each; say what differs."""
    with tempfile.TemporaryDirectory(prefix="shardlab-same-") as name:
        folder = Path(name)
        _run(job, folder, RANK, range(job.ranks), limit_s)
        return _judged(job, folder, limit_s)


def judged_under_torchrun(job: Job, env: TorchrunEnv, limit_s: float) -> Answer | None:
    """As ``judged``, where torchrun has started this process and the other ranks; None on all but rank 0.

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
    try:
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and not all(one.has_ended for one in read(folder, RANK, range(job.ranks))):
            time.sleep(POLL_S)
        _note_ends(folder, RANK, range(job.ranks), {})
        return _judged(job, folder, limit_s)
    finally:
        shutil.rmtree(folder)


def _judged(job: Job, folder: Path, limit_s: float) -> Answer:
    """Run it alone with the rows of each rank, whose notes are in the folder; and again where these do not suffice."""
    ranks = read(folder, RANK, range(job.ranks))
    if (said := early(ranks)) is not None:
        return said
    together = at_once(ranks)
    for first in range(0, job.ranks, together) if together else ():
        _run(job, folder, ALONE, range(first, min(first + together, job.ranks)), limit_s)
    alone = read(folder, ALONE, range(job.ranks))
    full = [one.error for one in alone if any(words in one.error for words in FULL)]
    if full or not together:
        return too_large(ranks, *full[:1])
    said = answer(ranks, alone)
    # One number is a count of rows or tokens, which a script does not count again for the rows of all ranks.
    sends = any(sent.numel > 1 for one in ranks for step in one.steps for sent in in_forward(step))
    for dim in (0, 1) if said.word == UNKNOWN and sends else ():
        _run(job, folder, TOGETHER, [dim], limit_s)
        again = answer(ranks, read(folder, TOGETHER, [dim]) * job.ranks, is_together=True)
        if again.word != UNKNOWN:
            return again
        # What ends a process on the rows of one rank may only be that it has not those of all.
        said = again if dim == 0 and any(one.error for one in alone) else said
    return said


def at_once(ranks: Sequence[Notes]) -> int:
    """How many processes alone fit into memory; 0 if none does."""
    return min(len(ranks), psutil.virtual_memory().available // max(_bytes(ranks)[1], 1))


def too_large(ranks: Sequence[Notes], why: str = "") -> Answer:
    """One process does not fit into memory, or has ended for that reason: what ranks have alike is compared."""
    (whole, needed), note = _bytes(ranks), "ranks agree with one another in weights, in what they step, and in buffers"
    why = why or f"{psutil.virtual_memory().available / 1e9:.3g} GB are free"
    why = f"one process with all {whole / 1e9:.3g} GB of parameters needs about {needed / 1e9:.3g} GB, and {why}"
    try:
        found = among(ranks)
    except UnlikeError as error:
        found, note = Found(), str(error)
    if rows := found.different:
        note = f"step {rows[0].step}: {rows[0].what} of {named(rows, found, ranks)} differ between ranks, which is "
        note += "right where they divide these parameters by hand"
    advice = "take fewer or smaller layers of the same kind, in which a mistake stays the same; and one axis at a "
    advice += "time: --ranks 2, with 2 ranks on that axis and 1 on each other"
    return Answer([(UNKNOWN, why), ("NEXT", advice), ("NOTE", note)], found.table)


def _bytes(ranks: Sequence[Notes]) -> tuple[int, int]:
    """All parameters, and what a process with them may need."""
    parts = {part.name: part for one in ranks for step in one.steps[:1] for part in step.weights}
    whole = sum(prod(part.shape) * part.value.element_size() for part in parts.values())
    needed = 5 * whole  # weights, gradients, twice as much of the optimizer, the gradient before a backward
    if in_memory(tempfile.gettempdir()):  # what each step and backward is noted by lies in files, here no other place
        needed += 2 * whole * sum(3 + len(step.backwards) for step in ranks[0].steps)
    return whole, needed


def in_memory(folder: str) -> bool:
    """Whether files there take memory, as those of a tmpfs do."""
    mounts = [one for one in psutil.disk_partitions(all=True) if Path(folder).is_relative_to(one.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda one: len(one.mountpoint)).fstype in ("tmpfs", "ramfs")


def _run(job: Job, folder: Path, kind: str, numbers: Sequence[int], limit_s: float) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "shardlab.same.process"])
    port = _free_port()
    started: dict[int, ForkServerProcess] = {}
    lives = [context.Pipe(duplex=False) for _ in numbers]  # each process ends when our end of its pipe closes
    for number, (life, _) in zip(numbers, lives, strict=True):
        # A group of one takes any port that is free then.
        env = environment(number, job.ranks, port) if kind == RANK else environment(0, 1, 0)
        started[number] = context.Process(target=main, args=(job, folder, kind, number, env, str(Path.cwd()), life))
    with hidden_main():  # of the command line or, under torchrun, the script
        for process in started.values():
            process.start()
    try:
        _wait(list(started.values()), limit_s, GRACE_S if kind == RANK else limit_s)
        died = {number: process.exitcode for number, process in started.items() if not process.is_alive()}
    finally:
        for life, ours in lives:
            ours.close()
            life.close()
        for process in started.values():
            process.kill()
            process.join()
    _note_ends(folder, kind, numbers, died)


def _note_ends(folder: Path, kind: str, numbers: Sequence[int], died: Mapping[int, int | None]) -> None:
    """Note of processes that have not come to their end what they did instead; ``died`` has the exit codes of some."""
    for number, notes in zip(numbers, read(folder, kind, numbers), strict=True):
        if not notes.has_ended:
            notes.error, notes.left_by_others = f"the process died (exit code {died.get(number)})", number not in died
            if notes.left_by_others:
                notes.error = "it did not end: it waits for something that does not come, or takes too long"
            write(notes, folder, kind, number)


def _wait(started: Sequence[ForkServerProcess], limit_s: float, grace_s: float) -> None:
    """Until all have ended, or for a while longer where some have."""
    end, have_ended = time.monotonic() + limit_s, False
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        time.sleep(POLL_S)
        if not have_ended and not all(process.is_alive() for process in started):
            have_ended, end = True, min(end, time.monotonic() + grace_s)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
