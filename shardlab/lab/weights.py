"""The slices of a tensor-parallel model within its weights, as a table for ``plots.weight_slices``.

A weight is laid out as it multiplies, y = x A: inputs downward, outputs to the right. This is the transpose of what a
linear layer stores, so the slices of a column-parallel layer are columns. An embedding, whose input is a token, is
stored this way already.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from torch import nn

from shardlab.partition.slices import TensorSlice
from shardlab.plots.weights import COLUMNS, EVERY_RANK


def weights_table(model: nn.Module, slices: Mapping[str, TensorSlice]) -> pd.DataFrame:
    """One row per parameter, rank and range.

    Args:
        model: the plain, whole model; the meta device is enough.
        slices: slices of the divided model by parameter name, from any rank (``partition.slices.slices_of``).

    Returns:
        ``parameter``; ``inputs`` and ``outputs`` of the whole (a bias or a norm has 1 input); ``rank``, -1 if every
        rank holds all of it; the elements held, as ``input_start``, ``input_stop``, ``output_start``, ``output_stop``.
    """
    rows = [
        row
        for name, param in model.named_parameters()  # tied weights once
        for row in _rows(name, tuple(param.shape), _is_linear(model, name), slices.get(name))
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _is_linear(model: nn.Module, parameter: str) -> bool:
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), nn.Linear)


def _rows(name: str, shape: tuple[int, ...], is_linear: bool, own: TensorSlice | None) -> Iterator[dict[str, Any]]:
    """The rows of one parameter; a vector is a row of outputs."""
    is_transposed = is_linear and len(shape) == 2
    inputs, outputs = (shape[::-1] if is_transposed else shape) if len(shape) == 2 else (1, shape[0])
    whole = {
        "parameter": name, "inputs": inputs, "outputs": outputs, "rank": EVERY_RANK,
        "input_start": 0, "input_stop": inputs, "output_start": 0, "output_stop": outputs,
    }  # fmt: skip
    if own is None:
        yield whole
        return
    side = "output" if len(shape) == 1 or (own.dim == 0) == is_transposed else "input"
    for rank in range(own.num_ranks):
        for start, stop in own.of_rank(rank).ranges:
            yield {**whole, "rank": rank, f"{side}_start": start, f"{side}_stop": stop}
