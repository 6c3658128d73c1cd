"""``shardlab forecast``: how long a step of a transformer takes on GPUs that are not here, and what it holds."""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from shardlab.cli.console import answer_table, count, say, say_json, table_of
from shardlab.cli.counted_model import CountedModel
from shardlab.cli.job_words import DOES_NOT_FIT, in_digits, memory_of, planned, rates, tell_all, verdict, would_do
from shardlab.forecast.job import Job
from shardlab.forecast.peak import peak_bytes, rest_bytes
from shardlab.forecast.predict import Forecast, doubts_of, forecast_of
from shardlab.forecast.region import OUTSIDE, USUAL_MISS, Miss, expected_miss, range_of
from shardlab.forecast.search import cards_for, next_to_try
from shardlab.planner.formulas import precision_named
from shardlab.planner.gpu import Gpu
from shardlab.planner.setup import STRATEGIES

CARD = "h100"  # where none is given
DATA_STRATEGIES = STRATEGIES[1:]  # all but the one process
Step = tuple[dict[str, Any], float]
"""Arguments of one that was measured, and its seconds."""

Config = Annotated[
    Path | None,
    typer.Option(help="The config.json of a transformer, as it lies beside its weights.", show_default=False),
]
Params = Annotated[str, typer.Option(help="Instead: parameters of a model like Llama, such as 13B or 350M.")]
Ranks = Annotated[int, typer.Option(min=1, help="Number of GPUs.")]
Card = Annotated[str, typer.Option(help="A card, such as h100 or 4090; or a memory, such as 24GB, for bytes alone.")]
Network = Annotated[
    str, typer.Option(help="For example '8 per host, nvlink4, 400Gb/s per GPU'; by default what is usual for the card.")
]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences of a step; by default one a data rank.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence; by default as many as the file says.")]
Kept = Annotated[
    str,
    typer.Option(
        help="What is kept of a parameter: mixed (16 bytes), fp32 (16), mixed-8bit (10), pure-bf16 (8), or bytes of "
        "parameter, gradient, master weight and Adam's two moments, such as 2+4+4+4+4."
    ),
]
Measured = Annotated[
    list[Path] | None,
    typer.Option(
        help="A step of this cluster that was measured: what forecast prints as --json, with the seconds that it took; "
        "up to three times."
    ),
]
Compiled = Annotated[bool, typer.Option("--compiled", help="Layers are compiled.")]
CudaGraph = Annotated[bool, typer.Option("--cuda-graph", help="A step is launched as a CUDA graph.")]
Fp8 = Annotated[bool, typer.Option("--fp8", help="Products of layers are computed in 8 bits.")]
AsyncTp = Annotated[bool, typer.Option("--async-tp", help="Tensor-parallel messages go in parts, beside products.")]
Attention = Annotated[
    str,
    typer.Option(
        help="flash-1, flash-2, unfused or op-by-op (in plain operations, as in many a model of one's own); by default "
        "flash-2 for layers like Llama's, else flash-1."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def forecast(
    ranks: Ranks,
    config: Config = None,
    params: Params = "",
    gpu: Card = CARD,
    network: Network = "",
    strategy: Annotated[str, typer.Option(help="Of the data ranks, by default fsdp; or all of them, in a table.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    batch: Batch = None,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of a forward on a rank.")] = 1,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Only the last of a step's micro-batches reduces gradients.")
    ] = False,
    seq_len: SeqLen = None,
    recompute: Annotated[str, typer.Option(help="Layers that are computed again: a number, full or selective.")] = "0",
    precision: Kept = "mixed",
    attention: Attention = "",
    compiled: Compiled = False,
    cuda_graph: CudaGraph = False,
    fp8: Fp8 = False,
    async_tp: AsyncTp = False,
    measured: Measured = None,
    json: AsJson = False,
) -> None:
    """Say how long a step of a transformer takes on GPUs that are not here, and what it holds at its peak.

    All parameters are trained, and there are no stages: LoRA and pipelines are not forecast.

    For example: shardlab forecast --params 13B --ranks 4 --gpu h100
    """
    precision_named(precision)  # before anything is read
    if async_tp and tp == 1:
        raise ValueError("async-tp: is given, and no layer is divided; give --tp 2, for example, or leave it out")
    model, steps = CountedModel.given(config, params, seq_len or 0), [step_in(file) for file in measured or ()]
    way = {
        "tensor": tp, "micro_batch": micro_batch, "no_sync": no_sync, "states": precision,
        "strategy": strategy or ("fsdp" if ranks > tp else "single"),
        "recompute": int(recompute) if recompute.isdigit() else recompute,
        **run_as(gpu, attention, compiled=compiled, cuda_graph=cuda_graph, fp8=fp8, async_tp=async_tp),
    }  # fmt: skip
    if (memory := memory_alone(gpu)) is not None:
        timed = {"network": network, "measured": steps, "cuda-graph": cuda_graph, "fp8": fp8, "async-tp": async_tp}
        if given := [name for name, value in timed.items() if value]:
            raise ValueError(
                f"{', '.join(given)}: of {gpu} the memory is known and no speed; name a card, such as h100"
            )
    else:
        way |= {"hardware": gpu, "network": network or None}
    if strategy == "all":
        if ranks < 2 * tp:
            raise ValueError("strategy: all is given, and on one data rank they are alike; give more ranks")
        jobs = [_job_of(model.sizes | way | {"strategy": name}, ranks, batch) for name in DATA_STRATEGIES]
        tell_all(model, jobs, steps, gpu, memory, json=json)
    elif memory is not None:
        _tell_memory(model, _job_of(model.sizes | way, ranks, batch), gpu, memory, json=json)
    else:
        _tell_forecast(model, _job_of(model.sizes | way, ranks, batch), steps, json=json)
    if not json:
        model.print_difference()


def run_as(gpu: str, attention: str, *, compiled: bool, cuda_graph: bool, fp8: bool, async_tp: bool) -> dict[str, Any]:
    """Arguments of a job, by the options of those names; products are in fp16 on a card that has no bf16."""
    peaks = Gpu.parse(gpu).peaks
    if fp8 and peaks and "fp8" not in peaks:
        raise ValueError(f"fp8: is given; {gpu} has {', '.join(peaks)}")
    return {
        "attention": attention or None, "compiled": compiled, "cuda_graph": cuda_graph, "async_tensor": async_tp,
        "precision": "fp8" if fp8 else "fp16" if peaks and "bf16" not in peaks else "bf16",
    }  # fmt: skip


def memory_alone(gpu: str) -> float | None:
    """Bytes of a GPU that has no preset: of a memory such as 24GB, or of a card whose speed is not known."""
    parsed = Gpu.parse(gpu)
    if not parsed.name and parsed.link is not None:
        raise ValueError(f"gpu: {gpu} has a link; give a card or its memory, and links as --network")
    return None if parsed.peaks else parsed.memory_bytes


def step_in(file: Path) -> Step:
    """One from what a forecast prints as JSON."""
    try:
        step = json_text.loads(file.read_text())
        return step["arguments"], float(step["seconds"])
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"measured: {file} is no step; write one with shardlab forecast ... --json > {file}, and put its measured "
            "seconds in"
        ) from error


