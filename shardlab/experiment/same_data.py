"""Have all strategies, and a run that goes on, trained on the same rows? Only then can their losses be compared.

Each rank adds up the checksums of the rows of its first batches. The sum over ranks depends neither on the order of the
rows nor on how they are divided.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shardlab.comm.trees import tensors_in

NUM_BATCHES = 10  # that are looked at: what is drawn without a seed differs from the first one on
Manifests = Mapping[str, Mapping[str, Any]]
_ADVICE = "compare seeds Python's, NumPy's and torch's generators; seed any other, as in np.random.default_rng(0)"


def checksum(batch: Any) -> int:
    """Of the rows in all tensors in host memory that have as many rows as the first."""
    tensors = [tensor for tensor in tensors_in(batch) if _has_rows(tensor)]
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


def others_than(reference: str, manifests: Manifests) -> dict[str, int]:
    """The runs that trained on other rows than ``reference``, and from which step on."""
    known = {run: manifest.get("batches", []) for run, manifest in manifests.items()}
    found = {run: first_other(known[reference], batches) for run, batches in known.items()}
    return {run: _step(place, manifests[run]) for run, place in found.items() if place is not None}


def trained_on_others(manifests: Manifests, reference: str) -> str:
    """One sentence if runs trained on other rows than ``reference``, or than the first one without it; else empty."""
    first = reference if reference in manifests else next(iter(manifests))
    others = others_than(first, manifests)
    if not others:
        return ""
    return (
        f"The DATA differ, so losses are not compared: from step {min(others.values())} on {', '.join(others)} trained "
        f"on other rows than {first}; {_ADVICE}."
    )


def resumed_on_others(manifests: Manifests) -> str:
    """One sentence if runs went on from a checkpoint that was trained on other rows; else empty."""
    known = {run: manifest.get("other_batch") for run, manifest in manifests.items()}
    others = {run: _step(place, manifests[run]) for run, place in known.items() if place is not None}
    if not others:
        return ""
    return (
        f"The DATA differ from those that were trained on before the checkpoint, from step {min(others.values())} on, "
        f"so {', '.join(others)} did not go on as one long run would; {_ADVICE}."
    )


def _step(batch: int, manifest: Mapping[str, Any]) -> int:
    return batch // int(manifest["config"].get("accumulation", 1))


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in its own memory, as those of sparse, nested and wrapped tensors do not."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not is_wrapper and not tensor.is_nested and tensor.layout is torch.strided


def _has_rows(tensor: Tensor) -> bool:
    return tensor.is_cpu and is_plain(tensor) and tensor.dim() > 0


def _rows(tensor: Tensor) -> Any:
    """The bytes of each row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()
