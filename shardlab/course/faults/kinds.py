"""What can go wrong on one rank. A fault has a rank, a step and a phase; ``inject`` makes it happen there.

Phases: forward; backward, from the end of forward to the optimizer's step; step, from there to the next forward. A
fault at a layer strikes the output of the model's middle layer: in backward, the layers after it have their gradients
by then, and the layers before it do not. In the step phase it strikes just before the optimizer's own step.
"""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import sleep
from typing import ClassVar

import torch
from torch import Tensor

from shardlab.comm import CollectiveEvent, Communicator, Pending
from shardlab.vocabulary import Collective, Phase

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
_TOO_MUCH_BYTES = 2**60  # more than a process can address


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        rank: the global rank on which it happens.
        step: in which step, from 0; ``engine.num_steps`` when its forward begins.
        phase: forward, backward or step.

    Raises:
        ValueError: a field has a value it cannot have; the message names it.
    """

    rank: int
    step: int = 0
    phase: str = Phase.BACKWARD
    phases: ClassVar[tuple[Phase, ...]] = PHASES

    def __post_init__(self) -> None:
        """Check the fields here, since on a rank it would be too late."""
        for name in ("rank", "step"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}: {value!r} is given; allowed values are integers from 0")
        if self.phase not in self.phases:
            raise ValueError(f"phase: {self.phase!r} is given; allowed values are {', '.join(self.phases)}")
        for name in ("seconds", "resend_s"):
            value = getattr(self, name, 1.0)
            if not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ValueError(f"{name}: {value!r} is given; allowed values are seconds above 0")

    def __str__(self) -> str:
        return f"{type(self).__name__} on rank {self.rank} in the {self.phase} of step {self.step}"


class AtLayer(Fault, ABC):
    """A fault that happens to what the middle layer computes."""

    @abstractmethod
    def strike(self, tensor: Tensor) -> Tensor | None:
        """Do it.

        Args:
            tensor: the layer's output; in backward the gradient of it; in the step a gradient that this rank steps.

        Returns:
            What is to be in its place; None for the tensor as it is.
        """


class AtCollective(Fault, ABC):
    """A fault that happens to the first collective that the rank issues in the phase."""

    @abstractmethod
    def communicate(self, comm: Communicator, verb: Collective, buffer: Tensor | None, tag: str) -> Pending:
        """Take the place of ``comm.verb(buffer, ..., tag=tag)``; a barrier has no buffer."""


class OnLink(Fault, ABC):
    """A fault that happens to every collective that the rank issues in the phase."""

    @abstractmethod
    def delay_s(self, event: CollectiveEvent) -> float:
        """Seconds by which the end of the collective is delayed on this rank."""


@dataclass(frozen=True)
class Straggler(AtLayer):
    """The rank sleeps. Attributes: seconds."""

    seconds: float = 0.2

    def strike(self, tensor: Tensor) -> None:
        """Sleep."""
        sleep(self.seconds)


class DeadRank(AtLayer):
    """The rank's process is killed, as by the kernel when memory runs out."""

    def strike(self, tensor: Tensor) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)


class StoppedRank(AtLayer):
    """The rank's process is stopped by SIGSTOP: it is alive, and does nothing until SIGCONT comes."""

    def strike(self, tensor: Tensor) -> None:
        """Stop this process."""
        os.kill(os.getpid(), signal.SIGSTOP)


class OutOfMemory(AtLayer):
    """The rank asks for more memory than there is."""

    def strike(self, tensor: Tensor) -> None:
        """Allocate; torch raises its own error."""
        torch.empty(_TOO_MUCH_BYTES, dtype=torch.uint8, device=tensor.device)


class NaN(AtLayer):
    """A tensor of the rank becomes NaN."""

    def strike(self, tensor: Tensor) -> Tensor:
        """NaN in every element."""
        return tensor * torch.nan


class SkippedCall(Fault):
    """The rank does not call ``engine.backward``, or ``engine.step``; a plain ``loss.backward()`` cannot be skipped."""

    phases = (Phase.BACKWARD, Phase.STEP)


class SkippedCollective(AtCollective):
    """The rank leaves out the first collective of the phase."""

    def communicate(self, comm: Communicator, verb: Collective, buffer: Tensor | None, tag: str) -> Pending:
        """Send nothing."""
        return Pending()


class MismatchedCollective(AtCollective):
    """The rank issues another collective than the first of the phase."""

    def communicate(self, comm: Communicator, verb: Collective, buffer: Tensor | None, tag: str) -> Pending:
        """Broadcast a copy of the same buffer; in place of a broadcast, reduce it."""
        # A copy: the collective shall be wrong, and not the engine's own tensor.
        copy = torch.zeros(1) if buffer is None else buffer.clone()
        other: Callable[..., Pending] = comm.all_reduce if verb == Collective.BROADCAST else comm.broadcast
        return other(copy, tag=tag)


@dataclass(frozen=True)
class SlowLink(OnLink):
    """Every collective of the phase ends later for the rank. Attributes: seconds, for each collective."""

    seconds: float = 0.05

    def delay_s(self, event: CollectiveEvent) -> float:
        """The same for all."""
        return self.seconds


@dataclass(frozen=True)
class LossyLink(OnLink):
    """Messages are lost and sent again, as TCP does: nothing is missing in the end, and some of them come late.

    Attributes:
        lost: share of messages that are lost, from 0 to 0.9; one that is sent again may be lost again.
        resend_s: seconds until a lost message is sent again; Linux waits at least 0.2.
    """

    lost: float = 0.5
    resend_s: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lost <= 0.9:
            raise ValueError(f"lost: {self.lost!r} is given; allowed values are shares from 0 to 0.9")

    def delay_s(self, event: CollectiveEvent) -> float:
        """Drawn for each collective, the same in every run."""
        random = Random(f"{self.rank}/{event.axis}/{event.seq}")
        delay_s = 0.0
        while random.random() < self.lost:
            delay_s += self.resend_s
        return delay_s
