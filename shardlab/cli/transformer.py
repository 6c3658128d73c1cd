"""What ``shardlab plan --config`` says: the forecast of a transformer on GPUs that are not here, or of all ways."""

import json as json_text
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from shardlab.cli.console import answer_table, count, table_of

if TYPE_CHECKING:
    from shardlab.cli.counted_model import CountedModel
    from shardlab.forecast.job import Job
    from shardlab.forecast.predict import Forecast
    from shardlab.forecast.search import Found

SHOWN = 12  # ways of a search


def of_config(
    config: Path, ranks: int, gpu: str, network: str, options: Mapping[str, Any], *, searches: bool, json: bool
) -> None:
    """Print the forecast of a transformer of a ``config.json``, or all ways to train it.

    Args:
        config: the file.
        ranks: GPUs.
        gpu: name of a card, or a memory such as 24GB; without a speed that is known bytes alone are said.
        network: text of a network; empty where it is not known.
        options: ``batch`` (sequences of a step), ``seq_len``, ``micro_batch``, ``strategies`` (at most one),
            ``tensor``, ``recompute``, ``no_sync``, ``states``, ``measured`` (files of steps); 0 or empty for those that
            are not given.
        searches: whether all ways are gone through.
        json: whether it is printed as JSON.
    """
    from shardlab.cli.counted_model import CountedModel, difference
    from shardlab.forecast.search import cards_that_would_do, miss_of, search
    from shardlab.planner.formulas import precision_named

    for name, least in (("batch", 0), ("seq_len", 0), ("micro_batch", 1)):  # 0 where one is not given
        if options[name] < least:
            raise ValueError(f"{name.replace('_', '-')}: {options[name]} was given; give 1 or more")
    if searches and options["no_sync"]:
        raise ValueError("no-sync: leave it out of --search, which tries both ways of accumulating")
    if len(options["strategies"]) > (0 if searches else 1):
        raise ValueError("strategies: a forecast is of one; leave it out of --search, which tries all")
    precision_named(options["states"])  # before anything is read
    model = CountedModel.of(config, options["seq_len"])
    on: dict[str, Any] = {"hardware": gpu, "network": network or None, "states": options["states"]}
    pairs = [_step_in(file) for file in options["measured"]]
    if (memory := _memory_alone(gpu)) is not None:
        timed = {"search": searches, "network": network, "measured": pairs}
        if given := [name for name, value in timed.items() if value]:
            raise ValueError(
                f"{', '.join(given)}: of {gpu} the memory is known and no speed; name a card, such as h100"
            )
        _tell_memory(model, ranks, gpu, memory, options, json=json)
    elif searches:
        found = search(model.sizes, ranks, options["batch"] or ranks, calibration=pairs, **on)
        enough = None if found[0].fits else cards_that_would_do(model.sizes, ranks, **on)
        _tell_search(model, found, enough, miss_of(found[0].job, pairs), json=json)
    else:
        _tell_forecast(model, ranks, on, options, pairs, json=json)
    # After the answer, which is not to wait for an import of seconds.
    if not json and (said := difference(config, model.decoder.num_params)):
        Console(highlight=False).print(said)


def _memory_alone(gpu: str) -> float | None:
    """Bytes of a GPU that has no preset: of a memory such as 24GB, or of a card whose speed is not known."""
    from shardlab.planner.gpu import Gpu

    parsed = Gpu.parse(gpu)
    if not parsed.name and parsed.link is not None:
        raise ValueError(f"gpu: {gpu} has a link; of --config give a card or its memory, and links as --network")
    return None if parsed.peaks else parsed.memory_bytes


def _step_in(file: Path) -> tuple[dict[str, Any], float]:
    """Arguments and measured seconds of a step, from what a plan prints as JSON."""
    try:
        step = json_text.loads(file.read_text())
        return step["arguments"], float(step["seconds"])
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"measured: {file} is no step; write one with shardlab plan --config ... --json > {file}, and put its "
            "measured seconds in"
        ) from error


def _tell_search(
    model: "CountedModel", found: Sequence["Found"], enough: "Job | None", miss: float, *, json: bool
) -> None:
    import pandas as pd

    rows = pd.DataFrame([
        {
            "way": one.name, "seconds": one.seconds, "peak_bytes": one.peak_bytes,
            **_rates(one.job, one.seconds), "fits": one.fits, "is_tied": one.is_tied, "why_not": one.why_not,
        }
        for one in found
    ])  # fmt: skip
    if json:
        cards = None if enough is None else enough.data * enough.tensor
        told = {**model.as_json(), "cards_that_would_do": cards, "ways": rows.to_dict("records")}
        typer.echo(json_text.dumps(told, indent=2))
        return
    console = Console(highlight=False)
    console.print(answer_table([model.line, *_found(found, enough, miss)]))
    shown = rows.head(SHOWN).assign(
        seconds=rows["seconds"].map("{:.3g}".format), peak_bytes=(rows["peak_bytes"] / 1e9).map("{:.3g}".format),
        tokens_per_second=rows["tokens_per_second"].map("{:,.0f}".format), mfu=rows["mfu"].map("{:.0%}".format),
    ).drop(columns=["tokens_per_day", "fits", "is_tied"])  # fmt: skip
    names = {"seconds": "step (s)", "peak_bytes": "peak (GB)", "tokens_per_second": "tokens/s", "mfu": "MFU",
             "why_not": "why not"}  # fmt: skip
    console.print(table_of(shown.rename(columns=names), "", 2, right=["step (s)", "peak (GB)", "tokens/s", "MFU"]))


