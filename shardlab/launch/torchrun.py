"""The same pool on the group that ``torchrun`` made: this process is one rank, the others were started by torchrun."""

import atexit
import faulthandler
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardlab.comm import become_rank, leave_group
from shardlab.comm.observed_group import Process
from shardlab.comm.rank_life import make_patient_group
from shardlab.comm.signed_messages import all_gather_bytes
from shardlab.launch.messages import Payload, pack, unpack
from shardlab.launch.placement import Placement, TorchrunEnv, agreed, enter, make_group, no_emit, torchrun_context

T = TypeVar("T")


class _End(NamedTuple):
    """How a rank has left a call of ``run``: with a result, or with an exception of this name."""

    call: int
    result: Payload | None = None
    failure: str = ""

    def __str__(self) -> str:
        left = f"raised {self.failure} in" if self.failure else "returned from"
        return f"{left} call {self.call}"


class _Process:
    """What holds for all pools of this process, since they share the group that torchrun made.

    Attributes:
        num_calls: calls of ``run`` so far.
        failed: the last call, where it raised and the other ranks have not been asked yet.
        may_go_on: whether, as far as is known, all ranks have left every call alike.
    """

    num_calls: int = 0
    failed: _End | None = None
    may_go_on: bool = True


class TorchrunRanks:
    """All ranks of a torchrun job, seen from one of them.

    Raises:
        ValueError: ``world_size`` is not the number of processes torchrun started.
    """

    def __init__(self, env: TorchrunEnv, world_size: int, device: str, timeout_s: float, limit_s: float | None) -> None:
        if world_size != env.world_size:
            raise ValueError(
                f"world_size: {world_size} is given, but torchrun started {env.world_size} ranks; "
                f"write {env.world_size}, or start torchrun with {world_size}"
            )
        self._context = torchrun_context(env, device)
        self._timeout_s, self._limit_s = timeout_s, limit_s
        self._store: Any = None  # of torch, which does not export its type

    @property
    def placement(self) -> Placement:
        """The devices and the backend of all ranks; on GPUs exact once ``start`` has returned."""
        return self._context.placement

    def start(self) -> None:
        """Make this process a rank; the group is made if the script has not made it.

        Communicates the name of an exception, once, where the last call has raised one.

        Raises:
            RuntimeError: a call has failed, and not on all ranks alike; the script has destroyed the default group.
        """
        _require_group()
        if not _Process.may_go_on:
            # The others may still be in that call, or have left collectives of it, which would meet those of the next.
            raise RuntimeError(
                "RankPool: its ranks have left an earlier call in different ways; under torchrun let the exception end "
                "this process, so that torchrun ends the job"
            )
        if _Process.failed is not None:
            _ends_of_all(_Process.failed)
        if not dist.is_initialized():
            self._find_store()
        # Only after _find_store: on GPUs the ranks agree there on the backend, which the context holds.
        enter(self._context)
        become_rank(self._context.device, timedelta(seconds=self._timeout_s))
        if self._context.device.type == "cuda":
            torch.cuda.set_device(self._context.device)  # before the group: NCCL takes the current device
        if not dist.is_initialized():
            # The first optimizer imports this module, whose functions have the default group as a default argument if
            # it exists by then; leave_group could then never end that group.
            importlib.import_module("torch.distributed.nn")
            make_group(self._context, self._store, timedelta(seconds=self._timeout_s))
            # At exit, not when a pool closes: torchrun's store would give a second group the addresses of the first.
            atexit.register(leave_group)
        make_patient_group()

    def _find_store(self) -> None:
        """Connect to the store of all ranks, and on GPUs agree with them on the backend."""
        context = self._context
        self._store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=self._timeout_s)))
        if context.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(context.device).uuid)
            placement = agreed(context.placement, context.rank, gpu, self._store)
            self._context = replace(context, placement=placement)

    def run(
        self, fn: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object],
        on_message: Callable[[int, object], None] | None,
    ) -> list[T]:  # fmt: skip
        """Call ``fn(rank, ...)`` here, as every other process does; the results of all, in rank order.

        Communicates the pickled results, once. An exception leaves as it is: this process ends with it, and torchrun
        then ends the others. A script that catches it can make a further call only if the exception, other than an
        interrupt, has come on all ranks, with the same name. Messages reach ``on_message`` on rank 0 only, and only
        rank 0's own.

        Raises:
            RuntimeError: another rank is in another call, or has raised; ``fn`` has destroyed the default group.
        """
        rank = self._context.rank

        def emit(message: object) -> None:
            if on_message is not None:
                on_message(rank, message)

        # Anew for each call: messages go to the ``on_message`` of this one.
        enter(replace(self._context, emit=emit if rank == 0 else no_emit))
        if self._limit_s is not None:
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
        _Process.num_calls += 1
        call = _Process.num_calls
        try:
            ends = _ends_of_all(_End(call, pack(fn(rank, *args, **kwargs), f"the result of rank {rank}")))
        except BaseException as error:
            # Its name, not the exception, which would keep tensors and groups alive.
            _Process.failed = _End(call, failure=type(error).__name__)
            if not isinstance(error, Exception):  # an interrupt, which comes at another place on each rank
                _Process.may_go_on = False
            raise
        finally:
            if self._limit_s is not None:
                faulthandler.cancel_dump_traceback_later()
        return [unpack(end.result) for end in ends if end.result is not None]


def _require_group() -> None:
    """Raise RuntimeError if the default group has been made and destroyed: calls need it, and make no second."""
    if Process.patient is not None and not dist.is_initialized():
        raise RuntimeError(
            "RankPool: the default process group has been destroyed; destroy it after the last call of run, or not at "
            "all if the pool has made it; let this exception end the process, so that torchrun ends the job"
        )


def _ends_of_all(own: _End) -> list[_End]:
    """How every rank has left the call that this one has left; collective, once a call.

    Raises:
        RuntimeError: they have left it, or different calls (as of two threads that call ``run`` at once), unlike; the
            call has destroyed the default group.
    """
    _Process.may_go_on = False  # nor if this is interrupted, when the others may have met
    _require_group()
    # The others may have nothing to do for long, while rank 0 trains alone for example.
    told = all_gather_bytes(pickle.dumps(own), Process.patient)
    ends: list[_End] = [pickle.loads(end) for end in told]  # what ranks of this user have signed
    if len({str(end) for end in ends}) > 1:
        unlike = ", ".join(f"rank {rank} {end}" for rank, end in enumerate(ends))
        raise RuntimeError(
            f"RankPool: {unlike} of run; all ranks must make the same calls, in the same order, and after an exception "
            "go on only where it has come on all; let this one end the process, so that torchrun ends the job"
        )
    _Process.failed, _Process.may_go_on = None, True
    return ends