def _tell_memory(model: CountedModel, job: Job, gpu: str, memory: float, *, json: bool) -> None:
    if json:
        arguments = {name: value for name, value in asdict(job).items() if name not in ("hardware", "network")}
        found: dict[str, Any] = {"seconds": None, "rest_bytes": rest_bytes(job), "peak_bytes": peak_bytes(job)}
        found |= {"fits": verdict(peak_bytes(job), memory), "arguments": arguments}
        say_json({**model.as_json(), **found})
        return
    say(answer_table([
        model.line, ("PLANNED", planned(job, gpu)), ("MEMORY", memory_of(job, memory)),
        ("TIME", f"not known: of {gpu} the memory is known and no speed; name a card, such as h100, or measure yours: "
                 "shardlab calibrate --device cuda, and then --gpu card.json"),
    ]))  # fmt: skip


def _tell_forecast(model: CountedModel, job: Job, steps: Sequence[Step], *, json: bool) -> None:
    found, miss = forecast_of(job, steps), expected_miss(job, steps)
    if json:
        told = {**model.as_json(), **asdict(found), "rest_bytes": rest_bytes(job), **range_in_json(found, miss)}
        told |= {**rates(job, found.seconds), "fits": verdict(found.peak_bytes, job.card.memory_bytes)}
        say_json({**told, "try_next": _next(job, found.seconds, steps), "arguments": asdict(job)})
        return
    say(answer_table([
        model.line,
        ("PLANNED", planned(job, job.card.name)),
        ("TIME", time_of(job, found, miss.share)),
        *(("WARNING", warning) for warning in found.warnings),
        ("MEMORY", memory_of(job, job.card.memory_bytes)),
        ("TRY NEXT", _next(job, found.seconds, steps)),
        ("MISSES BY", said_of(miss)),
        ("NOT IN IT", " ".join(found.not_modelled)),
    ]))  # fmt: skip
    parts = pd.Series(found.parts)
    parts = parts[parts > 0.001 * found.seconds].sort_values(ascending=False)
    table = pd.DataFrame(
        {"part": parts.index, "s": parts.map("{:.3g}".format), "%": (100 * parts / found.seconds).map("{:.1f}".format)}
    )
    say(table_of(table, "What a step is spent on", 2, right=["s", "%"]))


