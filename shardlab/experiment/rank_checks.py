"""What each rank checks of its own: the rows it trained on, its buffers, and whether its numbers are numbers.

Rows: have all strategies, and a run that goes on, trained on the same ones? Only then can their losses be compared.
Each rank adds up the checksums of the rows of its first batches. The sum over ranks depends neither on the order of the
rows nor on how they are divided.

Buffers: which does a rank compute from its own rows, as a vector quantisation its codebook? With such a buffer, ranks
that share a batch compute something else than one process, and all is right. BatchNorm's are not among them: its
statistics do not change the loss of training, and the layer itself is named (``comparison.differences_by_rank``).

Numbers: after a reduction a NaN of one rank is in the mean of all. So each rank checks its own numbers before any
reduction: the loss of its own rows, and one of its gradients. A NaN anywhere in a backward spreads towards the input,
so it is enough to check the gradient of the module's first trainable parameter, which is among the last to be computed.
This costs one sum over that gradient per backward.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.comm.trees import tensors_in

NUM_BATCHES = 10  # that are looked at: what is drawn without a seed differs from the first one on
Manifests = Mapping[str, Mapping[str, Any]]
_ADVICE = "compare seeds Python's, NumPy's and torch's generators; seed any other, as in np.random.default_rng(0)"


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


def _rows(tensor: Tensor) -> Any:
    """The bytes of each row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()


Sums = Mapping[int, Mapping[str, int]]
_NAMED = 3  # buffers, in a sentence


def sums_of(module: nn.Module) -> dict[str, int]:
    """The checksum of each buffer on this rank."""
    modules = ((name, each) for name, each in module.named_modules() if not isinstance(each, _BatchNorm))
    buffers = (pair for name, each in modules for pair in each.named_buffers(name, recurse=False))
    own = ((name, getattr(buffer, "_local_tensor", buffer)) for name, buffer in buffers)
    return {name: checksum(buffer.cpu()[None]) for name, buffer in own if not buffer.is_meta and is_plain(buffer)}


def first_that_differ(by_rank: Sequence[Sums], num_tensor_ranks: int) -> str:
    """The first step after which data ranks have other buffers, in words; empty if there is none.

    Args:
        by_rank: of each rank, after some steps, its ``sums_of``.
        num_tensor_ranks: ranks of the tensor axis, which hold other slices.
    """
    same_slices = [by_rank[first::num_tensor_ranks] for first in range(num_tensor_ranks)]
    for step, known in by_rank[0].items():
        names = [name for name in known if any(len({each[step][name] for each in ranks}) > 1 for ranks in same_slices)]
        if names:
            differ = f"{_buffers(names)} {'differs' if len(names) == 1 else 'differ'}"
            return f"{differ} between ranks after step {step}, as what is computed from a rank's own rows does"
    return ""


def broadcast_said(first_rank: Sums) -> str:
    """Which buffers change in training, in words, where all ranks get the first one's; empty if there is none."""
    steps = list(first_rank.values())
    names = [name for name in steps[0] if len({step[name] for step in steps}) > 1]
    return f"all ranks have the first one's {_buffers(names)} (broadcast_buffers)" if names else ""


def _buffers(names: Sequence[str]) -> str:
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{'buffer' if len(names) == 1 else 'buffers'} {named}"


def own_buffers_said(manifests: Iterable[Mapping[str, Any]]) -> str:
    """The same from manifests; empty too where ranks disagree, of which buffers may be a consequence."""
    said = (known.get("own_buffers") for known in manifests if not known.get("disagreement"))
    return next(filter(None, said), "")


DATA, LOSS, GRADIENTS = "data", "loss", "gradients"


class FiniteCheck:
    """Of one rank: in which step its own loss, and its own gradients, were first inf or NaN.

    Args:
        params: of the module, in its order; None for no look at gradients, because a scaler expects some to overflow.

    Attributes:
        lost: the first such step, by ``DATA``, ``LOSS`` and ``GRADIENTS``; empty while all is well.
    """

    def __init__(self, params: Iterable[nn.Parameter] | None) -> None:
        self.lost: dict[str, int] = {}
        self._sums: list[Tensor | float] = []
        self._is_in_data = False
        first = next((param for param in params or () if param.requires_grad), None)
        # Called with the gradient as backward has computed it, before an engine's own hook takes it away.
        self._hook = None if first is None else first.register_hook(self._look)

    def computed(self, loss: Any, batch: Any) -> None:
        """A loss on the CPU; of one that is inf or NaN the rows are looked at."""
        if isinstance(loss, Tensor) and loss.is_cpu and not loss.detach().isfinite().all():
            tensors = [tensor for tensor in tensors_in(batch) if is_plain(tensor)]
            self._is_in_data |= not all(bool(tensor.isfinite().all()) for tensor in tensors)

    def ended(self, step: int, own_loss: float) -> None:
        """A step has ended; ``own_loss`` is that of this rank's rows."""
        sums, self._sums = self._sums, []
        # Read only now: on a GPU the host has waited for the loss already.
        if not all(isfinite(each) for each in sums):
            self.lost.setdefault(GRADIENTS, step)
        if self._is_in_data:
            self.lost.setdefault(DATA, step)
        if not isfinite(own_loss):
            self.lost.setdefault(LOSS, step)

    def remove(self) -> None:
        """Look at no gradient any more."""
        if self._hook is not None:
            self._hook.remove()

    def _look(self, gradient: Tensor) -> None:
        # Of a DTensor take only this rank's shard: a sum over the whole tensor would need communication.
        own: Tensor = getattr(gradient, "_local_tensor", gradient)
        # Sum in float32 at least: a 16-bit sum may overflow although every element is finite.
        total = own.detach().sum(dtype=torch.promote_types(own.dtype, torch.float32))
        # A number and no tensor on the CPU, where what is held after a step is counted to the byte.
        self._sums.append(total if total.is_cuda else float(total))
