"""Which rows each rank trains on: one global batch under every strategy, divided among the data ranks.

One process that takes all rows sees exactly what N ranks see together; this is what losses are compared on. Where the
rows of a batch do not divide evenly, ranks get one row more or less, and their mean losses are weighted by their rows,
so that the mean over ranks stays the mean over rows.

Have all strategies, and a run that goes on, trained on the same rows? Only then can their losses be compared. So each
rank adds up the checksums of the rows of its first batches. The sum over ranks depends neither on the order of the rows
nor on how they are divided.
"""

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from math import inf, nan
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shardlab.comm.trees import map_tensors, tensors_in
from shardlab.experiment.trained.workload import Workload, seeded
from shardlab.tensor_parallel.rng import generator_states, set_generator_states

_GENERATORS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
NUM_BATCHES = 10  # whose rows are checked: what is drawn without a seed differs from the first one on


class DataEndedError(ValueError):
    """The data has no more batches."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a batch.

    Attributes:
        batch: its rows, in the nest that the data came in.
        weight: of its mean loss in the mean over ranks: 1, unless ranks have different numbers of rows.
        checksum: of the rows of the whole batch, or of a rank's own where a function divides them; None after the
            first batches.
        counted: what the workload's ``weight`` says of the rank's rows; 0 without one.
    """

    batch: Any
    weight: float = 1.0
    checksum: int | None = None
    counted: float = 0.0


def batches_of(workload: Workload, rank: int, ranks: int, seed: int, rows: int) -> Iterator[Share]:
    """What one data rank trains on, one item for each micro-batch.

    Args:
        workload: whose data it is.
        rank: of the data ranks.
        ranks: number of data ranks.
        seed: of shuffling; the same on all ranks.
        rows: of a global micro-batch; used for a ``Dataset`` only.

    Raises:
        ValueError: the data has ended, a batch cannot be divided, or its weight is none.
    """
    data: Any = _from_their_beginning(workload.data)
    if not workload.divides_rows:
        shares = _checked(Share, _apart(lambda: _returned(data(rank, ranks, seed)), seed))
    else:
        source = _batches_of_samples(data, rows, seed) if isinstance(data, Dataset) else _repeated(data)
        shares = _checked(partial(divide, rank=rank, ranks=ranks), _apart(lambda: source, seed))
    return shares if workload.weight is None else _counted(shares, workload.weight)


def first_batch(workload: Workload, ranks: int, seed: int, rows: int) -> Any:
    """The first batch, of all data ranks unless the data divide it; see ``batches_of``.

    Raises:
        ValueError: it cannot be read here.
    """
    # A function that divides the rows itself may know of no other number of ranks; a plan may be for more than rows.
    try:
        return next(batches_of(workload, 0, 1 if workload.divides_rows else ranks, seed, rows)).batch
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"data: its first batch, from which a plan learns what the loss depends on, raised {type(error).__name__} "
            f"({error}); plan where it can be read"
        ) from error


def check_enough(workload: Workload, ranks: int, rows: int, num_batches: int) -> None:
    """Check, as far as the data say it without being read, that every batch has a row for each rank.

    Args:
        workload: whose data it is.
        ranks: number of data ranks.
        rows: of a global micro-batch; used for a ``Dataset`` only.
        num_batches: that will be read.

    Raises:
        ValueError: a ``Dataset`` has too few samples, or a batch of a list or a ``DataLoader`` too few rows.
    """
    data: Any = workload.data
    if isinstance(data, Dataset) and isinstance(data, Sized) and len(data) < rows:
        raise ValueError(_TOO_SMALL.format(len(data), rows))
    sizes: list[int] = []
    if isinstance(data, list | tuple):
        with suppress(ValueError):  # of what has no rows, the ranks say more
            sizes = [rows_of(batch) for batch in data[:num_batches]]
    elif isinstance(data, DataLoader) and data.batch_size is not None and isinstance(data.dataset, Sized):
        whole, rest = divmod(len(data.dataset), data.batch_size)
        sizes = [data.batch_size] * bool(whole) + [rest] * (rest > 0 and not data.drop_last and num_batches > whole)
    if sizes and min(sizes) < ranks:
        raise ValueError(_TOO_FEW.format(min(sizes), ranks))


_TOO_SMALL = "data: it has {} samples, too few for a batch of {}; set batch"
_TOO_FEW = "data: a batch has {0} rows, too few for {1} data ranks; give at least {1}"


def divide(batch: Any, rank: int, ranks: int) -> Share:
    """The rows of a rank.

    Tensors and NumPy arrays are cut along their first dim, and lists, and tuples of strings, that have as many entries
    as there are rows; the rest is handed to every rank.

    Raises:
        ValueError: tensors have different numbers of rows, or there are fewer rows than ranks.
    """
    if ranks == 1:
        return Share(batch)
    rows = rows_of(batch)
    if rows < ranks:
        raise ValueError(_TOO_FEW.format(rows, ranks))
    least, more = divmod(rows, ranks)
    start = rank * least + min(rank, more)
    own = slice(start, start + least + (rank < more))
    return Share(_cut(batch, own, rows), (own.stop - own.start) * ranks / rows)


def rows_of(batch: Any) -> int:
    """The size of the first dim of all tensors in a batch.

    Raises:
        ValueError: they differ, or there is none.
    """
    sizes = {tensor.shape[0]: tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()}
    if not sizes:
        raise ValueError("data: a batch has no tensor with rows; a batch is a nest of tensors of shape (rows, ...)")
    if len(sizes) > 1:
        first, second = list(sizes.values())[:2]
        raise ValueError(
            f"data: a batch has tensors of {first[0]} and of {second[0]} rows (shapes {first} and {second}); the first "
            "dim must be the row in all of them. Let data be a function of (rank, ranks, seed) to divide it yourself"
        )
    return next(iter(sizes))


