"""What an optimizer looks at when it steps an element: that element, the whole tensor, or the whole model.

==================  ==================================================
looks at            exact where a rank steps
==================  ==================================================
one element         any pieces
the whole tensor    whole parameters: a partition other than 'elements'
the whole model     the whole model: ddp, bucketed, fsdp no_shard; no pipeline
==================  ==================================================

Torch's own are known. Any other says so itself, in its class or on the instance: ``shardlab_looks_at = "element"``,
"tensor" or "model".
"""

from enum import StrEnum

import torch

from shardlab.vocabulary import Partition

DECLARATION = "shardlab_looks_at"
_WHOLE = f"use one of {', '.join(other for other in Partition if other is not Partition.ELEMENTS)}"


class LooksAt(StrEnum):
    """What a step of one element depends on."""

    ELEMENT = "element"
    TENSOR = "tensor"
    MODEL = "model"


_KNOWN = {
    LooksAt.ELEMENT: "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD SparseAdam",
    LooksAt.TENSOR: "Adafactor Muon",
    LooksAt.MODEL: "LBFGS",
}
# By the class itself: a subclass may do anything else. Not all torch versions have all of them.
KNOWN = {
    kind: looks_at
    for looks_at, names in _KNOWN.items()
    for kind in (getattr(torch.optim, name, None) for name in names.split())
    if kind is not None
}


def looks_at(optimizer: torch.optim.Optimizer) -> LooksAt | None:
    """What an optimizer looks at; None where nobody has said.

    Raises:
        ValueError: it declares something else than the three.
    """
    declared = getattr(optimizer, DECLARATION, None)
    if declared is None:
        return KNOWN.get(type(optimizer))
    if declared not in tuple(LooksAt):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer: {kind}.{DECLARATION} is {declared!r}, not one of {', '.join(LooksAt)}")
    return LooksAt(declared)


def check_fits(optimizer: torch.optim.Optimizer, partition: Partition | None, *, is_sliced: bool = False) -> None:
    """Check that an optimizer steps right where parameters are divided.

    Args:
        optimizer: the user's.
        partition: 'elements' cuts parameters, the others give whole ones to ranks, as a pipeline does; None where each
            rank steps all.
        is_sliced: whether some parameters are slices of tensor parallelism.

    Raises:
        ValueError: its steps would depend on what other ranks have, or nobody has said what they depend on.
    """
    if partition is None and not is_sliced:
        return
    kind, found = type(optimizer).__name__, looks_at(optimizer)
    if found is LooksAt.MODEL:
        raise ValueError(
            f"optimizer: {kind} looks at the whole model, so it cannot be sharded; use bucketed or ddp, and no pipeline"
        )
    if found is LooksAt.TENSOR and is_sliced:
        raise ValueError(
            f"optimizer: {kind} looks at more than one element at a time, and the model's parameters are slices over "
            "the tensor axis; use an optimizer that steps element by element, such as AdamW"
        )
    if found is LooksAt.TENSOR and partition is Partition.ELEMENTS:
        raise ValueError(f"partition: {kind} looks at whole tensors, and 'elements' cuts through them; {_WHOLE}")
    if found is None:
        raise ValueError(
            f"optimizer: {kind} is none of torch's own, and this rank steps a part of the model; say in its class what "
            f"a step of one element looks at: {DECLARATION} = 'element', 'tensor' or 'model'; for 'tensor' use a "
            "partition other than 'elements'"
        )
