"""Exercises of notebooks 10 and 11: layers divided over ranks, and who sums up what on a mesh of two axes."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from shardlab.course.exercises.exercise import Case, Exercise, Message, Traffic
from shardlab.vocabulary import Collective

ROWS, WIDTH, INNER = 2, 3, 6
SHAPES = {"column": (INNER, WIDTH), "column_bias": (INNER,), "row": (WIDTH, INNER), "row_bias": (WIDTH,)}
RANKS = {"2 ranks": (2,), "3 ranks": (3,), "1 rank": (1,)}


def column_row_case(words: str, num_ranks: int) -> Case:
    """tensor_column_row(comm, x, weights, grad): relu(x A^T + a) B^T + b divided among ranks, forward and backward.

    x, shape (2, 3), and grad, the gradient of the output, are whole on every rank. weights is a dict: "column" has this
    rank's rows of A, shape (6 / N, 3), "column_bias" its elements of a, "row" its columns of B, shape (3, 6 / N), and
    "row_bias" all of b. Return a dict with "output", "x", the gradient of x, and under the four names the gradients of
    what this rank has. Two messages are enough: comm.all_reduce(tensor).wait() adds up in place. All is float64.

    Hints:
    - relu looks at one feature at a time: each rank needs only its own. The sum over features is the sum over ranks.
    - b must be added once, after the sum. Its gradient is grad.sum(0), whole on every rank without a message.
    - Of y = h B^T the gradients are grad.T @ h for B and grad @ B for h; where relu gave 0, h passes none on.
    - Every rank used all of x, for its own features: the gradient of x is a sum over ranks, the second message.
    """
    x, grad = _numbers(ROWS, WIDTH), _numbers(ROWS, WIDTH).flip(0) + 1
    full = {name: _numbers(*shape) for name, shape in SHAPES.items()}
    found = _whole(x, full, grad)
    shares, wanted = _divided(full, num_ranks), tuple(_divided(found, num_ranks))
    traffic = Traffic.alike(Collective.ALL_REDUCE, [x.nbytes] * 2, num_ranks)
    return Case(words, tuple((x, share, grad) for share in shares), wanted, traffic)


def _numbers(*shape: int) -> Tensor:
    """Of both signs, so that relu has something to cut off."""
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + len(shape)).view(shape)


def _whole(x: Tensor, weights: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """What one process finds: the output, and every gradient."""
    inputs = {"x": x, **weights}
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    hidden = functional.linear(leaves["x"], leaves["column"], leaves["column_bias"]).relu()
    output = functional.linear(hidden, leaves["row"], leaves["row_bias"])
    gradients = torch.autograd.grad(output, list(leaves.values()), grad)
    return {"output": output.detach(), **dict(zip(inputs, gradients, strict=True))}


def _divided(values: dict[str, Tensor], num_ranks: int) -> list[dict[str, Tensor]]:
    """What each rank has: its slice of what is divided, and all of the rest."""
    dims = {"column": 0, "column_bias": 0, "row": 1}
    slices = {name: values[name].chunk(num_ranks, dim) for name, dim in dims.items() if name in values}
    return [values | {name: of_ranks[rank].clone() for name, of_ranks in slices.items()} for rank in range(num_ranks)]


COLUMN_ROW = Exercise.of(
    "tensor.column_row", column_row_case, "10_tensor_parallel", RANKS,
    drawn_words="an element of the output, then of the gradients",
)  # fmt: skip


# Both axes, and each of them alone.
MESHES = {"2 data x 2 tensor": (2, 2), "2 data x 1 tensor": (2, 1), "1 data x 2 tensor": (1, 2)}
NUMEL = {"output": 3, "slice": 2, "whole": 2, "norm": 1}


def two_axes_case(words: str, data: int, tensor: int) -> Case:
    """mesh_who_reduces(mesh, parts): every rank's share of a step in which tensor and data parallel meet.

    mesh["tensor"] and mesh["data"] are communicators: .num_ranks, and .all_reduce(tensor).wait() for a sum in place.
    Ranks on one tensor axis train on the same rows and share each layer; ranks on one data axis have the same slices
    and train on other rows. parts is a dict of float64 vectors on this rank: "output", its term of a row-parallel
    layer's output; "slice", the gradient, on its rows, of its slice of a weight; "whole", the gradient, on its rows, of
    a norm's weight, which all ranks of a tensor axis have whole and equal. Return a dict: "output" is the whole output
    for these rows; "slice" and "whole" are the gradients' means over all rows; "norm" is the 2-norm of the model's
    whole gradient, every element counted once. Four messages are enough.

    Hints:
    - Which ranks have other terms of the same sum? Of the output those on the tensor axis, of gradients the others.
    - A mean over the rows divides by the number of data ranks, not by that of all ranks.
    - For the norm add up squares: those of the slice over the tensor axis; those of the whole are here already.
    """
    axes = {"data": data, "tensor": tensor}
    parts = {(row, column): _parts(row, column) for row in range(data) for column in range(tensor)}
    wanted = tuple(_wanted(parts, row, column, axes) for row, column in parts)
    axis_of = {"output": "tensor", "slice": "data", "whole": "data", "norm": "tensor"}
    messages = [
        Message.around_a_ring(Collective.ALL_REDUCE, 8 * NUMEL[name], axes[axis], axis)
        for name, axis in axis_of.items()
    ]
    sent = [message for message in messages if message.sent_bytes]
    inputs = tuple((of_rank,) for of_rank in parts.values())
    return Case(words, inputs, wanted, Traffic.of([sent] * len(parts)), axes=axes)


def _parts(row: int, column: int) -> dict[str, Tensor]:
    """``whole`` does not depend on the column."""
    terms = {"output": 10 * row + column + 1, "slice": 3 * row + 5 * column, "whole": 7 * row + 2}
    return {name: torch.arange(NUMEL[name], dtype=torch.float64) + term for name, term in terms.items()}


def _wanted(
    parts: Mapping[tuple[int, int], dict[str, Tensor]], row: int, column: int, axes: Mapping[str, int]
) -> dict[str, object]:
    rows, columns = range(axes["data"]), range(axes["tensor"])
    slices = [torch.stack([parts[other, place]["slice"] for other in rows]).mean(0) for place in columns]
    whole = torch.stack([parts[other, column]["whole"] for other in rows]).mean(0)
    output = torch.stack([parts[row, place]["output"] for place in columns]).sum(0)
    return {
        "output": output, "slice": slices[column], "whole": whole,
        "norm": torch.cat([*slices, whole]).norm().item(),
    }  # fmt: skip


TWO_AXES = Exercise.of(
    "mesh.who_reduces", two_axes_case, "11_two_dimensions", MESHES,
    drawn_words="an element of output, slice, whole and norm",
)  # fmt: skip
