"""Exercise: data parallel from hooks, with micro-batches that add up and parameters that a rank does not use.

data_parallel_hooks(comm, model, num_micro_batches): register hooks on the parameters of model; return finish.

In the check, model has three layers: trunk, left and right. (In assemble they are a GPT's: trunk the embeddings, left
the blocks, right the head.) Each rank calls forward and backward num_micro_batches times, and finish() once. After
that, every parameter's grad must be a tensor: the mean over the ranks of what the micro-batches have added up. One
message per parameter is enough; a message after every micro-batch would be too many. Nothing may be waited for before
finish(). Where every micro-batch uses all parameters, all messages must leave during the last backward. A rank may
not use right at all, or not in the last micro-batch, while another rank does; its part is then zero, and all ranks
must send the same parameters in the same order. param.register_post_accumulate_grad_hook(hook) calls
hook(param) when its grad has been added to; comm.all_reduce(tensor) returns at once, and .wait() on what it returns
waits for the sum.

Hints:
- Fix an order that is the same on all ranks, such as reversed(list(model.parameters())).
- Count how often each hook has been called. A parameter is ready when it was called num_micro_batches times.
- In each hook, send the next parameters of the order for as long as they are ready; finish sends all that is left.
- A parameter without grad on this rank gets zeros before it is sent: another rank may have used it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardlab.comm import CollectiveEvent, Communicator, Observer
from shardlab.course.exercises.exercise import Case, Exercise, Function, Message, Traffic
from shardlab.course.exercises.values import numbers_in
from shardlab.vocabulary import Collective

USED = {  # for each rank, whether each of its micro-batches uses the right branch
    "1 micro-batch": [[True], [True]],
    "2 micro-batches": [[True, True], [True, True]],
    "rank 0 does not use the right branch": [[False], [True]],
    "rank 0 uses it in the first of 2 micro-batches only": [[True, False], [True, True]],
}

STARTER = """def data_parallel_hooks(comm, model, num_micro_batches):
    def finish():
        pass  # your code

    return finish
"""


class Branches(nn.Module):
    """A trunk with two branches, of which the right one is not always used; in float64, with fixed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(2, 1)
        self.double()
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(0.5, 1.5, param.numel()).view_as(param))

    def forward(self, x: Tensor, uses_right: bool) -> Tensor:
        """(rows, 3) in, (rows, 1) out."""
        middle = self.trunk(x)
        left: Tensor = self.left(middle)
        return left + self.right(middle) ** 2 if uses_right else left


def cases() -> list[Case]:
    """All used, accumulation, unused on one rank, unused in the last micro-batch on one rank."""
    return [_case(words, used) for words, used in USED.items()]


def _case(words: str, used: list[list[bool]]) -> Case:
    gradients = [_gradients(rank, used[rank]) for rank in range(len(used))]
    mean = {name: torch.stack([of_rank[name] for of_rank in gradients]).mean(0) for name in gradients[0]}
    messages = [
        Message.around_a_ring(Collective.ALL_REDUCE, param.nbytes, len(used)) for param in Branches().parameters()
    ]
    is_all_used = all(map(all, used))
    wanted: dict[str, object] = {
        "returns a function": True, "gradients": mean, "waits during backward": False
    }  # fmt: skip
    if is_all_used:
        wanted["sends during backward"] = True
    inputs = tuple((rank, tuple(used[rank]), is_all_used) for rank in range(len(used)))
    return Case(words, inputs, (wanted,) * len(used), Traffic.of([messages[::-1]] * len(used)))


def _rows(rank: int, micro_batch: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank + micro_batch


def _gradients(rank: int, used: Sequence[bool]) -> dict[str, Tensor]:
    model = Branches()
    for micro_batch, uses_right in enumerate(used):
        model(_rows(rank, micro_batch), uses_right).mean().backward()
    zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    return {name: zeros[name] if param.grad is None else param.grad for name, param in model.named_parameters()}


def train(
    function: Function, comm: Communicator, rank: int, used: Sequence[bool], is_all_used: bool
) -> dict[str, object]:
    """The micro-batches of one step with the learner's hooks."""
    model, seen = Branches(), _Seen()
    with comm.observed_by(seen):
        finish = function(comm, model, len(used))
        for micro_batch, uses_right in enumerate(used):
            loss, sent_before = model(_rows(rank, micro_batch), uses_right).mean(), seen.num_bytes
            loss.backward()
        during_backward, waits = seen.num_bytes - sent_before, seen.num_waits > 0
    if returns_function := callable(finish):  # a return is easily forgotten
        finish()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    result = {"returns a function": returns_function, "gradients": gradients, "waits during backward": waits}
    # Where a rank leaves out the parameter that is sent first, nothing can be sent before finish().
    if not is_all_used:
        return result
    num_bytes = sum(param.nbytes for param in model.parameters())
    sends = during_backward >= num_bytes or f"{during_backward} of {num_bytes} B"
    return result | {"sends during backward": sends}


class _Seen(Observer):
    """An observer: how many bytes were sent, and how often somebody waited."""

    def __init__(self) -> None:
        self.num_bytes = self.num_waits = 0

    def issued(self, event: CollectiveEvent) -> None:
        self.num_bytes += event.num_bytes

    def waited(self, event: CollectiveEvent) -> None:
        self.num_waits += 1


def _those(used: Sequence[bool]) -> str:
    """Which micro-batches use the right branch."""
    return ", ".join(str(number) for number, uses_right in enumerate(used) if uses_right) or "none"


HOOKS = Exercise.from_file(
    "data_parallel.hooks", __doc__, STARTER, cases, "03_data_parallel", num_references=2, num_wrong=7,
    attempt=train, drawn=lambda result: numbers_in(result["gradients"]), drawn_words="an element of the gradients",
    shown_inputs=lambda _, used, __: f"num_micro_batches {len(used)}; right is used in micro-batches: {_those(used)}",
)  # fmt: skip
