"""What a rank has of the model under an engine: what it steps, what it keeps between steps, what is alive now.

The answers here are those of a strategy that shards nothing; each that shards overrides what is otherwise with it.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from shardlab.comm import Communicator
from shardlab.engines.holdings import ShardRow, held, in_whole_parameters
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import Role


class EngineHoldings:
    """The part of ``Engine`` that tells what this rank holds."""

    shards_gradients: ClassVar[bool] = False
    """Whether the gradients of ``step_tensors()`` are this rank's part only, so that a norm needs a reduction."""
    module: nn.Module
    params: dict[str, nn.Parameter]
    slices: dict[str, TensorSlice]
    comm: Communicator
    tensor_comm: Communicator | None
    optimizer: torch.optim.Optimizer

    def step_tensors(self) -> StepTensors:
        """What this rank steps, by name, in the module's order."""
        return StepTensors(self.params, are_parts=bool(self.slices))

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The ranks that step (a piece of) each parameter, in the module's order."""
        everyone = tuple(range(self.comm.num_ranks))
        return dict.fromkeys(self.params, everyone)

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements of each flattened parameter that this rank steps, as (start, stop); only what it does step."""
        return {name: (0, param.numel()) for name, param in self.params.items()}

    @property
    def sharded_over(self) -> Communicator | None:
        """The ranks over which what ``step_tensors()`` gives is spread; None where each rank steps everything."""
        return self.comm if self.shards_gradients else None

    def spread_over(self) -> dict[str, tuple[Communicator, ...]]:
        """Of each parameter the axes over whose ranks its stepped pieces are spread; () where each rank steps all."""
        shards = () if self.sharded_over is None else (self.sharded_over,)
        return {name: shards + self.sliced_over(name) for name in self.params}

    def sliced_over(self, name: str) -> tuple[Communicator, ...]:
        """The tensor axis, of a parameter that is a slice; else ()."""
        return (self.tensor_comm,) if self.tensor_comm is not None and name in self.slices else ()

    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """What this rank keeps of each parameter between steps, and which elements (start, stop) that is."""
        return {name: (param, 0, param.numel()) for name, param in self.params.items()}

    def shard_map(self) -> list[ShardRow]:
        """Every piece of a parameter, gradient or optimizer state that this rank holds."""
        rows = (
            ShardRow(name, tuple(param.shape), role, -1, 0, param.numel(), num_bytes)
            for name, param in self.params.items()
            for role, num_bytes in held(param, self.optimizer.state.get(param, {}), param.grad)
        )
        return in_whole_parameters(rows, self.slices)

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """The engine's long-lived tensors by role; a storage that appears in two roles belongs to the first.

        Step counters of the optimizer and buffers of the module are ``Role.OTHER``, so that optimizer state is exactly
        what the formulas count.
        """
        states = [
            (key, value) for state in self.optimizer.state.values() for key, value in state.items()
            if isinstance(value, Tensor)
        ]  # fmt: skip
        return {
            Role.PARAMETER: list(self.params.values()),
            Role.GRADIENT: [param.grad for param in self.params.values() if param.grad is not None],
            Role.OPTIMIZER_STATE: [value for key, value in states if key != "step"],
            Role.OTHER: [value for key, value in states if key == "step"] + list(self.module.buffers()),
        }

    @property
    def padding_bytes(self) -> int:
        """Bytes of one copy of the parameters that are padding."""
        return 0
