"""Which way to train a transformer on so many GPUs is fastest, and why each other falls out.

Every strategy, division by tensor parallelism, micro-batch and recomputation that gives the wanted batch is forecast
(``predict_step``). What needs more memory than there is falls out, with how much it needs; of the rest the fastest is
first, and the others say by how much they are slower, and what of them takes longer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardlab.planner.forecast import USABLE, Forecast, forecast_of
from shardlab.planner.job import Job

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp", "shard_grad_op", "hybrid_shard")
RECOMPUTES: tuple[int | str, ...] = (0, "selective", "full")
TENSORS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Found:
    """One way to train.

    Attributes:
        job: the way.
        forecast: of a step.
        why_not: empty for the fastest that fits; else why it falls out.
    """

    job: Job
    forecast: Forecast
    why_not: str

    @property
    def name(self) -> str:
        """In a few words."""
        return self.job.way


def search(sizes: Mapping[str, Any], ranks: int, sequences: int, **options: Any) -> list[Found]:
    """All ways, the fastest that fits first, then the others that fit by time, then those that do not by memory.

    Args:
        sizes: hidden, layers, heads, kv_heads, ffn, vocab, seq_len and perhaps gated, see ``predict_step``.
        ranks: GPUs.
        sequences: of a step, over all GPUs.
        options: ``hardware``, ``network``, ``precision``, ``compiled``, ``attention``, ``calibration``.

    Raises:
        ValueError: an argument is not allowed, or nothing divides so.
    """
    calibration = options.pop("calibration", ())
    jobs = list(_jobs(sizes, ranks, sequences, options))
    if not jobs:
        raise ValueError(
            f"sequences: {sequences} a step cannot be divided over {ranks} ranks; give a multiple of the data ranks"
        )
    found = [(job, forecast_of(job, calibration)) for job in jobs]
    room = USABLE * jobs[0].card.memory_bytes
    fits = sorted((one for one in found if one[1].peak_bytes <= room), key=lambda one: one[1].seconds)
    rest = sorted((one for one in found if one[1].peak_bytes > room), key=lambda one: one[1].peak_bytes)
    best = fits[0][1] if fits else None
    return [
        *(Found(job, forecast, "" if forecast is best else _slower(forecast, best)) for job, forecast in fits),
        *(Found(job, forecast, _too_large(forecast, room)) for job, forecast in rest),
    ]


def _jobs(sizes: Mapping[str, Any], ranks: int, sequences: int, options: Mapping[str, Any]) -> Iterator[Job]:
    for tensor in TENSORS:
        if ranks % tensor or sizes["heads"] % tensor or sizes["ffn"] % tensor:
            continue
        data = ranks // tensor
        if sequences % data:
            continue
        for micro_batch in MICRO_BATCHES:
            if sequences // data % micro_batch:
                continue
            base = Job(
                **sizes, micro_batch=micro_batch, data=data, accumulation=sequences // data // micro_batch,
                tensor=tensor, strategy="fsdp" if data > 1 else "single", **options,
            )  # fmt: skip
            if tensor > base.links.per_host:
                continue
            for recompute in RECOMPUTES:
                for strategy in STRATEGIES if data > 1 else ("single",):
                    if strategy == "hybrid_shard" and (data <= base.per_host or data % base.per_host):
                        continue
                    yield replace(base, strategy=strategy, recompute=recompute)


def _slower(forecast: Forecast, best: Forecast | None) -> str:
    assert best is not None
    more = {name: seconds - best.parts.get(name, 0.0) for name, seconds in forecast.parts.items()}
    most = max(more, key=lambda name: more[name])
    return f"{forecast.seconds / best.seconds - 1:.0%} slower: {more[most]:.2g} s more of {most}"


def _too_large(forecast: Forecast, room: float) -> str:
    return f"needs {forecast.peak_bytes / 1e9:.0f} GB, and {room / 1e9:.0f} GB can be used"
