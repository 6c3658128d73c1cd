"""``shardlab search``: all ways to train a transformer on so many GPUs, the fastest that fits first."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from shardlab.cli.console import answer_table, count, say, say_json, table_of
from shardlab.cli.counted_model import CountedModel
from shardlab.cli.job_words import in_seconds, rates, say_marks, would_do
from shardlab.forecast import search as ways
from shardlab.forecast.job import Job
from shardlab.forecast.predict import doubts_of, forecast_of
from shardlab.forecast.region import expected_miss
from shardlab.forecast.search import RESERVE, Found, miss_of, options_of
from shardlab.planner.formulas import precision_named

from shardlab.cli.forecast import (  # isort: skip
    CARD, AsJson, AsyncTp, Attention, Batch, Card, Compiled, Config, CudaGraph, Fp8, Kept, Measured, Network,
    Params, Ranks, SeqLen, Step, memory_alone, range_in_json, run_as, said_of, step_in, time_of,
)  # fmt: skip

SHOWN = 12  # ways


def search(
    ranks: Ranks,
    config: Config = None,
    params: Params = "",
    gpu: Card = CARD,
    network: Network = "",
    batch: Batch = None,
    seq_len: SeqLen = None,
    precision: Kept = "mixed",
    attention: Attention = "",
    compiled: Compiled = False,
    cuda_graph: CudaGraph = False,
    fp8: Fp8 = False,
    async_tp: AsyncTp = False,
    measured: Measured = None,
    json: AsJson = False,
) -> None:
    """Try all ways to train a transformer on so many GPUs, and rank those that fit by the time of a step.

    All parameters are trained, and there are no stages: LoRA and pipelines are not tried.
    """
    precision_named(precision)  # before anything is read
    model, steps = CountedModel.given(config, params, seq_len or 0), [step_in(file) for file in measured or ()]
    if memory_alone(gpu) is not None:
        raise ValueError(f"gpu: of {gpu} the memory is known and no speed; name a card, such as h100")
    on: dict[str, Any] = {"hardware": gpu, "network": network or None, "states": precision}
    on |= run_as(gpu, attention, compiled=compiled, cuda_graph=cuda_graph, fp8=fp8, async_tp=async_tp)
    found = ways.search(model.sizes, ranks, batch or ranks, calibration=steps, **on)
    if async_tp and all(one.job.tensor == 1 for one in found):
        raise ValueError("async-tp: is given, and no way divides layers; leave it out")
    enough = None if found[0].fits else ways.cards_that_would_do(model.sizes, ranks, **on)
    _tell(model, found, enough, steps, json=json)
    if not json:
        model.print_difference()


def _tell(
    model: CountedModel, found: Sequence[Found], enough: Job | None, steps: Sequence[Step], *, json: bool
) -> None:  # fmt: skip
    ranges: list[dict[str, Any]] = [vars(forecast_of(one.job, steps)) for one in found[:SHOWN]]
    rows = [
        {
            "way": one.job.way, "seconds": one.seconds, "peak_bytes": one.peak_bytes,
            **rates(one.job, one.seconds), "fits": one.fits, "is_tied": one.is_tied, "why_not": one.why_not,
            "warnings": [doubt.said for doubt in doubts_of(one.job, one.parts, is_measured=bool(steps))],
        }
        for one in (found if json else found[:SHOWN])
    ]  # fmt: skip
    if json:
        for row, ends in zip(rows, [*ranges, *[{}] * len(rows)], strict=False):
            row |= {name: ends.get(name) for name in ("least_seconds", "most_seconds")}
        cards, best = None if enough is None else enough.data * enough.tensor, found[0].job
        time = range_in_json(forecast_of(best, steps), expected_miss(best, steps)) if found[0].fits else {}
        say_json({**model.as_json(), "cards_that_would_do": cards, "fastest": time, "ways": rows})
        return
    say(answer_table([model.line, *_found(found, enough, steps)]))
    table = pd.DataFrame(rows)
    shown = table.assign(
        seconds=[*map(in_seconds, ranges)], peak_bytes=(table["peak_bytes"] / 1e9).map("{:.3g}".format),
        tokens_per_second=table["tokens_per_second"].map("{:,.0f}".format), mfu=table["mfu"].map("{:.0%}".format),
    ).drop(columns=["tokens_per_day", "fits", "is_tied", "warnings"])  # fmt: skip
    names = {"seconds": "step (s)", "peak_bytes": "peak (GB)", "tokens_per_second": "tokens/s", "mfu": "MFU",
             "why_not": "why not"}  # fmt: skip
    say(table_of(shown.rename(columns=names), "", 2, right=["step (s)", "peak (GB)", "tokens/s", "MFU"]))
    say_marks(ranges)


def _found(found: Sequence[Found], enough: Job | None, steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """Lines: the fastest that fits, its ties, and how far it may miss, or what would do; how many were tried."""
    fits, (best, *_) = [one for one in found if one.fits], found
    ties = [one for one in fits[1:] if one.is_tied]
    if not fits:
        yield "FASTEST THAT FITS", f"none of {count(len(found), 'way')}; the smallest, {best.job.way}, {best.why_not}"
        yield "WOULD DO", would_do(enough)
    else:
        yield "FASTEST THAT FITS", _in_short(best)
    if ties:
        least = min((best, *ties), key=lambda one: one.peak_bytes)
        other = "" if least is best else f"; of them {_in_short(least)}, needs least memory"
        miss = miss_of(best.job, steps)
        yield "AS FAST", f"{count(len(ties), 'way')}, within the {miss:.0%} by which a forecast may miss{other}"
    if fits:
        step, known = forecast_of(best.job, steps), expected_miss(best.job, steps)
        yield "TIME", time_of(best.job, step, known.share)
        yield from (("WARNING", warning) for warning in step.warnings)
        yield "MISSES BY", said_of(known)
    tight = sum(one.why_not.startswith("tight") for one in found)
    tried = f"{count(len(found), 'way')}: {len(fits)} fit, with {RESERVE - 1:.0%} on top that the allocator may reserve"
    yield "TRIED", f"{tried}; {tight} are tight, without that; {len(found) - len(fits) - tight} do not fit"
    if fits:
        yield "NEXT", f"shardlab forecast with {options_of(best.job)}: what such a step is spent on"


def _in_short(one: Found) -> str:
    return f"{one.job.way}: {one.seconds:.3g} s a step, {one.peak_bytes / 1e9:.3g} GB at the peak"
