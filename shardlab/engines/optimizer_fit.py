"""Which optimizers a division of the parameters bears: what one looks at must lie whole on the rank that steps it.

==================  ==================================================
looks at            exact where a rank steps
==================  ==================================================
one element         any pieces
the whole tensor    whole parameters: a partition other than 'elements'
the whole model     the whole model: ddp, bucketed, fsdp no_shard
==================  ==================================================

What does not fit is refused when the engine is built, before its first step.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from shardlab.engines.looks_at import LooksAt, Stepped, flat_pieces, looks_at, pieces_along
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.slices import TensorSlice
from shardlab.vocabulary import Partition

Make = Callable[[StepTensors], torch.optim.Optimizer]


def check_partition(
    optimizer: torch.optim.Optimizer, stepped: Stepped, partition: Partition, num_ranks: int, *, by_rows: bool = False
) -> None:
    """Refuse an optimizer that a partition would make wrong.

    Args:
        optimizer: new.
        stepped: what it steps.
        partition: of the parameters.
        num_ranks: that share them; with one, every optimizer fits.
        by_rows: whether 'elements' leaves rows whole, as the layout 'dim0' does.

    Raises:
        ValueError: the partition cuts what the optimizer looks at, or nobody can tell; see ``looks_at``.
    """
    if num_ranks == 1:
        return
    kind = type(optimizer).__name__
    cuts = (pieces_along(0) if by_rows else flat_pieces,) if partition is Partition.ELEMENTS else ()
    found = looks_at(optimizer, stepped, cuts)
    if found is LooksAt.MODEL:
        raise ValueError(f"optimizer: {kind} looks at the whole model, so it cannot be sharded; use bucketed or ddp")
    if found is LooksAt.TENSOR and partition is Partition.ELEMENTS:
        raise _cuts_through(kind, by_rows=by_rows)


def check_sliced(optimizer: torch.optim.Optimizer, stepped: Stepped, slices: Mapping[str, TensorSlice]) -> None:
    """Refuse an optimizer that looks at more than elements, where some parameters are slices.

    Args:
        optimizer: new.
        stepped: what it steps; the shapes are those of the slices.
        slices: of the parameters, by name.

    Raises:
        ValueError: it does, so that its step would not be that of the whole model; or nobody can tell.
    """
    if not any(found.num_ranks > 1 for found in slices.values()):
        return
    if looks_at(optimizer, stepped, (pieces_along(0), pieces_along(1))) is not LooksAt.ELEMENT:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} looks at more than one element at a time, and the model's "
            "parameters are slices over the tensor axis; use an optimizer that steps element by element, such as AdamW"
        )


@contextlib.contextmanager
def refused_by_partition(
    make: Make, stepped: Stepped, partition: Partition, num_ranks: int, *, by_rows: bool = False
) -> Iterator[None]:
    """Inside, an optimizer whose constructor refuses pieces, as Muon's does, is refused with the partition's name.

    Args:
        make: what is called inside; it is called again where that fails, with whole tensors that have no memory.
        stepped: what it is given.
        partition: of the parameters.
        num_ranks: that share them.
        by_rows: see ``check_partition``.

    Raises:
        ValueError: with whole tensors it succeeds.
        Exception: else what was raised inside.
    """
    try:
        yield
    except Exception as error:  # of a class of the user's
        kind = _made_of_whole(make, stepped) if num_ranks > 1 and partition is Partition.ELEMENTS else None
        if kind is None:
            raise
        raise _cuts_through(kind, by_rows=by_rows) from error


def _made_of_whole(make: Make, stepped: Stepped) -> str | None:
    """The class of optimizer that takes the parameters if they are whole; None if it does not take those either."""
    whole = {
        name: torch.empty(stepped.shapes[name], dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in stepped.tensors.items()
    }
    try:
        return type(make(StepTensors(whole))).__name__
    except Exception:  # then it is not the pieces that it refuses
        return None


def _cuts_through(kind: str, *, by_rows: bool) -> ValueError:
    allowed = ", ".join(other for other in Partition if other is not Partition.ELEMENTS)
    layout = " with layout='flat'" if by_rows else ""
    return ValueError(
        f"partition: {kind} looks at whole tensors, and 'elements' cuts through them; use one of {allowed}{layout}"
    )
