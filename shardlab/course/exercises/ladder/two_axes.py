"""Exercise: on a mesh of two axes, who adds up what with whom.

mesh_who_reduces(mesh, parts): every rank's share of a step in which tensor and data parallel meet.

mesh["tensor"] and mesh["data"] are communicators: .num_ranks, and .all_reduce(tensor).wait() for a sum in place. Ranks
on one tensor axis train on the same rows and share each layer; ranks on one data axis have the same slices and train on
other rows. parts is a dict of float64 vectors on this rank: "output", its term of a row-parallel layer's output;
"slice", the gradient, on its rows, of its slice of a weight; "whole", the gradient, on its rows, of a norm's weight,
which all ranks of a tensor axis have whole and equal. Return a dict: "output" is the whole output for these rows;
"slice" and "whole" are the gradients' means over all rows; "norm" is the 2-norm of the model's whole gradient, every
element counted once. Four messages are enough.

Hints:
- Which ranks have other terms of the same sum? Of the output those on the tensor axis, of gradients the others.
- A mean over the rows divides by the number of data ranks, not by that of all ranks.
- For the norm add up squares: those of the slice over the tensor axis; those of the whole are here already.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardlab.course.exercises.exercise import Case, Exercise, Message, Traffic
from shardlab.vocabulary import Collective

MESHES = {
    "2 data x 2 tensor": {"data": 2, "tensor": 2},
    "2 data x 1 tensor": {"data": 2, "tensor": 1},
    "1 data x 2 tensor": {"data": 1, "tensor": 2},
}
NUMEL = {"output": 3, "slice": 2, "whole": 2, "norm": 1}

STARTER = """def mesh_who_reduces(mesh, parts):
    for part in parts.values():
        mesh["data"].all_reduce(part).wait()  # your code: is it this axis for each of them, and a sum?
    return {**parts, "norm": 0.0}
"""


def cases() -> list[Case]:
    """Both axes, and each of them alone."""
    return [_case(words, axes) for words, axes in MESHES.items()]


def _case(words: str, axes: Mapping[str, int]) -> Case:
    parts = {(row, column): _parts(row, column) for row in range(axes["data"]) for column in range(axes["tensor"])}
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


TWO_AXES = Exercise.from_file(
    "mesh.who_reduces", __doc__, STARTER, cases, "11_two_dimensions",
    drawn_words="an element of output, slice, whole and norm", num_references=1, num_wrong=6,
)  # fmt: skip
