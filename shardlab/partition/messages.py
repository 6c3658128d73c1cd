"""Many small tensors travel packed as few messages: which of them together."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
MESSAGE_BYTES = 64 * 1024**2


def packed(tensors: Iterable[T], kind: Callable[[T], Hashable], num_bytes: Callable[[T], int]) -> list[list[T]]:
    """What is sent in each message: tensors of one kind, of at most 64 MiB together, or one larger tensor.

    Args:
        tensors: or what stands for them; in an order that all ranks share.
        kind: say dtype and device. Messages come in the order in which kinds are first seen.
        num_bytes: of each.
    """
    of_kind: dict[Hashable, list[T]] = {}
    for tensor in tensors:
        of_kind.setdefault(kind(tensor), []).append(tensor)
    messages: list[list[T]] = []
    for same in of_kind.values():
        total_bytes = MESSAGE_BYTES + 1  # each kind begins another message
        for tensor in same:
            if total_bytes + num_bytes(tensor) > MESSAGE_BYTES:
                messages.append([])
                total_bytes = 0
            messages[-1].append(tensor)
            total_bytes += num_bytes(tensor)
    return messages
