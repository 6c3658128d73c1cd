"""Which buffers does a rank compute from its own rows, as a vector quantisation its codebook?

With such a buffer, ranks that share a batch compute something else than one process, and all is right. BatchNorm's are
not among them: its statistics do not change the loss of training, and the layer itself is named (``trained``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.experiment.same_data import checksum, is_plain

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
            named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            what = f"buffer {named} differs" if len(names) == 1 else f"buffers {named} differ"
            return f"{what} between ranks after step {step}, as what is computed from a rank's own rows does"
    return ""


def said_of(manifests: Iterable[Mapping[str, Any]]) -> str:
    """The same from manifests; empty too where ranks disagree, of which buffers may be a consequence."""
    said = (known.get("own_buffers") for known in manifests if not known.get("disagreement"))
    return next(filter(None, said), "")