def size_of(batch: Any) -> int:
    """Tokens of a batch, if its first tensor is a matrix of whole numbers, else its rows."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim()), None)
    if first is None:
        return 0
    is_tokens = first.dim() == 2 and not first.is_floating_point() and not first.is_complex()
    return first.numel() if is_tokens else first.shape[0]


def _checked(share_of: Callable[[Any], Share], batches: Iterator[Any]) -> Iterator[Share]:
    for number, batch in enumerate(batches):
        yield replace(share_of(batch), checksum=checksum(batch) if number < NUM_BATCHES else None)


def _counted(shares: Iterator[Share], weight: Callable[[Any], Any]) -> Iterator[Share]:
    # Here, in host memory: on a GPU the host would wait for the number.
    for share in shares:
        found = weight(share.batch)
        try:
            counted = float(found)
        except (TypeError, ValueError, RuntimeError):
            counted = nan
        if not 0 <= counted < inf:
            raise ValueError(f"weight: it returned {found!r:.60}; it must return one number of a batch, 0 or more")
        yield replace(share, counted=counted)


def _cut(batch: Any, own: slice, rows: int) -> Any:
    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.dim():
            return value
        # A copy, or the rows of all ranks would stay in memory.
        return value[own].clone() if isinstance(value, Tensor) else copy(value[own])

    return map_tensors(cut, batch, lambda value: _has_an_entry_for_each_row(value, rows))


def _has_an_entry_for_each_row(value: Any, rows: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == rows
    if isinstance(value, list):
        return len(value) == rows and not any(True for _ in tensors_in(value))
    # Of samples that are tuples, a collated batch has the strings in a tuple.
    return type(value) is tuple and len(value) == rows and all(isinstance(entry, str | bytes) for entry in value)


def _batches_of_samples(data: Dataset[Any], rows: int, seed: int) -> Iterator[Any]:
    """Global batches; what is left over at the end of an epoch is dropped, as ``DistributedSampler`` can do."""
    for epoch in count():
        num_batches = 0
        samples = iter(data) if isinstance(data, IterableDataset) else _shuffled(data, f"{seed}/{epoch}")
        while len(chunk := list(islice(samples, rows))) == rows:
            num_batches += 1
            yield default_collate(chunk)
        if not num_batches:
            raise ValueError(_TOO_SMALL.format(len(chunk), rows))


def _shuffled(data: Any, seed: str) -> Iterator[Any]:
    order = list(range(len(data)))
    random.Random(seed).shuffle(order)
    return (data[place] for place in order)


def _from_their_beginning(data: Any) -> Any:
    """Data begin anew wherever they are read: a generator would go on from where a plan, or a run, has left it."""
    held = getattr(data, "__dict__", {}).values()
    if isinstance(data, DataLoader):
        shared = {id(data.dataset): _from_their_beginning(data.dataset)}
    elif isinstance(data, list | tuple) or (callable(data) and not isinstance(data, Dataset)):
        return data
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):  # of the rest nothing says what was read
        shared = {id(one): one for one in held if not isinstance(one, _GENERATORS)}
    else:
        shared = {id(one): one for one in held if isinstance(one, Dataset | Tensor | np.ndarray)}  # large ones
    try:
        return deepcopy(data, shared)
    except Exception:  # whatever a reader's own may hold
        return data


def _returned(batches: Any) -> Iterator[Any]:
    if batches is None:
        raise TypeError("data: the function returned None; it must return the batches of a rank, or yield them")
    return iter(batches)


def _repeated(data: Any) -> Iterator[Any]:
    for epoch in count():
        num_batches = 0
        for batch in data:
            num_batches += 1
            yield batch
        if not num_batches:
            raise ValueError("data: it yields no batch" + (" the second time it is read" if epoch else ""))


def _apart(source: Callable[[], Iterator[Any]], seed: int) -> Iterator[Any]:
    """The batches of ``source``, with random numbers of their own: those of training do not depend on the data.

    The other way round too: dropout on a rank changes neither the order of a shuffled ``DataLoader`` nor augmentation,
    so that all ranks and strategies see the same batches.
    """
    with seeded(seed):
        batches, states, number = source(), generator_states(), 0
    while True:
        with seeded(0):
            set_generator_states(states)
            try:
                batch = next(batches)
            except StopIteration:
                break
            states, number = generator_states(), number + 1
        # Outside of the seed: training goes on from here, with its own random numbers.
        yield batch
    raise DataEndedError(f"data: it ended after {number} batches; yield more of them, or take fewer steps")


def checksum(batch: Any) -> int:
    """Of the rows in all tensors in host memory that have as many rows as the first."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.is_cpu and is_plain(tensor) and tensor.dim() > 0]
    return sum(crc32(row) for tensor in tensors if len(tensor) == len(tensors[0]) for row in _rows(tensor))


def of_all_ranks(by_rank: Sequence[Sequence[int]], is_divided: bool) -> list[int]:
    """The checksum of each global batch.

    Args:
        by_rank: of the data ranks.
        is_divided: each rank has read the whole batch before it took its rows; else it was given its own.
    """
    whole = zip(*by_rank, strict=False)
    return [batch[0] if is_divided and len(set(batch)) == 1 else sum(batch) for batch in whole]


def first_other(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first batch that differs; None if none does of those that both know."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in its own memory, as those of sparse, nested and wrapped tensors do not."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not is_wrapper and not tensor.is_nested and tensor.layout is torch.strided


def _rows(tensor: Tensor) -> Any:
    """The bytes of each row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()
