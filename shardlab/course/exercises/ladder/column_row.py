"""Exercise: two linear layers divided among ranks, by columns and by rows, with their biases and backward.

tensor_column_row(comm, x, weights, grad): relu(x A^T + a) B^T + b divided among ranks, forward and backward.

x, shape (2, 3), and grad, the gradient of the output, are whole on every rank. weights is a dict: "column" has this
rank's rows of A, shape (6 / N, 3), "column_bias" its elements of a, "row" its columns of B, shape (3, 6 / N), and
"row_bias" all of b. Return a dict with "output", "x", the gradient of x, and under the four names the gradients of what
this rank has. Two messages are enough: comm.all_reduce(tensor).wait() adds up in place. All is float64.

Hints:
- relu looks at one feature at a time: each rank needs only its own. The sum over features is the sum over ranks.
- b must be added once, after the sum. Its gradient is grad.sum(0), whole on every rank without a message.
- Of y = h B^T the gradients are grad.T @ h for B and grad @ B for h; where relu gave 0, h passes none on.
- Every rank used all of x, for its own features: the gradient of x is a sum over ranks, the second message.
"""

import torch
from torch import Tensor
from torch.nn import functional

from shardlab.course.exercises.exercise import Case, Exercise, Message, Traffic
from shardlab.vocabulary import Collective

ROWS, WIDTH, INNER = 2, 3, 6
NAMES = ("column", "column_bias", "row", "row_bias")
RANKS = {"2 ranks": 2, "3 ranks": 3, "1 rank": 1}

STARTER = """import torch


def tensor_column_row(comm, x, weights, grad):
    hidden = torch.relu(x @ weights["column"].T + weights["column_bias"])
    output = hidden @ weights["row"].T + weights["row_bias"]  # your code: now each rank has a term of the sum
    return {"output": output}
"""


def cases() -> list[Case]:
    """Two ranks, three, and one."""
    return [_case(words, num_ranks) for words, num_ranks in RANKS.items()]


def _case(words: str, num_ranks: int) -> Case:
    x, grad, full = _numbers(ROWS, WIDTH), _numbers(ROWS, WIDTH).flip(0) + 1, _weights()
    found = _whole(x, full, grad)
    shares, wanted = _divided(full, num_ranks), tuple(_divided(found, num_ranks))
    message = Message.around_a_ring(Collective.ALL_REDUCE, x.nbytes, num_ranks)
    traffic = Traffic.of([[message] * 2 if num_ranks > 1 else []] * num_ranks)
    return Case(words, tuple((x, share, grad) for share in shares), wanted, traffic)


def _numbers(*shape: int) -> Tensor:
    """Of both signs, so that relu has something to cut off."""
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + len(shape)).view(shape)


def _weights() -> dict[str, Tensor]:
    shapes = ((INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,))
    return {name: _numbers(*shape) for name, shape in zip(NAMES, shapes, strict=True)}


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


COLUMN_ROW = Exercise.from_file(
    "tensor.column_row", __doc__, STARTER, cases, "10_tensor_parallel",
    drawn_words="an element of the output, then of the gradients", num_references=1, num_wrong=6,
)  # fmt: skip
