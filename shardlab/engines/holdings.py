"""What a rank holds of the model: one list, and everything that is derived from it.

A strategy answers two questions: which tensors does this rank hold (``holdings()``), and how are the parameters divided
over ranks (``divisions()``, empty without buckets; a replicated bucket is a layout of one rank)? Ownership, padding
and the live tensors by role are derived from the answers here, in the same way for every strategy.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm.communicator import Communicator
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.chunks import Layout
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import Role

_ALWAYS = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.OTHER)


class Holding(NamedTuple):
    """A tensor that this rank holds.

    Attributes:
        role: what it is for.
        tensor: the tensor itself, not a copy.
        name: the parameter it belongs to; empty if it belongs to several or to none, such as a flat buffer.
        span: elements (start, stop) of that parameter, flattened.
    """

    role: Role
    tensor: Tensor
    name: str = ""
    span: tuple[int, int] = (0, 0)


class Division(NamedTuple):
    """Parameters that are divided over ranks as one bucket.

    Attributes:
        layout: which rank has which elements; a layout of one rank means that every rank has all of them.
        comm: the ranks of the layout.
        element_size: bytes of an element at rest.
    """

    layout: Layout
    comm: Communicator
    element_size: int

    @property
    def is_spread(self) -> bool:
        """Whether ranks have different elements."""
        return self.layout.num_ranks > 1

    def pieces_of(self, rank: int) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) that a rank has of each flattened parameter it has anything of."""
        pieces = self.layout.pieces(rank if self.is_spread else 0)
        return {piece.name: (piece.param_start, piece.param_stop) for piece in pieces}


class Holdings:
    """The part of ``Engine`` that says what this rank holds."""

    module: nn.Module
    params: dict[str, nn.Parameter]
    slices: dict[str, TensorSlice]
    comm: Communicator
    tensor_comm: Communicator | None
    optimizer: torch.optim.Optimizer
    _step_tensors: StepTensors

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """Every long-lived tensor of the engine; a storage that comes in several roles counts in the first."""

    def divisions(self) -> list[Division]:
        """How the parameters are divided, bucket by bucket; empty without buckets, where they are all whole."""
        return []

    def step_tensors(self) -> StepTensors:
        """What this rank steps, by name, in the module's order.

        Write into them on all ranks alike, into empty ones too: what only some ranks have written is gathered by some.
        """
        return self._step_tensors

    @property
    def sharded_over(self) -> Communicator | None:
        """The ranks over which ``step_tensors()`` are spread; None where each rank steps everything."""
        return next((division.comm for division in self.divisions() if division.is_spread), None)

    def spread_over(self) -> dict[str, tuple[Communicator, ...]]:
        """For each parameter, the axes over which its stepped pieces are spread; () where each rank steps all of it."""
        shards = {
            name: (division.comm,)
            for division in self.divisions() if division.is_spread for name in division.layout.names
        }  # fmt: skip
        return {name: shards.get(name, ()) + self._sliced_over(name) for name in self.params}

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The ranks that step (a piece of) each parameter, in the module's order."""
        if not self.divisions():
            return dict.fromkeys(self.params, tuple(range(self.comm.num_ranks)))
        return owners_in(self.divisions(), self.params, self.comm.num_ranks)

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements (start, stop) that this rank steps of each flattened parameter it steps anything of."""
        return dict(self._spans)

    def resident_params(self) -> dict[str, tuple[Tensor, int, int]]:
        """What a checkpoint is loaded into: the part this rank keeps of each parameter, and which elements it has."""
        if self._keeps_pieces:
            return {name: (self.step_tensors().by_name(name), *span) for name, span in self.owned().items()}
        return {name: (param, 0, param.numel()) for name, param in self.params.items()}

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in one copy of the parameters."""
        return sum(division.layout.padding_numel * division.element_size for division in self.divisions())

    def live_tensors(self) -> dict[Role, list[Tensor]]:
        """The engine's long-lived tensors by role; a storage that appears in two roles belongs to the first.

        Step counters of the optimizer and buffers of the module are ``Role.OTHER``, so that optimizer state is exactly
        what the formulas count.
        """
        live: dict[Role, list[Tensor]] = {}
        for holding in self.holdings():
            live.setdefault(holding.role, []).append(holding.tensor)
        return live | {role: [] for role in _ALWAYS if role not in live}

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        # Cached: every sample of the live tensors needs it, and no layout changes once the engine is built.
        if self.sharded_over is None:
            return {name: (0, param.numel()) for name, param in self.params.items()}
        return owned_in(self.divisions(), self.params)

    @property
    def _keeps_pieces(self) -> bool:
        """Whether what is loaded and handed back are the stepped pieces, and not whole parameters."""
        return False

    def _state_holdings(self) -> Iterator[Holding]:
        spans = self.owned()
        for name, tensor in self.step_tensors().items():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor):
                    yield of_state(key, value, name if name in spans else "", spans.get(name, (0, 0)))

    def _sliced_over(self, name: str) -> tuple[Communicator, ...]:
        """The tensor axis, if the parameter is a slice; else ()."""
        return (self.tensor_comm,) if self.tensor_comm is not None and name in self.slices else ()


def owners_in(divisions: Iterable[Division], names: Iterable[str], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """The ranks that have (a piece of) each parameter, in the order of ``names``."""
    holders: dict[str, list[int]] = {name: [] for name in names}
    for division in divisions:
        for rank in range(num_ranks):
            for name in division.pieces_of(rank):
                holders[name].append(rank)
    return {name: tuple(ranks) for name, ranks in holders.items()}


def owned_in(divisions: Iterable[Division], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The elements (start, stop) that this rank has of each flattened parameter it has anything of."""
    spans = {name: span for division in divisions for name, span in division.pieces_of(division.comm.rank).items()}
    return {name: spans[name] for name in names if name in spans}


def of_state(key: str, value: Tensor, name: str, span: tuple[int, int]) -> Holding:
    """What an optimizer keeps under ``key`` for a parameter; no formula counts a step counter as optimizer state."""
    return Holding(Role.OTHER, value) if key == "step" else Holding(Role.OPTIMIZER_STATE, value, name, span)