def _found(found: Sequence["Found"], enough: "Job | None", miss: float) -> Iterator[tuple[str, str]]:
    """Lines: the fastest that fits and its ties, or what would do; and how many were tried."""
    from shardlab.forecast.search import RESERVE

    fits, (best, *_) = [one for one in found if one.fits], found
    ties = [one for one in fits[1:] if one.is_tied]
    if not fits:
        yield "FASTEST THAT FITS", f"none of {count(len(found), 'way')}; the smallest, {best.name}, {best.why_not}"
        yield "WOULD DO", _would_do(enough)
    else:
        yield "FASTEST THAT FITS", _in_short(best)
    if ties:
        least = min((best, *ties), key=lambda one: one.peak_bytes)
        other = "" if least is best else f"; of them {_in_short(least)}, needs least memory"
        yield "AS FAST", f"{count(len(ties), 'way')}, within the {miss:.0%} by which a forecast may miss{other}"
    tight = sum(one.why_not.startswith("tight") for one in found)
    tried = f"{count(len(found), 'way')}: {len(fits)} fit, with {RESERVE - 1:.0%} on top that the allocator may reserve"
    yield "TRIED", f"{tried}; {tight} are tight, without that; {len(found) - len(fits) - tight} do not fit"


def _in_short(one: "Found") -> str:
    return f"{one.name}: {one.seconds:.3g} s a step, {one.peak_bytes / 1e9:.3g} GB at the peak"


def _would_do(enough: "Job | None") -> str:
    from shardlab.forecast.peak import peak_bytes

    if enough is None:
        return "no number of cards: one sequence alone needs more than a card has; give shorter ones by --seq-len"
    return (
        f"{enough.data * enough.tensor} cards, with a sequence for each: {enough.way} needs "
        f"{peak_bytes(enough) / 1e9:.3g} GB of tensors"
    )


def _rates(job: "Job", seconds: float) -> dict[str, float]:
    """Tokens a second and a day over all ranks, and the MFU."""
    rate = job.tokens_per_step / seconds
    return {"tokens_per_second": rate, "tokens_per_day": 86400 * rate, "mfu": job.mfu(seconds)}


def _tell_memory(
    model: "CountedModel", ranks: int, gpu: str, memory: float, options: Mapping[str, Any], *, json: bool
) -> None:
    from shardlab.forecast.peak import peak_bytes, rest_bytes

    job = _job_of(model.sizes, ranks, {"states": options["states"]}, options)
    if json:
        arguments = {name: value for name, value in asdict(job).items() if name not in ("hardware", "network")}
        found: dict[str, Any] = {"seconds": None, "rest_bytes": rest_bytes(job), "peak_bytes": peak_bytes(job)}
        found |= {"fits": _verdict(peak_bytes(job), memory), "arguments": arguments}
        typer.echo(json_text.dumps({**model.as_json(), **found}, indent=2))
        return
    Console(highlight=False).print(answer_table([
        model.line, ("PLANNED", _planned(job, f"{ranks} x {gpu}")), ("MEMORY", _memory(job, memory)),
        ("TIME", f"not known: of {gpu} the memory is known and no speed; name a card, such as h100"),
    ]))  # fmt: skip


def _planned(job: "Job", gpus: str) -> str:
    kept = f"{job.precision} with {job.kept.total} bytes a parameter"
    return f"{job.way}; rows of {count(job.seq_len, 'token')}, {kept}, on {gpus}"


def _memory(job: "Job", room: float) -> str:
    from shardlab.forecast.peak import peak_bytes, rest_bytes

    peak = peak_bytes(job)
    said = f"{rest_bytes(job) / 1e9:.3g} GB at rest, {peak / 1e9:.3g} GB in tensors at the peak, of {room / 1e9:.3g} GB"
    return f"{said}: {_verdict(peak, room)}{_of_logits(job, room)}"


