"""Random numbers of tensor-parallel ranks: equal where activations are whole, different where they are in parts.

Ranks of the tensor axis share torch's own generators in the same state (``equalise_rng``), so dropout on activations
that all of them have drops the same elements. Inside ``differing_by_rank`` each rank has a stream of its own. That
stream begins with a number drawn from the shared one, and the shared one goes on as if only that number had been
drawn. So nothing is kept between two uses: the same seed gives the same masks, a checkpoint of torch's generators is a
checkpoint of these, and activation checkpointing, which puts torch's generators back, draws the same masks again.

``generators_seeded`` is for plans that are tried in one process: what a trial draws changes nothing for training.
"""

import contextlib
import pickle
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from shardlab.comm import Communicator
from shardlab.tensor_parallel.sources import InputCheck

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds of neighbours are far apart
_LARGEST = 2**63 - 1


def equalise_rng(comm: Communicator, device: torch.device) -> None:
    """Put torch's generators (CPU and this device's) into the state of the axis' first rank; blocking."""
    for generator in _generators(device):
        # A state lies in host memory, and NCCL sends only what is on the device.
        state = generator.get_state().to(device)
        comm.broadcast(state, tag="random state from rank 0").wait()
        generator.set_state(state.cpu())


@contextlib.contextmanager
def differing_by_rank(comm: Communicator, device: torch.device | None = None) -> Iterator[None]:
    """Inside, torch draws different random numbers on each rank of the axis; afterwards the same ones on all again.

    Args:
        comm: the tensor axis; every rank has to call this, as for a collective, but nothing is sent.
        device: whose generator is used inside, besides the CPU's; None for the CPU's alone.
    """
    if comm.num_ranks == 1:
        yield
        return
    # Drawn from the shared stream on all ranks alike, so that the stream goes on equally after this.
    drawn = int(torch.randint(_LARGEST, (), generator=torch.default_generator, device="cpu"))
    generators = _generators(torch.device("cpu") if device is None else device)
    # After the draw, so that the number drawn stays drawn when the states are put back.
    with torch.random.fork_rng([one.device for one in generators[1:]], device_type="cuda"):
        for generator in generators:
            generator.manual_seed((drawn + (comm.rank + 1) * _STRIDE) % _LARGEST)
        yield


@contextlib.contextmanager
def generators_seeded(seed: int = 0) -> Iterator[None]:
    """Inside, Python, NumPy and torch (CPU) draw from ``seed``; afterwards they go on as if nobody had drawn."""
    in_python, in_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with torch.random.fork_rng([]):  # of the CPU's alone
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds CUDA too
            yield
    finally:
        random.setstate(in_python)
        np.random.set_state(in_numpy)


def generator_states() -> bytes:
    """The states of the generators on the CPU from which a module may draw, to compare or to put back."""
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


def set_generator_states(states: bytes) -> None:
    """Put them back."""
    in_torch, in_python, in_numpy = pickle.loads(states)
    torch.set_rng_state(torch.from_numpy(in_torch))
    random.setstate(in_python)
    np.random.set_state(in_numpy)


class PartDropout(nn.Dropout):
    """Dropout of an activation that is in parts over the tensor axis: other elements on each rank.

    Args:
        dropout: the plain one.
        comm: the tensor axis.
        name: in errors.
    """

    def __init__(self, dropout: nn.Dropout, comm: Communicator, name: str) -> None:
        super().__init__(dropout.p, dropout.inplace)
        self.comm = comm
        self.register_forward_pre_hook(InputCheck(comm, name, in_parts=True), with_kwargs=True)

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Dropout``."""
        if not self.training or self.p == 0:
            return super().forward(input)
        with differing_by_rank(self.comm, input.device):
            return super().forward(input)


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