def range_in_json(found: Forecast, miss: Miss) -> dict[str, Any]:
    """Least and most seconds of a step, as TIME says them, and by how much it may miss."""
    return {"range_seconds": range_of(found, miss.share), "miss": {**asdict(miss), "usual_share": USUAL_MISS}}


def said_of(miss: Miss) -> str:
    """How far a forecast may miss, and what that stands on."""
    if miss.share is not None:
        return f"up to {miss.share:.0%}: {miss.reason}"
    usual = f"9 of 10 were missed by {USUAL_MISS:.0%} at most, each laboratory counting alike"
    return f"{miss.reason}. Of all published steps, like it or not, {usual}"


def _next(job: Job, seconds: float, steps: Sequence[Step]) -> str:
    """What one option would gain; of a step that no option makes fit, how many cards would do."""
    others = "shardlab search tries all ways"
    if (found := next_to_try(job, steps)) is None:
        if verdict(peak_bytes(job), job.card.memory_bytes) == DOES_NOT_FIT:
            return f"no single option makes it fit. What would do: {would_do(cards_for(job))}; {others}"
        return others
    option, way = found
    change = way.seconds / seconds - 1
    gain = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
    batch = f" --batch {job.sequences}" if way.job.accumulation != job.accumulation else ""
    warned = ", with a warning" if [*doubts_of(way.job, way.parts, is_measured=bool(steps))] else ""
    said = f"{gain}, {in_digits(way.seconds, 2)} s a step, and fits, {way.peak_bytes / 1e9:.3g} GB{warned}"
    return f"{option}{batch}: {said}; {others}"


def time_of(job: Job, found: Forecast, share: float | None) -> str:
    """Seconds, tokens and MFU as ranges: of what is missed, of links that are not known, and of what is warned of."""
    ends = range_of(found, share)
    seconds, tokens, daily, shares = (
        " to ".join(dict.fromkeys(in_digits(of(end), 2) for end in ends))
        for of in (
            float, lambda end: job.tokens_per_step / end, lambda end: 86400e-9 * job.tokens_per_step / end,
            lambda end: 100 * job.mfu(end),
        )
    )  # fmt: skip
    notes = f"; {OUTSIDE}: see {'WARNING' if found.warnings else 'MISSES BY'}" if share is None else ""
    if job.assumed_gigabits and found.most_seconds > 1.005 * found.seconds:
        least, most = job.assumed_gigabits
        notes = f"; links between hosts of {most:g} to {least:g}Gb/s per GPU{notes}"
    fits = verdict(found.peak_bytes, job.card.memory_bytes)
    peak = "peak of bf16" if job.precision == "fp8" else "peak"  # part of a step in 8 bits is in 16
    said = f"{seconds} s a step, {tokens} tokens a second, {daily} billion a day, {shares} % of the {peak} (MFU)"
    return f"{fits}; if it did, " * (fits == DOES_NOT_FIT) + f"{'about ' if share is None else ''}{said}{notes}"


def _job_of(given: Mapping[str, Any], ranks: int, batch: int | None) -> Job:
    """A job of so many sequences a step; by default one micro-batch on each data rank."""
    tensor, micro_batch = given["tensor"], given["micro_batch"]
    if ranks % tensor:
        raise ValueError(f"tp: {tensor} is given; it must divide {count(ranks, 'rank')}")
    if (heads := given["heads"]) % tensor or given["ffn"] % tensor:
        raise ValueError(f"tp: {tensor} is given; it must divide {heads} heads and the MLP's width, {given['ffn']}")
    data = ranks // tensor
    sequences = batch or data * micro_batch
    if sequences % (data * micro_batch):
        raise ValueError(
            f"batch: {sequences} sequences is given; {data} data ranks x micro-batch {micro_batch} must divide it"
        )
    accumulation = sequences // data // micro_batch
    if given["no_sync"] and (accumulation == 1 or data == 1):
        one = "micro-batch; give more sequences by --batch" if accumulation == 1 else "data rank; give more --ranks"
        raise ValueError(f"no-sync: is given, and a step has one {one}, or leave it out")
    return Job(**given, data=data, accumulation=accumulation)
