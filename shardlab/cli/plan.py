"""``shardlab plan``: what strategies cost, without running: of a number of parameters, or of a workload."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer

from shardlab.cli.console import answer_table, count, in_units, names_in, progress_bar, refuse_others, say, table_of
from shardlab.cli.counted_model import number_of_params
from shardlab.cli.records import print_json
from shardlab.cli.step_times import machine_for, with_forecasts
from shardlab.partition.buckets import DEFAULT_BUCKET_BYTES
from shardlab.planner.formulas import model_states, over_hosts, precision_named
from shardlab.planner.gpu import Gpu
from shardlab.planner.setup import STRATEGIES

PANELS = {"params": "Of a number of parameters", "workload": "Of a workload"}
OF_PARAMS, OF_WORKLOAD = (partial(typer.Option, rich_help_panel=panel) for panel in PANELS.values())
BUCKET_MIB = DEFAULT_BUCKET_BYTES / 2**20
MOST = 10**9  # ranks: numbers of tables have 64 bits
KEPT_HERE = (
    " * takes no precision, and keeps the dtype of the model. Of the others parameters travel in 16 bits; gradients "
    "are kept and travel in 32: as --params counts with --precision 2+4+4+4+4, but for the 16-bit copy of parameters "
    "that zero3 and fsdp have only while they compute."
)
HALF = (
    "its parameters are {dtype}, and so are gradients and optimizer state, without 4-byte master weights: as "
    "shardlab forecast counts with --precision pure-bf16; by default it counts mixed precision, 16 bytes a parameter"
)
PER_RANK = (
    "Per rank, the largest of all ranks; at rest, between two steps. Sent: bytes and messages of one step. Units are "
    "decimal: 1 MB is 1,000,000 bytes. Activations and temporaries come on top."
)
SIZES = {
    "parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer",
    "offloaded_bytes": "host", "rest_bytes": "at rest", "wire_bytes_per_step": "sent",
    "peak_bytes": "peak",
}  # fmt: skip
OTHERS = {"messages_per_step": "messages (/step)", "step_ms": "step (ms)"}
OTHERS_ON_GPU = {"rows_that_fit": "rows (that fit)", "sending_ms": "sending (ms/step)"}
SIZES_OF_HOSTS = {"rest_bytes": "at rest", "inside_bytes": "sent inside", "across_bytes": "a host sends"}
OVER_HOSTS = (
    "zero_OxI: stage O across hosts, I inside them; 0 divides nothing, 1 optimizer state, 2 gradients too, 3 "
    "parameters too. zero_0x3 is FSDP's hybrid_shard, zero_2x3 HFSDP; ddp and fsdp are one ring through all hosts. "
    "hpz, of ZeRO++, is fsdp that from forward to the step, so not at rest, keeps another copy of parameters, divided "
    "inside each host. At rest and sent inside its host: of a rank; a host sends: all its ranks, across hosts, in a "
    "step."
)
OF_STAGES = (
    "Of the first data rank of each place in the pipeline; the peak of the one that holds most. Idle: of the time of "
    "the schedule, if stages are equal, backward takes twice as long as forward, and messages no time. Held: the most "
    "micro-batches at once; in one of two stages of a rank it is half of one. Messages and bytes go to other stages, "
    "in a step."
)
OTHERS_OF_STAGES = {
    "rank": "rank", "stages": "stages", "in_flight": "held", "idle_percent": "idle (%)", "messages": "messages",
}  # fmt: skip
SIZES_OF_STAGES = {
    "parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer",
    "peak_bytes": "peak", "sent_bytes": "sent",
}  # fmt: skip
NOT_OF_STAGES = "not with --pipe, whose time is not planned: shardlab compare measures it"
SIZES_ON_GPU = {"gathered_bytes": "gathered", "left_bytes": "left", "row_bytes": "a row keeps"}


class Found(NamedTuple):
    """What a plan says: a title, a row for each strategy, how layers are divided, what is sent, notes, the dtype."""

    title: str
    rows: pd.DataFrame
    note: str
    layers: pd.DataFrame | None = None
    collectives: pd.DataFrame | None = None
    note_on_gpu: str = "Left: memory without what is at rest."
    half: str = ""
    stages: pd.DataFrame | None = None
    hosts: pd.DataFrame | None = None
    per_host: int = 0
    time: str = ""


def plan(
    context: typer.Context,
    params: Annotated[str, typer.Option(help="Parameters of a model: 7.5B, 350M or 7.5e9.")] = "",
    workload: Annotated[str, typer.Option(help="Instead: FILE.py:NAME or PACKAGE.MODULE:NAME.")] = "",
    ranks: Annotated[int | None, typer.Option(help="Number of ranks; by default that of --tp or --pipe.")] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Of a workload: as in compare; of a number of parameters mixed, fp32, mixed-8bit, pure-bf16, or "
            "bytes, such as 2+4+4+4+4: of parameter, gradient, master weight, two moments."
        ),
    ] = "",
    gpu: Annotated[
        str, typer.Option(help="What fits on a card (h100), on its memory (24GB), or with its link (24GB,32GB/s,10us).")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="A directory for plan.html, a page with figures.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer and the rows as JSON.")] = False,
    per_host: Annotated[int, OF_PARAMS(help="Ranks of a host: what rows over two axes send across hosts.")] = 0,
    strategies: Annotated[str, OF_WORKLOAD(help="Comma-separated; by default all of ours.")] = "",
    tp: Annotated[int, OF_WORKLOAD(help="Tensor-parallel ranks; shows how layers are divided.")] = 1,
    sharding: Annotated[str, OF_WORKLOAD(help="FSDP's, as in compare.")] = "full_shard",
    wrap: Annotated[str, OF_WORKLOAD(help="FSDP's units, as in compare.")] = "",
    bucket_mib: Annotated[float, OF_WORKLOAD(help="Capacity of a bucket; compare has 1.")] = BUCKET_MIB,
    pipe: Annotated[int, OF_WORKLOAD(help="Stages in a row, as in compare; shows what each holds and waits.")] = 1,
    schedule: Annotated[str, OF_WORKLOAD(help="With --pipe, as in compare; comma-separated.")] = "",
    begins: Annotated[str, OF_WORKLOAD(help="With --pipe, as in compare.")] = "",
    micro_batches: Annotated[
        int, OF_WORKLOAD(help="With --pipe: of a step; by default 4 for each stage.", show_default=False)
    ] = 0,
    peak: Annotated[bool, OF_WORKLOAD("--peak", help="Adds the peak of a step, run without values.")] = False,
    calibration: Annotated[
        Path | None, OF_WORKLOAD(help="The file of shardlab calibrate: adds the peak, and the time of a step here.")
    ] = None,
) -> None:
    """Predict what each strategy holds and sends, of a number of parameters or a workload; no rank starts."""
    if bool(params) == bool(workload):
        raise ValueError("params, workload: give one of them: --params 7.5B, or --workload train.py:workload")
    ranks = max(tp, pipe) if ranks is None and max(tp, pipe) > 1 else ranks
    if ranks is None or not 1 <= ranks <= MOST:
        given = "none were" if ranks is None else f"{ranks} was"
        raise ValueError(f"ranks: {given} given; give 1 to {MOST:,}, for example --ranks 8")
    kind, others = ("params", PANELS["workload"]) if params else ("workload", PANELS["params"])
    options = context.command.params
    allowed = {option.name for option in options if getattr(option, "rich_help_panel", None) != others}
    refuse_others(context, allowed, f"not of --{kind}")
    if pipe > 1:
        refuse_others(context, allowed - {"gpu", "calibration"}, NOT_OF_STAGES)
    # Before the work: what was given may be misspelled, or not be there.
    on = Gpu.parse(gpu) if gpu else None
    if out is not None:
        _make(out)
    if workload:
        how: dict[str, Any] = {"sharding": sharding, "precision": precision or "full", "tp": tp, "pipe": pipe}
        how |= ({"wrap": wrap} if wrap else {}) | ({"bucket_mib": bucket_mib} if bucket_mib != BUCKET_MIB else {})
        how |= {field: names_in(text) for field, text in (("schedule", schedule), ("begins", begins)) if text}
        how |= {"micro_batches": micro_batches} if micro_batches else {}
        machine = machine_for(calibration, ranks, names_in(strategies) or STRATEGIES)
        forecasts = partial(with_forecasts, machine=machine) if peak or calibration else None
        found = _of_workload(workload, ranks, names_in(strategies), how, on, forecasts)
    else:
        found = _of_params(params, ranks, precision or "mixed", on, per_host)
        kept = f" --precision {precision}" if precision else ""
        card = quote(gpu) if on is not None and on.peaks else "h100"
        command = f"shardlab forecast --params {params} --ranks {ranks} --gpu {card}{kept}"
        found = found._replace(time=f"not in this plan: {command} says it, the peak, what to try, and how sure that is")
    return _tell(found, ranks, on, gpu, json=json, out=out)


def _of_params(params: str, ranks: int, precision: str, gpu: Gpu | None, per_host: int) -> Found:
    number, each = number_of_params(params), precision_named(precision)
    kept = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in asdict(each).items())
    rows = pd.DataFrame([asdict(row) for row in model_states(number, ranks, precision)])
    rows = rows.rename(columns={"wire_bytes": "wire_bytes_per_step"}).assign(rest_bytes=rows["total_bytes"])
    if gpu is not None:
        rows["left_bytes"] = gpu.memory_bytes - rows["rest_bytes"]
    note = (
        f"{PER_RANK} So does padding. FSDP's full_shard takes what zero3 takes. Bytes kept of each: {kept}; parameters "
        "and gradients are sent in as many. Formulas: ZeRO, arXiv 1910.02054, sections 5 and 7. Engines here keep and "
        "send gradients of 16-bit training in 32 bits: --precision 2+4+4+4+4 counts so."
    )
    hosts = pd.DataFrame(map(asdict, over_hosts(int(number), ranks, per_host, each))) if per_host else None
    title = f"{number:,.0f} parameters, {count(ranks, 'rank')}, {precision} precision, Adam"
    found = Found(title, rows, note, hosts=hosts, per_host=per_host)
    if gpu is None or gpu.link is None or gpu.name:
        return found
    said = "Its link counts with --workload alone: of a number of parameters no messages are known."
    return found._replace(note_on_gpu=f"{found.note_on_gpu} {said}")


def _of_workload(
    place: str, ranks: int, names: tuple[str, ...], options: dict[str, Any], gpu: Gpu | None,
    forecasts: Callable[..., tuple[pd.DataFrame, pd.DataFrame | None, str]] | None,
) -> Found:  # fmt: skip
    from shardlab.experiment.config import CompareConfig, takes
    from shardlab.experiment.planned.plan import plan_all, row_of, table_of, to_plan
    from shardlab.experiment.planned.run_plan import RunPlan
    from shardlab.experiment.told.pipelined import stages_of
    from shardlab.experiment.trained.named_workload import workload_at  # here, because it imports torch
    from shardlab.experiment.trained.tensor import shown_plan
    from shardlab.plots.text import listing
    from shardlab.vocabulary import dtype_name

    names, layers, stages, workload = names or STRATEGIES, None, None, workload_at(place)
    if options["tp"] > 1:
        workload, layers = shown_plan(workload, options["tp"])
    with progress_bar(len(names), first="a step without values", works_here=True) as told:
        if gpu is None:
            config = to_plan(workload, ranks, names, **options)
            plans = plan_all(config, told)
            stages = stages_of(config, plans) if config.pipe > 1 else None
            rows = table_of([row_of(strategy, found) for strategy, found in plans.items()])
        else:
            planned = RunPlan.of(workload, ranks, names, told=told, **options)
            plans, rows = dict(planned.plans), planned.on(gpu)
    sent = [found.collectives for found in plans.values() if found.collectives is not None]
    reasons = dict.fromkeys(found.why for found in plans.values() if found.collectives is None)
    unknown = "".join(f" Of {listing([n for n, one in plans.items() if one.why == why])}: {why}." for why in reasons)
    size = options.get("bucket_mib", BUCKET_MIB)
    buckets = f" Buckets of {size:g} MiB." if any(map(takes("bucket_bytes"), names)) else ""
    note = f"{PER_RANK}{buckets}{unknown}{KEPT_HERE if 'precision' in rows else ''}"
    if forecasts is not None:
        config = to_plan(workload, ranks, names, device="cpu", steps=CompareConfig.steps, **options)
        rows, stages, said = forecasts(rows, stages, plans, config)
        note += said
    dtypes = {param.dtype for param in workload.on_meta().parameters() if param.is_floating_point()}
    half = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes if dtype.itemsize == 2))
    title, collectives = f"{place}, {count(ranks, 'rank')}", pd.concat(sent) if sent else None
    on_gpu = "" if gpu is None else _about_gpu(rows)
    return Found(title, rows, note, layers, collectives, on_gpu, half, stages)


def _about_gpu(rows: pd.DataFrame) -> str:
    """What the columns of a plan for a GPU count."""
    about_rows = "Rows: of a micro-batch, by what autograd keeps for each"
    if rows["rows_that_fit"].isna().any():
        about_rows = "What a row keeps is not known where layers are divided, or depend on values"
    sending = " Sending: all messages, one by one." if rows["sending_ms"].any() else ""
    return (
        f"Left: memory without what is at rest and what is gathered at once. {about_rows}; libraries and the allocator "
        f"take some too.{sending}"
    )


def _tell(found: Found, ranks: int, gpu: Gpu | None, card: str, *, json: bool, out: Path | None) -> None:
    """Print the answer, then the tables that support it; or all as JSON; and write the page."""
    from shardlab.experiment.told.answer import answer_of_plan

    said: list[tuple[str, str]] = [("MODEL", HALF.format(dtype=found.half))] if found.half else []
    memory_bytes = None if gpu is None else gpu.memory_bytes
    said += answer_of_plan(found.rows, ranks, memory_bytes, found.collectives, found.stages)
    said[-1:-1] = [("TIME", found.time)] if found.time else []
    page = None if out is None else _page(found, said, gpu, card, out)
    if json:
        print_json(found.rows, said, modules=found.layers, stages=found.stages, over_hosts=found.hosts)
        return
    say(answer_table(said))
    if found.layers is not None:
        say("\n[bold]How layers are divided[/]")
        say(table_of(found.layers, "", 2))
    for (title, note), table in _tables(found, card).items():
        say(f"\n[bold]{title}[/]")
        say(table_of(table, ""))
        say(note, style="dim")
    if page is not None:
        say(f"Page: {page}", soft_wrap=True)


def _tables(found: Found, card: str) -> dict[tuple[str, str], pd.DataFrame]:
    """By title and note: what a rank holds and sends; and what that leaves of a GPU."""
    rows = found.rows
    if "precision" in rows:
        rows = rows.assign(strategy=rows["strategy"] + rows["precision"].eq("full").map({True: " *", False: ""}))
    tables = {(found.title, found.note): in_units(rows, SIZES, OTHERS, add_up=True)}
    if "left_bytes" in rows:
        tables[f"On a GPU of {card}", found.note_on_gpu] = in_units(rows, SIZES_ON_GPU, OTHERS_ON_GPU)
    if found.stages is not None:
        shown = found.stages.assign(
            idle_percent=(100 * found.stages["idle"]).round(1), in_flight=found.stages["in_flight"].map("{:g}".format)
        )
        tables["Stages", OF_STAGES] = in_units(shown, SIZES_OF_STAGES, OTHERS_OF_STAGES)
    if found.hosts is not None:
        tables[f"Over hosts of {count(found.per_host, 'rank')}", OVER_HOSTS] = in_units(found.hosts, SIZES_OF_HOSTS, {})
    return tables


def _page(found: Found, said: Any, gpu: Gpu | None, card: str, out: Path) -> Path:
    """Write plan.html: the answer, what a rank needs and what it sends, and folded the numbers."""
    from shardlab import plots
    from shardlab.experiment.directory import write_page

    needs = plots.memory_on_gpu(found.rows, None if gpu is None else gpu.memory_bytes)
    figures = {"The largest of all ranks.": needs}
    if found.collectives is not None:
        figures["By the ring formula."] = plots.wire_volume(found.collectives, runs=list(found.rows["strategy"]))
    tables = {note: table for (_, note), table in _tables(found, card).items()}
    tables |= {} if found.layers is None else {"How layers are divided.": found.layers}
    lead = f"{found.title}{'' if gpu is None else f', on GPUs of {card}'}. Nothing was run."
    page = plots.report_page(found.title, lead, tables, figures, said, first=len(figures))
    return write_page(out / "plan.html", page)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be made: {error.strerror}; name a directory") from None
