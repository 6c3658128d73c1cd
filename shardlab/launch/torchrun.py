"""The same pool on the group that ``torchrun`` made: this process is one rank, the others were started by torchrun."""

import atexit
import faulthandler
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardlab.comm import become_rank, leave_group
from shardlab.comm.group import all_gather_object, make_patient_group
from shardlab.launch.context import enter, no_emit, torchrun_context
from shardlab.launch.messages import Payload, pack, unpack
from shardlab.launch.placement import Placement, TorchrunEnv, agreed

T = TypeVar("T")


class _Process:
    """What holds for all pools of this process, since they share the group that torchrun made.

    Attributes:
        num_calls: calls of ``run`` so far.
        failure: name of the exception that ended one of them; empty if none did.
    """

    num_calls: int = 0
    failure: str = ""


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

        Raises:
            RuntimeError: a call has failed in this process.
        """
        if _Process.failure:
            # The other ranks may still be in that call, whose collectives would meet those of the next one.
            raise RuntimeError(
                f"RankPool: a call has failed with {_Process.failure}, and other ranks may still be in it; under "
                "torchrun let the exception end this process, so that torchrun ends the job"
            )
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
            dist.init_process_group(
                self.placement.backend,
                store=self._store,
                rank=self._context.rank,
                world_size=self._context.world_size,
                timeout=timedelta(seconds=self._timeout_s),
                # NCCL then connects now, and not in the middle of the first step.
                device_id=self._context.device if self.placement.backend == "nccl" else None,
            )
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
        self,
        fn: Callable[..., T],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        on_message: Callable[[int, object], None] | None,
    ) -> list[T]:
        """Call ``fn(rank, ...)`` here, as every other process does; the results of all, in rank order.

        Communicates the pickled results, once. An exception leaves as it is: this process ends with it, and torchrun
        then ends the others. A script that catches it can make no further call. Messages reach ``on_message`` on rank 0
        only, and only rank 0's own.

        Raises:
            RuntimeError: another rank is in another call.
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
            result = fn(rank, *args, **kwargs)
            own = call, pack(result, f"the result of rank {rank}")
            # The others may have nothing to do for long, while rank 0 trains alone for example.
            gathered = cast(list[tuple[int, Payload]], all_gather_object(own, patiently=True))
            _check_calls([number for number, _ in gathered])
        except BaseException as error:
            _Process.failure = type(error).__name__  # not the exception, which would keep tensors and groups alive
            raise
        finally:
            if self._limit_s is not None:
                faulthandler.cancel_dump_traceback_later()
        return [unpack(payload) for _, payload in gathered]


def _check_calls(numbers: Sequence[int]) -> None:
    """Refuse results of different calls, as of two threads that call ``run`` at once."""
    if len(set(numbers)) > 1:
        counts = ", ".join(f"rank {rank} in call {number}" for rank, number in enumerate(numbers))
        raise RuntimeError(f"RankPool: {counts} of run; all ranks must make the same calls, in the same order")
