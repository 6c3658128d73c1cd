"""Have all ranks done the same? A rank that skips a backward or a step is silently averaged in, or drifts away.

    check_agreement(engine)        # on all ranks, for example every hundred steps; raises on all of them

A rank that calls no backward sends zeros, which every mean then contains: right for uneven data, and otherwise a fault
that no number shows. A rank that takes no step, or writes to its parameters, goes on with other ones. So each rank
counts its backwards and steps, and sums the bits of its parameters; between ranks that should be equal these are equal.

Cost: one read of the parameters, and with ``check_agreement`` a message of about 60 bytes a rank. Sharded parameters
differ by rank, so where each rank keeps only pieces there is no sum.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from shardlab.engines.agreement import share_json
from shardlab.engines.base import Engine

_WORDS = {"num_backwards": "backwards", "num_steps": "steps", "checksum": "sum of the parameters' bits"}


@dataclass(frozen=True)
class Did:
    """What a rank has done with its engine so far.

    Attributes:
        num_backwards: backwards begun.
        num_steps: steps taken.
        checksum: the sum of the bits of the parameters, modulo 2**64; None where ranks keep different pieces of them.
    """

    num_backwards: int
    num_steps: int
    checksum: int | None


def did(engine: Engine) -> Did:
    """What this rank has done; communicates nothing."""
    # (Torch's FSDP keeps a rank's pieces inside of its parameters.)
    is_whole = not engine._keeps_pieces and not any(hasattr(param, "to_local") for param in engine.params.values())
    checksum = sum(_sum_of_bits(param) for param in engine.params.values()) % 2**64 if is_whole else None
    return Did(engine.num_backwards, engine.num_steps, checksum)


def disagreement(by_rank: Sequence[Did]) -> str:
    """A sentence that says which ranks have done something else than most; empty if all have done the same.

    Args:
        by_rank: of ranks that train the same parameters, in their order.
    """
    found = []
    for field in fields(Did):
        values = [getattr(each, field.name) for each in by_rank]
        usual, number = Counter(values).most_common(1)[0]
        others = {rank: value for rank, value in enumerate(values) if value != usual}
        if not others:
            continue
        if field.name == "checksum":
            ranks = f"rank {', '.join(map(str, others))} against {number} equal ones" if number > 1 else "all ranks"
            found.append(f"{_WORDS[field.name]} ({ranks})")
        else:
            counts = ", ".join(f"{value} on rank {rank}" for rank, value in others.items())
            found.append(f"{_WORDS[field.name]} ({usual} on most ranks, {counts})")
    return f"agreement: ranks differ in {'; '.join(found)}" if found else ""


def check_agreement(engine: Engine) -> None:
    """Check that all data ranks have called the same and have the same parameters; collective.

    Args:
        engine: between a step and the next backward.

    Raises:
        RuntimeError: they differ; on all ranks. The message says who differs in what.
    """
    shared = share_json(engine.data_comms, engine.mesh.device, asdict(did(engine)))
    if words := disagreement([Did(**each) for each in shared]):
        raise RuntimeError(f"{words}; call backward, step and zero_grad equally often on all ranks")


def _sum_of_bits(tensor: Tensor) -> int:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    # As numbers of eight bytes, which are summed ten times as fast as four; for that they must lie at such a place.
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = raw.numel() // 8 * 8
    return int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum(dtype=torch.int64))
