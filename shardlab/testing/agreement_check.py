"""Have all ranks done the same? A rank that skips a backward or a step is silently averaged in, or drifts away.

    check_agreement(engine)        # on all ranks, for example every hundred steps; raises on all of them

A rank that calls no backward sends zeros, which every mean then contains: right for uneven data, and otherwise a fault
that no number shows. A rank that takes no step, steps with another learning rate, or writes to its parameters, goes on
with other ones. So each rank counts its backwards and steps, notes the options of its optimizer, and sums the bits of
its parameters and of each buffer; between ranks that should be equal these are equal. A buffer that forward computes
from a rank's own rows (BatchNorm's statistics, a codebook) drifts apart unless it is broadcast: with the engine's
``broadcast_buffers``, and under torch's DDP, no buffer is compared.

Tensor ranks that are given different rows drift apart too, or where a parameter inside a divided region has no style,
or where the loss has a norm of parameters, of which each rank sees its slices. So they are compared by each parameter
that the tensor axis does not divide, or by the same piece of it; by its size, since each has computed its gradient by
itself, and kernels may round differently. What is next to 0 beside the other parameters may be all rounding, such as a
bias before a norm, whose gradient is 0: it is compared on their scale. (Not under Adam, which makes steps of full size
of any gradient: there ranks whose kernels round differently do drift apart in it.)

Cost: one read of the parameters, and with ``check_agreement`` a message of a few hundred bytes a rank, about 40 more
for each buffer and, with a tensor axis, 60 for each whole parameter. Sharded parameters differ by data rank, so where
each rank keeps only pieces there is no sum, nor where a strategy says that ranks differ (``Strategy.ranks_differ``).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.same_on_all_ranks import share_json
from shardlab.engines.any_engine import AnyEngine
from shardlab.engines.engine import Engine

_CALLS = "call backward, step and zero_grad equally often on all ranks"
_OPTIONS = "give the optimizer the same options, for example by equal schedulers, and freeze the same, on all ranks"
_WRITES = "write parameters alike on all ranks, for example after a broadcast"
_BUFFERS = (
    "where forward computes a buffer from a rank's own rows, build the engine with broadcast_buffers=True, which sends "
    "the first data rank's after each step, or let forward reduce it over ranks, as SyncBatchNorm does"
)
_TENSOR_RANKS = (
    "give all tensor ranks the same rows (those of engine.data_rank); sum over the tensor axis what the loss takes of "
    "the parameters themselves, which are slices, such as a norm; give parameters on divided activations a style"
)
_ROUNDING = 1e-5  # the share by which sizes of a parameter may differ between tensor ranks; more in half precision
_NAMED = 3  # parameters or buffers, in a message


@dataclass(frozen=True)
class Did:
    """What a rank has done with its engine so far.

    Attributes:
        num_backwards: backwards begun.
        num_steps: steps taken.
        checksum: the sum of the bits of the parameters, modulo 2**64; None where ranks keep different pieces of them,
            or differ by design.
        options: of the optimizer's groups, as text: "group 0's lr" -> "0.1"; and which parameters are frozen.
        whole: for each parameter that the tensor axis does not divide, the sum of the absolute values of what this rank
            steps of it, and by how much this may differ; empty without a tensor axis.
        buffers: for each, the sum of its bits; empty where they are not compared.
    """

    num_backwards: int
    num_steps: int
    checksum: int | None
    options: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, Sequence[float]] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, str]:
        """What is counted, in words."""
        return {"backwards": str(self.num_backwards), "steps": str(self.num_steps)}


def did(engine: AnyEngine) -> Did:
    """What this rank has done, without its buffers; communicates nothing."""
    checksum, whole = None, {}
    # Torch's FSDP keeps each rank's pieces inside of the parameters.
    is_torchs = any(hasattr(param, "to_local") for param in engine.params.values())
    ranks_differ = isinstance(engine, Engine) and engine.strategy.ranks_differ
    if not is_torchs and not ranks_differ and (engine.sharded_over is None or not engine._full_gathers):
        # Equal on all data ranks: the parameters, or what no_shard steps in their place.
        equal = engine.step_tensors() if engine._full_gathers else engine.params.values()
        # A strategy of the reader's own may have freed what it gathers again.
        if all(one.untyped_storage().nbytes() >= one.nbytes for one in equal):
            checksum = sum(map(_sum_of_bits, equal)) % 2**64
    if engine.tensor_comm is not None and not is_torchs:
        whole = _sizes_of_whole(engine)
    options = {
        f"group {number}'s {option}": _text(value)
        for number, group in enumerate(engine.optimizer.param_groups)
        for option, value in group.items() if option != "params"
    }  # fmt: skip
    # Under ZeRO a rank that has frozen one counts as zeros, and steps its own piece of it no more.
    options["frozen"] = ", ".join(name for name, one in engine.params.items() if not one.requires_grad) or "nothing"
    return Did(engine.num_backwards, engine.num_steps, checksum, options, whole)


def disagreement(by_rank: Sequence[Did], num_tensor_ranks: int = 1, ranks: Sequence[int] | None = None) -> str:
    """A sentence that says which ranks have done something else than most; empty if all have done the same.

    Args:
        by_rank: of all ranks that train one model, in their order: tensor ranks of one data rank follow each other.
        num_tensor_ranks: ranks of the tensor axis, which hold different slices.
        ranks: what each of them is called; None for its place in ``by_rank``.
    """
    return _told(_differences(by_rank, num_tensor_ranks, ranks or range(len(by_rank))))


def check_agreement(engine: AnyEngine) -> None:
    """Check that all ranks have called the same and have the same options and parameters; collective.

    Args:
        engine: between a step and the next backward.

    Raises:
        RuntimeError: they differ; on all ranks. The message says who differs in what.
    """
    buffers = {} if engine.broadcasts_buffers else dict(engine.module.named_buffers())
    sums = {
        name: _sum_of_bits(one)
        for name, one in buffers.items() if one.layout is torch.strided and not (one.is_meta or one.is_nested)
    }  # fmt: skip
    # With its rank: the tensor axis is the last one here, and in a mesh it may be any.
    own_rank = engine.comm.ranks[engine.comm.rank]
    shared = share_json(engine.comms, engine.mesh.device, [own_rank, asdict(replace(did(engine), buffers=sums))])
    ranks, by_rank = [rank for rank, _ in shared], [Did(**each) for _, each in shared]
    num_tensor_ranks = 1 if engine.tensor_comm is None else engine.tensor_comm.num_ranks
    if differences := _differences(by_rank, num_tensor_ranks, ranks):
        raise RuntimeError(f"{_told(differences)}; {differences[0][1]}")


def _unequal(
    by_rank: Sequence[Did], num_tensor_ranks: int, ranks: Sequence[int], what: str
) -> Iterator[tuple[Sequence[Did], str]]:
    """For each slice that differs on the data ranks that hold it: what they have done, and which differ, in words."""
    for first in range(num_tensor_ranks):
        same_slices, called = by_rank[first::num_tensor_ranks], ranks[first::num_tensor_ranks]
        _, number, others = _usual([getattr(each, what) for each in same_slices])
        if others:
            one = ", ".join(str(called[place]) for place in others)
            named = "all ranks" if len(called) == len(ranks) else _named(called)
            yield same_slices, f"rank {one} against {number} equal ones" if number > 1 else named


def _told(differences: Sequence[tuple[str, str]]) -> str:
    found = "; ".join(what for what, _ in differences)
    return f"agreement: ranks differ in {found}" if found else ""


def _differences(by_rank: Sequence[Did], num_tensor_ranks: int, ranks: Sequence[int]) -> list[tuple[str, str]]:
    """What differs and what to do about it, causes before what they bring about."""
    told = [each.counts | dict(each.options) for each in by_rank]
    found = []
    for what in dict.fromkeys(key for each in told for key in each):
        usual, _, others = _usual([each.get(what, "absent") for each in told])
        if others:
            values = ", ".join(f"{value} on rank {ranks[place]}" for place, value in others.items())
            advice = _CALLS if what in by_rank[0].counts else _OPTIONS
            found.append((f"{what} ({usual} on most ranks, {values})", advice))
    for _, who in _unequal(by_rank, num_tensor_ranks, ranks, "checksum"):
        found.append((f"sum of the parameters' bits ({who})", _WRITES))
    for same_slices, who in _unequal(by_rank, num_tensor_ranks, ranks, "buffers"):
        found.append((f"{_buffers(same_slices)} ({who})", _BUFFERS))
    # Last: wrong rows on tensor ranks are averaged over the data ranks, which agree all the same.
    for first in range(0, len(by_rank), num_tensor_ranks):
        same_rows = slice(first, first + num_tensor_ranks)
        if names := _drifted(by_rank[same_rows]):
            drifted = f"parameters that no rank divides ({_named(ranks[same_rows])}: {_first(names)})"
            found.append((drifted, _TENSOR_RANKS))
    return found


def _buffers(same_slices: Sequence[Did]) -> str:
    names = dict.fromkeys(name for each in same_slices for name in each.buffers)
    differ = [name for name in names if len({each.buffers.get(name) for each in same_slices}) > 1]
    return f"{'buffer' if len(differ) == 1 else 'buffers'} {_first(differ)}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, sorted(ranks)))}"


def _drifted(tensor_ranks: Sequence[Did]) -> list[str]:
    """The whole parameters that differ between the tensor ranks of one data rank by more than rounding."""
    drifted = []
    for name, (size, tolerance) in tensor_ranks[0].whole.items():
        # One by one: beside a large embedding, the drift of a norm would be rounding.
        sizes = [each.whole[name][0] for each in tensor_ranks]
        are_close = all(math.isclose(other, size, rel_tol=0.0, abs_tol=tolerance) for other in sizes)
        if not are_close and not all(map(math.isnan, sizes)):
            drifted.append(name)
    return drifted


def _usual(values: Sequence[Any]) -> tuple[Any, int, dict[int, Any]]:
    """The most frequent value, how many ranks have it, and the values of the others, by rank."""
    number_of = Counter(map(repr, values))
    usual = max(values, key=lambda value: number_of[repr(value)])
    others = {rank: value for rank, value in enumerate(values) if value != usual}
    return usual, len(values) - len(others), others


def _sizes_of_whole(engine: AnyEngine) -> dict[str, tuple[float, float]]:
    """Size and tolerance of what is stepped, by name: of pieces, the same ones on all tensor ranks of a data rank."""
    stepped = {
        name: tensor.detach()
        for name, tensor in engine.step_tensors().items()
        # Others, such as masks, are not trained.
        if tensor.is_floating_point() or tensor.is_complex()
    }
    if engine.sharded_over is None:  # else a rank may have only pieces of whole ones that are next to 0
        stepped = {name: tensor for name, tensor in stepped.items() if name not in engine.slices}
    sizes = {name: float(tensor.abs().sum(dtype=torch.float64)) for name, tensor in stepped.items()}
    means = [size / stepped[name].numel() for name, size in sizes.items() if size > 0]
    # At most 1: beside one that is much larger, such as a temperature, the drift of a norm would be rounding.
    scale = min(1.0, max(filter(math.isfinite, means), default=0.0))
    compute = engine.strategy.precision.compute if isinstance(engine, Engine) else None
    return {
        name: (size, _share(tensor, compute) * (max(size, scale * tensor.numel()) if math.isfinite(size) else 0.0))
        for (name, tensor), size in zip(stepped.items(), sizes.values(), strict=True)
        if name not in engine.slices
    }


def _share(tensor: Tensor, compute: torch.dtype | None) -> float:
    return max(_ROUNDING, *(torch.finfo(dtype).eps for dtype in (tensor.dtype, compute) if dtype is not None))


def _text(option: Any) -> str:
    if isinstance(option, Tensor):
        return str(option.tolist()) if option.numel() <= 16 else f"bits {_sum_of_bits(option)}"
    if isinstance(option, (list, tuple)):
        return f"({', '.join(map(_text, option))})"
    # Of anything else the class: the text of an object may have its address, which differs by rank.
    return str(option) if isinstance(option, (bool, int, float, str, type(None))) else type(option).__name__


def _sum_of_bits(tensor: Tensor) -> int:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    # As numbers of eight bytes, which are summed ten times as fast as four; for that they must lie at such a place.
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = raw.numel() // 8 * 8
    return int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum(dtype=torch.int64))
