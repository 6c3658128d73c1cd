"""A tensor-parallel model's state as the plain model's, on every rank, and back."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardlab.comm import Communicator
from shardlab.comm.slices import cut_state, merge_state
from shardlab.partition.slices import slices_of


def merge_state_dict(model: nn.Module, comm: Communicator) -> dict[str, Any]:
    """A copy of the whole state, the same on every rank, which loads strict into the plain model; collective."""
    return merge_state(model.state_dict(), slices_of(model), comm)


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the plain model's state: each rank copies its slices. Nothing is sent.

    Raises:
        RuntimeError: names differ, or shapes of what is no slice; torch names them.
        ValueError: a parameter has another shape than the full one.
    """
    model.load_state_dict(cut_state(state, slices_of(model)), strict=True)
