"""A range that may not be padded, cut into one contiguous chunk per rank: the first ranks have an element more.

10 elements over 3 ranks are 4, 3, 3.
"""

from itertools import accumulate

from shardlab.partition.chunks import require_count


def chunk_sizes(numel: int, num_ranks: int) -> tuple[int, ...]:
    """Elements of each rank's chunk, the remainder spread over the first ranks.

    Args:
        numel: elements to divide, 0 or more.
        num_ranks: ranks, 1 or more; ranks beyond the last element get 0.

    Raises:
        ValueError: ``numel`` or ``num_ranks`` is too small.
    """
    require_count("numel", numel, 0)
    require_count("num_ranks", num_ranks, 1)
    size, remainder = divmod(numel, num_ranks)
    return tuple(size + (rank < remainder) for rank in range(num_ranks))


def chunk_bounds(numel: int, num_ranks: int) -> tuple[int, ...]:
    """The ``num_ranks + 1`` offsets of the chunks of :func:`chunk_sizes`: first 0, last ``numel``.

    Raises:
        ValueError: ``numel`` or ``num_ranks`` is too small.
    """
    return (0, *accumulate(chunk_sizes(numel, num_ranks)))
