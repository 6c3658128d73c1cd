"""Exercises of notebooks 01 and 03: an all-reduce by hand, which gradients share a message, hooks that send them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardlab.comm import Communicator

from shardlab.course.exercises.exercise import (  # isort: skip
    Case, Exercise, Function, Message, Traffic, call_in_place, call_without_ranks,
)  # fmt: skip
from shardlab.course.exercises.judge import MessageLog
from shardlab.course.exercises.values import numbers_in
from shardlab.partition.buckets import assign_buckets
from shardlab.partition.chunks import ParamSpec
from shardlab.partition.uneven import chunk_sizes
from shardlab.vocabulary import Collective

# Ranks and elements, any length: divisible, not divisible, fewer elements than ranks; and one rank alone.
RING_SIZES = {
    "2 ranks, 8 elements": (2, 8), "3 ranks, 7 elements": (3, 7), "4 ranks, 3 elements": (4, 3),
    "1 rank, 5 elements": (1, 5),
}  # fmt: skip


def ring_case(words: str, num_ranks: int, numel: int) -> Case:
    """collectives_ring_all_reduce(comm, x): add up x over all ranks, in place, with comm.send and comm.recv alone.

    x is a vector of any length, comm.rank this rank's number, comm.num_ranks the number N of ranks. Divide x into N
    chunks, which need not be equal and may be empty. First every chunk travels around the ring and is added to at every
    rank, then the finished chunks travel around once more: a rank sends at most 2(N - 1) messages, of one chunk each.
    comm.send(tensor, rank) and comm.recv(tensor, rank) return at once; call .wait() on each of what they return, before
    you use or change the tensor.

    Hints:
    - torch.tensor_split(x, N) gives N chunks for any length, some of them empty; each is a view of x.
    - In step k rank r sends chunk (r - k) % N and receives chunk (r - k - 1) % N into a buffer, which it adds.
    - After N - 1 steps rank r holds the finished chunk (r + 1) % N. Go on with k: the same chunks follow; copy now.
    - Start the send, then wait for the receive, then for the send: if all ranks wait for a receive first, none sends.
    """
    inputs = [torch.arange(numel, dtype=torch.float64) * 10**rank + rank for rank in range(num_ranks)]
    wanted = torch.stack(inputs).sum(0)
    traffic = _traffic(num_ranks, numel, wanted.element_size())
    return Case(words, tuple((x,) for x in inputs), (wanted,) * num_ranks, traffic)


def _traffic(num_ranks: int, numel: int, itemsize: int) -> Traffic:
    """All ranks send 2(N - 1)S together, however chunks are cut; one rank at most 2(N - 1) of the largest."""
    sizes = [size * itemsize for size in chunk_sizes(numel, num_ranks)]
    wanted = tuple(tuple(_messages(rank, sizes)) for rank in range(num_ranks))
    most = 2 * (num_ranks - 1)
    return Traffic(wanted, most, most * sizes[0], most * numel * itemsize)


def _messages(rank: int, sizes: list[int]) -> list[Message]:
    count, messages = len(sizes), []
    for step in range(2 * (count - 1)):
        out, back = sizes[(rank - step) % count], sizes[(rank - step - 1) % count]
        messages += [Message("send", out, out), Message("recv", back, 0)]
    return messages


RING = Exercise.of(
    "collectives.ring_all_reduce", ring_case, "01_collectives_by_hand", RING_SIZES, attempt=call_in_place,
    drawn_words="an element of x", result_words="x after the call",
)  # fmt: skip


# Full, exactly full, half empty, too large, none: bytes of each parameter's gradient, in the order of forward, and of a
# full bucket.
BUCKETS_SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "four parameters, two buckets": ((40, 60, 70, 30), 100),
    "one parameter is larger than a bucket": ((20, 20, 300, 20), 64),
    "all fit exactly": ((50, 50), 100),
    "the last bucket is not full": ((8, 16, 8, 16, 8), 32),
    "no parameters": ((), 100),
}


def buckets_case(words: str, sizes: Sequence[int], capacity: int) -> Case:
    """buckets_assign(sizes, capacity): the indices of the parameters, bucket by bucket, as a list of lists.

    sizes are bytes of the gradients in the order in which forward uses the parameters; backward makes the gradients in
    the reverse order, and buckets are filled as they come: list them so, also inside a bucket. A bucket is closed when
    the next gradient would take it past capacity bytes. A gradient larger than that is alone in its bucket. No bucket
    is empty.

    Hints:
    - Go through reversed(range(len(sizes))).
    - Keep the bucket that is open and its bytes. Is there none, or would it be too full? Then open a new one.
    - With bytes == capacity a bucket is full, not too full: compare with >, after adding.
    """
    specs = [ParamSpec(str(index), (size,), 1) for index, size in enumerate(sizes)]
    wanted = [list(bucket) for bucket in assign_buckets(specs, capacity)]
    return Case(words, ((list(sizes), capacity),), (wanted,))


def bucket_of_each(buckets: list[list[int]]) -> list[float]:
    """The number of the bucket in which each parameter travels, in the order of the parameters."""
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    return [float(bucket_of[index]) for index in sorted(bucket_of)]


BUCKETS = Exercise.of(
    "buckets.assign", buckets_case, "03_data_parallel", BUCKETS_SIZES, attempt=call_without_ranks,
    drawn=bucket_of_each, drawn_words="the bucket of a parameter",
)  # fmt: skip


# All used, accumulation, unused on one rank, unused in the last micro-batch on one rank.
USED = {  # for each rank, whether each of its micro-batches uses the right branch
    "1 micro-batch": ([True], [True]),
    "2 micro-batches": ([True, True], [True, True]),
    "rank 0 does not use the right branch": ([False], [True]),
    "rank 0 uses it in the first of 2 micro-batches only": ([True, False], [True, True]),
}


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


def hooks_case(words: str, *used: list[bool]) -> Case:
    """data_parallel_hooks(comm, model, num_micro_batches): register hooks on the parameters of model; return finish.

    In the check, model has three layers: trunk, left and right. (In assemble they are a GPT's: trunk the embeddings,
    left the blocks, right the head.) Each rank calls forward and backward num_micro_batches times, and finish() once.
    After that, every parameter's grad must be a tensor: the mean over the ranks of what the micro-batches have added
    up. One message per parameter is enough; a message after every micro-batch would be too many. Nothing may be waited
    for before finish(). Where every micro-batch uses all parameters, all messages must leave during the last backward.
    On some rank right may stay unused, altogether or in the last micro-batch, while another uses it; its part is then
    zero, and all ranks must send the same parameters in the same order. param.register_post_accumulate_grad_hook(hook)
    calls hook(param) when its grad has been added to; comm.all_reduce(tensor) returns at once, and .wait() on what it
    returns waits for the sum.

    Hints:
    - Fix an order that is the same on all ranks, such as reversed(list(model.parameters())).
    - Count how often each hook has been called. A parameter is ready when it was called num_micro_batches times.
    - In each hook, send the next parameters of the order for as long as they are ready; finish sends all that is left.
    - A parameter without grad on this rank gets zeros before it is sent: another rank may have used it.
    """
    gradients = [_gradients(rank, used[rank]) for rank in range(len(used))]
    mean = {name: torch.stack([of_rank[name] for of_rank in gradients]).mean(0) for name in gradients[0]}
    sizes = [param.nbytes for param in Branches().parameters()][::-1]
    is_all_used = all(map(all, used))
    wanted: dict[str, object] = {
        "returns a function": True, "gradients": mean, "waits during backward": False
    }  # fmt: skip
    if is_all_used:
        wanted["sends during backward"] = True
    inputs = tuple((rank, tuple(used[rank]), is_all_used) for rank in range(len(used)))
    return Case(words, inputs, (wanted,) * len(used), Traffic.alike(Collective.ALL_REDUCE, sizes, len(used)))


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
    model, log = Branches(), MessageLog()
    with comm.observed_by(log):
        finish = function(comm, model, len(used))
        for micro_batch, uses_right in enumerate(used):
            loss, sent_before = model(_rows(rank, micro_batch), uses_right).mean(), len(log.messages)
            loss.backward()
        sent = log.messages
    during_backward = sum(message.num_bytes for message in sent[sent_before:])
    waits = any(message.is_waited_for for message in sent)
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


def _those(used: Sequence[bool]) -> str:
    """Which micro-batches use the right branch."""
    return ", ".join(str(number) for number, uses_right in enumerate(used) if uses_right) or "none"


HOOKS = Exercise.of(
    "data_parallel.hooks", hooks_case, "03_data_parallel", USED, attempt=train,
    drawn=lambda result: numbers_in(result["gradients"]), drawn_words="an element of the gradients",
    shown_inputs=lambda _, used, __: f"num_micro_batches {len(used)}; right is used in micro-batches: {_those(used)}",
)  # fmt: skip
