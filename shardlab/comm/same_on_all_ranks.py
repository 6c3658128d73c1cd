"""Ranks that succeed or fail together, and short texts they exchange, over the engine's own communicators.

A rank that raises alone leaves the others waiting in their next collective. So work that may fail is local, without a
collective in it; afterwards every rank learns of every failure, and all raise the same error.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from shardlab.comm.communicator import Communicator
from shardlab.vocabulary import dtype_name

T = TypeVar("T")
_TAG = "agreement"


def all_or_none(comms: Sequence[Communicator], device: torch.device, work: Callable[[], T]) -> T:
    """Do local ``work`` on every rank; return its result where it succeeded on all ranks, else raise on all.

    Args:
        comms: axes whose ranks take part, outer first.
        device: where tensors of these communicators live.
        work: must not communicate.

    Raises:
        ValueError: on all ranks; the work of the first rank that failed raised one, with this message.
        RuntimeError: likewise, if that was any other exception.
    """
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # any kind: the other ranks must learn of it
        failure = error
    # Ranks whose work succeeded come here too, so none is left waiting for one that failed.
    texts = share_texts(comms, device, "" if failure is None else _described(failure))
    for rank, text in enumerate(texts):
        if text:
            kind, message = json.loads(text)
            where = "" if set(texts) == {text} else f" (on rank {rank})"
            raise (ValueError if kind == "value" else RuntimeError)(message + where) from failure
    return result[0]


def share_json(comms: Sequence[Communicator], device: torch.device, value: Any) -> list[Any]:
    """Every rank's ``value`` (anything JSON holds), in the order of the ranks, on every rank."""
    return [json.loads(text) for text in share_texts(comms, device, json.dumps(value))]


def share_texts(comms: Sequence[Communicator], device: torch.device, text: str) -> list[str]:
    """Every rank's text, in the order of the ranks (row by row over the axes), on every rank.

    Sends 8 bytes a rank, and then all texts together unless all are empty. It is also a barrier: no rank returns before
    every rank has entered.
    """
    number, num_ranks = number_among(comms)
    raw = text.encode()
    # Sizes first, so that every rank knows where its text goes. A sum to which the others add zeros is a gather made
    # of all-reduces alone, so it works over any number of axes.
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    sizes[number] = len(raw)
    bounds = [0, *_sum(comms, sizes).cumsum(0).tolist()]
    if bounds[-1] == 0:
        return [""] * num_ranks
    words = torch.zeros(bounds[-1], dtype=torch.uint8, device=device)
    if raw:
        words[bounds[number] : bounds[number + 1]] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    joined = _sum(comms, words).cpu().numpy().tobytes()
    return [joined[bounds[rank] : bounds[rank + 1]].decode() for rank in range(num_ranks)]


def check_alike(comms: Sequence[Communicator], device: torch.device, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check that all ranks name the same tensors, of the same shapes and dtypes, frozen or not, in the same order.

    Else their collectives would not match: some transports then break off without saying what differs. Sends 16 bytes
    if nothing differs.

    Raises:
        ValueError: on all ranks; the message has the first difference.
    """
    # A parameter that is frozen now is in another bucket.
    lines = [
        f"{name} {list(tensor.shape)} {dtype_name(tensor.dtype)}"
        + (" frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else "")
        for name, tensor in tensors
    ]
    number = crc32("\n".join(lines).encode())
    # One max finds the largest number and minus the smallest; these cancel only where all ranks have the same.
    bounds = torch.tensor([number, -number], device=device)
    for comm in comms:
        comm.all_reduce(bounds, reduction="max", tag=_TAG).wait()
    largest, smallest = bounds.tolist()
    if largest == -smallest:
        return
    # All ranks come here or none does, since all of them have compared the same two numbers.
    shared = share_json(comms, device, lines)
    other = next(rank for rank, theirs in enumerate(shared) if theirs != shared[0])
    pairs = zip_longest(shared[0], shared[other], fillvalue="nothing")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"model: where rank 0 has {first}, rank {other} has {second}; build the same module on all data ranks"
    )


def number_among(comms: Sequence[Communicator]) -> tuple[int, int]:
    """This rank's number among the ranks of these axes (outer first), and how many they are; (0, 1) without axes."""
    number, num_ranks = 0, 1
    for comm in comms:
        number, num_ranks = number * comm.num_ranks + comm.rank, num_ranks * comm.num_ranks
    return number, num_ranks


def _sum(comms: Sequence[Communicator], tensor: Tensor) -> Tensor:
    # One axis after another: the next sums what this one has summed, and all ranks take them in the same order.
    for comm in comms:
        comm.all_reduce(tensor, tag=_TAG).wait()
    return tensor


def _described(failure: Exception) -> str:
    text = "; ".join([str(failure), *getattr(failure, "__notes__", ())])
    is_value = isinstance(failure, ValueError)
    return json.dumps(["value", text] if is_value else ["other", f"{type(failure).__name__}: {text}"])