def _tell_forecast(
    model: "CountedModel", ranks: int, on: Mapping[str, Any], options: Mapping[str, Any],
    pairs: Sequence[tuple[dict[str, Any], float]], *, json: bool,
) -> None:  # fmt: skip
    import pandas as pd

    from shardlab.forecast.peak import rest_bytes
    from shardlab.forecast.predict import forecast_of
    from shardlab.forecast.region import expected_miss

    job = _job_of(model.sizes, ranks, on, options)
    found, miss = forecast_of(job, pairs), expected_miss(job, pairs)
    if json:
        told = {**model.as_json(), **asdict(found), "rest_bytes": rest_bytes(job), "miss": asdict(miss)}
        told |= {**_rates(job, found.seconds), "fits": _verdict(found.peak_bytes, job.card.memory_bytes)}
        typer.echo(json_text.dumps({**told, "arguments": asdict(job)}, indent=2))
        return
    console = Console(highlight=False)
    console.print(answer_table([
        model.line,
        ("PLANNED", _planned(job, f"{ranks} x {job.card.name}")),
        ("TIME", _time(job, found)),
        ("MEMORY", _memory(job, job.card.memory_bytes)),
        ("MISSES BY", miss.reason if miss.share is None else f"up to {miss.share:.0%}: {miss.reason}"),
        *(("WARNING", warning) for warning in found.warnings),
        ("NOT IN IT", " ".join(found.not_modelled)),
    ]))  # fmt: skip
    parts = pd.Series(found.parts)
    parts = parts[parts > 0.001 * found.seconds].sort_values(ascending=False)
    table = pd.DataFrame(
        {"part": parts.index, "s": parts.map("{:.3g}".format), "%": (100 * parts / found.seconds).map("{:.1f}".format)}
    )
    console.print(table_of(table, "What a step is spent on", 2, right=["s", "%"]))


def _time(job: "Job", found: "Forecast") -> str:
    """Seconds, tokens and MFU; each as a range where the network is not known and moves it."""
    ends = [found.seconds, *([found.most_seconds] if found.most_seconds > 1.005 * found.seconds else [])]
    seconds, tokens, daily, shares = (
        " to ".join(form.format(of(end)) for end in ends)
        for form, of in (
            ("{:.3g}", float), ("{:,.0f}", lambda end: job.tokens_per_step / end),
            ("{:.3g}", lambda end: 86400e-9 * job.tokens_per_step / end), ("{:.0%}", job.mfu),
        )
    )  # fmt: skip
    links = ""
    if job.assumed_gigabits and len(ends) > 1:
        least, most = job.assumed_gigabits
        links = f" (links between hosts of {most:g} to {least:g}Gb/s per GPU)"
    return f"{seconds} s a step{links}, {tokens} tokens a second, {daily} billion a day, {shares} of the peak (MFU)"


def _verdict(peak_bytes: float, room: float) -> str:
    """Whether tensors of so many bytes fit, with what the allocator reserves on top."""
    from shardlab.forecast.predict import RESERVED, USABLE

    least, most = RESERVED
    if least * peak_bytes > room:
        return "it does not fit"
    if peak_bytes > USABLE * room:
        return f"it hardly fits, with less than {1 - USABLE:.0%} left for libraries and the allocator"
    if most * peak_bytes < room:
        return "it fits"
    often = f"{room / peak_bytes:.3g} times that; {least:g} to {most:g} times were seen"
    return f"it fits, unless the allocator reserves more than {often}"


def _of_logits(job: "Job", room: float) -> str:
    """What helps, where it does not fit or hardly, and logits are the reason; else empty."""
    from shardlab.forecast.peak import logits_bytes, peak_bytes
    from shardlab.forecast.predict import USABLE

    logits, peak = logits_bytes(job), peak_bytes(job)
    if peak <= USABLE * room or (2 * logits < peak and peak - logits > USABLE * room):
        return ""
    return (
        f"; {logits / 1e9:.3g} GB of it are logits, {job.tokens:,} tokens x {job.vocab:,} words: a chunked loss, which "
        "makes them for some tokens at a time, would save most of these"
    )


def _job_of(sizes: Mapping[str, Any], ranks: int, on: Mapping[str, Any], options: Mapping[str, Any]) -> "Job":
    from shardlab.forecast.job import Job

    tensor, micro_batch = options["tensor"], options["micro_batch"] or 1
    if ranks % tensor:
        raise ValueError(f"tp: {tensor} is given; it must divide {count(ranks, 'rank')}")
    data = ranks // tensor
    sequences = options["batch"] or data * micro_batch
    if sequences % (data * micro_batch):
        raise ValueError(
            f"batch: {sequences} sequences is given; {data} data ranks x micro-batch {micro_batch} must divide it"
        )
    return Job(
        **sizes, micro_batch=micro_batch, data=data, tensor=tensor, accumulation=sequences // data // micro_batch,
        strategy=(*options["strategies"], "fsdp" if data > 1 else "single")[0], recompute=options["recompute"],
        no_sync=options["no_sync"], **on,
    )  # fmt: skip
