"""What a comparison answers: who holds least, who is fastest, what it costs and why, whether to trust it, what to try.

And what a plan answers: which strategy fits.

Each line is a function of tables, so that it can be tested against tables made by hand. Terminal, page and notebook
show the same lines. A signal that is missing is named, and is no zero; what times do not tell apart is not told apart.
"""

from collections.abc import Collection, Iterable, Mapping
from math import ceil, isnan, nan
from shlex import quote
from typing import Any, NamedTuple

import pandas as pd

from shardlab.analysis.rows import step_lengths
from shardlab.engines import STRATEGIES
from shardlab.experiment.config import SEQUENCES_PER_RANK, CompareConfig
from shardlab.experiment.told import verdicts
from shardlab.experiment.told.losses import alone_verdict, data_are_lost, dead_verdict, norms_apart, trained_on_others
from shardlab.experiment.told.pipelined import bubble_line, idle_line
from shardlab.experiment.told.saved_runs import Comparison, config_of
from shardlab.experiment.told.step_reasons import Reasons, why
from shardlab.experiment.trained.pipelined import MICRO_BATCHES_PER_RANK
from shardlab.planner.rows import ROWS
from shardlab.plots.text import format_bytes, format_percent, listing
from shardlab.records.store import Records
from shardlab.schedules import PLANS
from shardlab.units import wrap_text
from shardlab.vocabulary import Collective, Phase
from shardlab.why.judged_steps import in_ms

from shardlab.experiment.told.summary import (  # isort: skip
    FULL, LOSS_TOLERANCE, REFERENCE, ROUNDED_LOSS_TOLERANCE, averaged_runs, counted_steps, not_finite, precision_of,
    ranks_differ, rounding_of, skipped_steps, stepped,
)  # fmt: skip

ROLES = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer state"}
ALIKE = 0.01  # relative: what differs by less is said to be the same
FEWEST_STEPS = 4  # of which quartiles say something
_KEPT = (
    "model", "workload", "ranks", "batch", "pipe", "tp", "strategies", "accumulation", "text", "seq_len", "dtype",
    "learning_rate", "clip", "partition", "sharding", "layout", "precision", "offload", "broadcast_buffers",
    "sequence_parallel", "link", "transport", "seed", "bucket_mib", "wrap", "prefetch", "replicate_below", "begins",
    "schedule", "micro_batches",
)  # fmt: skip
_FRACTIONS = {2: "half", 3: "a third", 4: "a quarter"}


class Line(NamedTuple):
    """One of them: what it is about, in capitals, and what is said."""

    title: str
    text: str


def answer(comparison: Comparison, config: CompareConfig | None = None) -> list[Line]:
    """The lines of a comparison; without ``config`` its records say it."""
    config = config_of(comparison.records) if config is None else config
    table, records, doubt = comparison.summary, comparison.records, doubt_of(comparison)
    idle = bubble_line(comparison.bubbles)
    return [
        *answer_of_runs(table, records, comparison.reasons, doubt),
        *([Line("BUBBLE", idle)] if idle else []),
        Line("CAN I TRUST IT", " · ".join(_trusted(comparison, doubt))),
        Line("NEXT", _next(comparison, config, doubt)),
    ]


def _next(comparison: Comparison, config: CompareConfig, doubt: str) -> str:
    if data_are_lost(comparison):
        return "look at the data, whose rows hold inf or NaN: neither clipping nor a lower learning rate helps"
    described = next(iter(comparison.records.manifests.values())).get("workload") or {}
    failed = bool(not_finite(comparison.records.steps))
    if comparison.failed:
        return f"see below what {listing(list(comparison.failed))} raised, and what it says to change"
    if not failed and len(comparison.summary) > 1 and not comparison.losses_equal:
        return "see below why losses are not equal: before that is known no other number says much"
    ran = {*comparison.summary["strategy"]}
    return following(config, ran, has_failed=failed, doubt=doubt, place=described.get("place"))


def doubt_of(comparison: Comparison) -> str:
    """Why times of what is compared are uncertain; empty if they are not."""
    said = verdicts.busy_verdict(comparison.records, side_by_side(comparison.summary).index)
    return said.removeprefix("Times are UNCERTAIN: ").rstrip(".")


def answer_of_runs(
    summary: pd.DataFrame, records: Records, reasons: Mapping[str, Reasons], doubt: str = ""
) -> list[Line]:
    """The first four lines, also of runs that were made one after another; ``doubt`` is why times are uncertain."""
    rows, times = side_by_side(summary), quartiles(records.steps)
    rows["precision"] = [precision_of(str(name), records) for name in rows.index]
    causes, averaged = {str(name): reasons[str(name)] for name in rows.index}, averaged_runs(records)
    return [
        Line("LEAST MEMORY", least_memory(rows)),
        Line("FASTEST", fastest(rows, times, doubt) + ("" if doubt else _alone(rows, times))),
        Line("COST", _cost(rows, stepped(records.collectives, records), averaged)),
        Line("WHY", why(causes)),
    ]


def side_by_side(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows that are compared: those on several ranks, if there are any; one process trains on the rows of all."""
    several = summary[summary["strategy"] != REFERENCE]
    return (several if len(several) else summary).set_index("strategy")


def least_memory(rows: pd.DataFrame) -> str:
    """Which strategies hold least at rest, and which roles make the difference; the peak where its order is another.

    Args:
        rows: of the summary, by strategy.
    """
    host = rows["offloaded_bytes"].astype("float64").fillna(0.0) if "offloaded_bytes" in rows else 0.0 * rows["ranks"]
    rest = rows[list(ROLES)].astype("float64").sum(axis=1)
    if "rest_bytes" in rows:  # buffers and counters of steps are at rest too; they are no role's
        rest = (rows["rest_bytes"].astype("float64") - host).fillna(rest)
    peaks = rows["peak_bytes"].astype("Float64").dropna() if "peak_bytes" in rows else None
    least = [str(name) for name in rest.index[rest <= rest.min() * (1 + ALIKE)]]
    held = f"{listing(least)}, {format_bytes(rest.min())} at rest on a rank"
    if len(rows) == 1:
        said = f"{least[0]} alone, {format_bytes(rest.min())} at rest on a rank"
    elif len(least) == len(rows):
        said = f"all hold the same, {format_bytes(rest.min())} at rest on a rank"
    else:
        most = str(rest.idxmax())
        whys: dict[str, list[str]] = {}
        for name in least:
            whys.setdefault(_kept(rows, name, most), []).append(name)
        said = f"{held}, {format_percent(1 - rest.min() / rest.max())} less than {most}"
        for why, names in whys.items():
            said += why and f", {'' if len(whys) == 1 else listing(names) + ' '}because {why}"
    said += f", and {format_bytes(host[least[0]])} in host memory" if host[least[0]] else ""
    if peaks is None or peaks.empty:
        return said if peaks is None else f"{said}; no peak was traced"
    lowest = [str(name) for name in peaks.index[peaks <= peaks.min() * (1 + ALIKE)]]
    most = f"{format_bytes(peaks.min())}{steps_differ(rows.loc[[lowest[0]]])}"
    if len(rows) == 1:
        return f"{said}; at the peak {most}"
    if len(least) < len(rows) and lowest == least:
        return f"{said}; at the peak too, {most}"
    has = "has" if len(lowest) == 1 else "have"
    return f"{said}; at the peak {listing(lowest)} {has} least, {most}"


def steps_differ(rows: pd.DataFrame) -> str:
    """Which step has the peak, where steps differ in theirs, and of which it is not known; follows the peak's bytes.

    Args:
        rows: one, of the summary or of a plan.
    """
    columns = ["peak_bytes", "peak_step", "least_peak_bytes", "unlike_step"]
    most, step, least, unlike = rows.reindex(columns=columns).astype("float64").to_numpy()[0]
    said = ""
    if least < most * (1 - ALIKE):
        said = f" in step {step:.0f}, and {format_bytes(least)} in the least of the steps that were traced"
    if isnan(unlike):
        return said
    return f"{said}; that of step {unlike:.0f}, which is unlike all traced ones, is not known"


def _kept(rows: pd.DataFrame, one: str, other: str) -> str:
    """Which share a rank keeps of what: 'each of 4 ranks keeps a quarter of the gradients and optimizer state'."""
    roles: dict[str, list[str]] = {}
    ranks = rows["ranks"].astype(int)[one]
    has_masters = "precision" in rows and rows["precision"][other] != FULL
    masters = {"optimizer_bytes": "optimizer state and master weights"} if has_masters else {}
    for column, role in {**ROLES, **masters}.items():
        held = rows[column].astype("float64")
        share = held[one] / held[other] if held[other] else 1.0
        if share < 1 - ALIKE:
            # But for padding; and against master weights, one that has none may hold less although it is whole.
            is_part = abs(share * ranks - 1) < 0.05 and not (has_masters and rows["precision"][one] == FULL)
            whole = f"{_FRACTIONS.get(ranks, f'1/{ranks}')} of the" if is_part else ""
            fraction = whole or f"{format_percent(share)} of {other}'s bytes of"
            roles.setdefault(fraction, []).append(role)
    shares = [f"{fraction} {listing(names)}" for fraction, names in roles.items()]
    return f"each of {ranks} ranks keeps {listing(shares)}" if shares else ""


def quartiles(steps: pd.DataFrame) -> pd.DataFrame:
    """Of the time of a step, in ms, by run: ``low``, ``middle``, ``high``, and ``steps``, of how many.

    Args:
        steps: table ``steps``; each step counts with the median of its ranks.
    """
    lengths = step_lengths(steps).groupby("run")
    shares = {"low": 0.25, "middle": 0.5, "high": 0.75}
    times = {name: lengths.quantile(share).div(1e3) for name, share in shares.items()}
    return pd.DataFrame({**times, "steps": lengths.size()})


def fastest(rows: pd.DataFrame, times: pd.DataFrame, doubt: str = "") -> str:
    """Which strategy is fastest, or why that cannot be said.

    Args:
        rows: of the summary, by strategy.
        times: see ``quartiles``.
        doubt: why times are uncertain, if they are.
    """
    times = times.loc[list(rows.index)].sort_values("middle", kind="stable")
    first = str(times.index[0])
    if len(times) == 1:
        return f"{first} alone, {in_ms(1e3 * times['middle'].iloc[0])} a step"
    if doubt:
        return "cannot be said: times are uncertain, see below"
    if times["steps"].min() < FEWEST_STEPS:
        return f"cannot be said: {times['steps'].min()} timed steps are too few; give --steps 20"
    (low, middle, high), (low2, middle2, high2) = times[["low", "middle", "high"]].iloc[:2].to_numpy()
    second = str(times.index[1])
    if high >= low2:
        return (
            f"cannot be said: {first} and {second} take about as long, half of their steps "
            f"{in_ms(1e3 * low)[:-3]} to {in_ms(1e3 * high)} and {in_ms(1e3 * low2)[:-3]} to {in_ms(1e3 * high2)}"
        )
    said = f"{first}, {in_ms(1e3 * middle)} a step (median), {format_percent(1 - middle / middle2)} less than {second}"
    if not rows["wire_bytes_per_step"].astype("float64")[first]:
        return said
    hidden = rows["overlap"].astype("float64")[first]
    if isnan(hidden):
        return f"{said}; how much of its communication is hidden is not known"
    return f"{said}; {format_percent(hidden)} of its communication is hidden"


def _alone(rows: pd.DataFrame, times: pd.DataFrame) -> str:
    """That one process alone, with the rows of all ranks, is faster than each strategy; empty where it is not."""
    if REFERENCE not in times.index or REFERENCE in rows.index:
        return ""
    one, several = times.loc[REFERENCE], times.loc[list(rows.index)]
    if one["high"] >= several["low"].min():
        return ""
    took = in_ms(1e3 * float(times["middle"].to_dict()[REFERENCE]))
    return f"; one process alone is faster with the rows of all, {took}"


def messages(
    collectives: pd.DataFrame, averaged: Collection[str] = (), steps: pd.DataFrame | None = None
) -> "pd.Series[float]":
    """How many messages the busiest rank sends in the last watched step, by run, without the reported loss.

    Args:
        collectives: table ``collectives``.
        averaged: runs of which the mean over all steps counts.
        steps: table ``steps``, of which some may have sent nothing; None where all have.
    """
    sent, num_steps = _counted(collectives, averaged)
    num_steps = num_steps if steps is None else counted_steps(steps, averaged).groupby("run")["step"].nunique()
    by_run = sent.groupby(["run", "rank"]).size().groupby("run").max() / num_steps
    return by_run.round(2)


def sent_by_axis(collectives: pd.DataFrame, averaged: Collection[str] = ()) -> dict[str, dict[str, float]]:
    """What a rank sends over each axis of the mesh in a step, of runs that send over several; see ``messages``."""
    sent, num_steps = _counted(collectives, averaged)
    by_axis = sent.groupby(["run", "rank", "axis"])["wire_bytes"].sum().groupby(["run", "axis"]).max()
    table = by_axis.unstack("axis").div(num_steps, axis=0)
    several = table[table.count(axis=1) > 1]
    return {str(run): {str(axis): size for axis, size in row.dropna().items()} for run, row in several.iterrows()}


def _counted(collectives: pd.DataFrame, averaged: Collection[str]) -> "tuple[pd.DataFrame, pd.Series[int]]":
    """Of each run the collectives of the steps that count, and of how many."""
    sent = collectives[(collectives["phase"] != str(Phase.METRICS)) & (collectives["step"] >= 0)]
    sent = sent[sent["op"] != str(Collective.RECV)]  # a message counts where it is sent
    sent = counted_steps(sent, averaged)
    return sent, sent.groupby("run")["step"].nunique()


def _cost(rows: pd.DataFrame, collectives: pd.DataFrame, averaged: Collection[str]) -> str:
    """What runs cost; of those ``averaged`` bytes and messages are means over all steps."""
    said = cost(rows, messages(collectives, averaged).to_dict(), sent_by_axis(collectives, averaged))
    named = [name for name in averaged if name in rows.index]
    return f"{said}; of {listing(named)} means over all steps, of which some send more" if named else said


def cost(
    rows: pd.DataFrame, counts: Mapping[Any, float], by_axis: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    """What a rank sends in a step, as ratios to the least, in how many messages, and over which axes.

    Args:
        rows: of the summary, by strategy.
        counts: see ``messages``.
        by_axis: see ``sent_by_axis``.
    """
    sent = rows["wire_bytes_per_step"].astype("float64")
    if sent.isna().any():
        return f"not known: no step of {listing([str(name) for name in sent.index[sent.isna()]])} was watched"
    if not sent.max():
        return "nothing is sent"
    least = sent[sent > 0].min()
    ratios: dict[str, list[str]] = {}
    for name, ratio in (sent / least).sort_values(kind="stable").items():
        ratios.setdefault("nothing" if not ratio else f"{ratio:.2f}", []).append(str(name))
    said = []
    for times, names in ratios.items():
        size = format_bytes(sent[names[0]])
        much = {"nothing": "nothing", "1.00": f"{'sends' if len(names) == 1 else 'send'} {size} a rank and step"}
        said.append(f"{listing(names)} {much.get(times, f'{times} times as much, {size}')}")
    numbers = ", ".join(f"{name} {counts.get(str(name), 0):.10g}" for name in rows.index)
    parts = [", ".join(said), *([f"messages: {numbers}"] if counts else [])]
    for name, axes in (by_axis or {}).items():
        if name in rows.index:
            parts.append(f"{name}: {listing([f'{format_bytes(size)} over {axis}' for axis, size in axes.items()])}")
    return "; ".join(parts)


def _trusted(comparison: Comparison, doubt: str) -> Iterable[str]:
    table = comparison.summary
    for said in (verdicts.agreement_verdict(comparison), verdicts.unfinished_verdict(comparison)):
        if said:
            yield said.rstrip(".")
    if comparison.failed:
        yield f"NOT run to the end: {listing(list(comparison.failed))}, see below"
    judged = table["judged_loss_difference"].max()
    if not_finite(comparison.records.steps):
        yield "losses NOT finite"
    elif pd.isna(judged) or len(table) == 1:
        if len(table) == 1 or not ranks_differ(comparison.records):
            yield "losses not compared: one strategy ran"
    elif dead := dead_verdict(comparison):
        yield dead
    elif not comparison.losses_equal and trained_on_others(comparison.records.manifests):
        yield "losses NOT compared: the data differ, see below"
    else:
        rounded = {rounding_of(run, comparison.records) for run in comparison.records.manifests} - {FULL}
        hidden = judged <= (ROUNDED_LOSS_TOLERANCE if rounded else LOSS_TOLERANCE["float32"]) and norms_apart(table)
        too = ", and gradients by a factor" if hidden else ""
        too += f", within the rounding of {listing(sorted(rounded))}" if rounded and comparison.losses_equal else ""
        too += ", not compared with the single process, see below" if alone_verdict(comparison) else ""
        by = f"{' to' if comparison.losses_equal else ': they differ by'} {judged:.1e}" if judged else ""
        yield f"losses {'equal' if comparison.losses_equal else 'NOT equal'}{by}{too}"
    if skipped := skipped_steps(comparison.records):
        each = [f"{len(steps)} of {name}" for name, steps in skipped.items()]
        yield f"steps skipped, because gradients overflowed in fp16: {listing(each)}"
    if differ := [name for name in ranks_differ(comparison.records) if name in set(table["strategy"])]:
        yield f"ranks of {listing(differ)} differ by design, and so do the losses"
    planned = table.dropna(subset="as_planned")
    wrong = planned.loc[~planned["as_planned"].astype(bool), "strategy"]
    if planned.empty:
        yield "bytes and messages have no plan"
    elif len(wrong):
        yield f"bytes or messages of {listing(list(wrong))} NOT as planned"
    else:
        others = list(table.loc[table["as_planned"].isna(), "strategy"])
        yield f"bytes and messages as planned{f', without a plan those of {listing(others)}' if others else ''}"
    yield f"times uncertain, because {doubt}" if doubt else "ranks had their cores"


def following(config: CompareConfig, ran: set[str], *, has_failed: bool, doubt: str, place: str | None = None) -> str:
    """One command to try next.

    Args:
        config: of the comparison.
        ran: names of its strategies.
        has_failed: a loss was not finite.
        doubt: why times are uncertain, if they are.
        place: of the workload, if it is known.
    """
    again = _options(config, place)
    if has_failed:
        return f"{_command(again | {'clip': None})} --clip {(config.clip or 10) / 10:g}, or a lower learning rate"
    if doubt:
        if not {config.inside(name) for name in config.strategies} <= STRATEGIES.keys():  # the reader's own, in Python
            return "the same with steps=50, and nothing beside it: so that times count"
        is_default = config.strategies == CompareConfig.strategies or config.pipe > 1
        chosen = "" if is_default else f" --strategies {','.join(config.strategies)}"
        half = max(2, config.ranks // 2)
        fewer = _command(again | {"ranks": half, "batch": _batch(config, half)})
        if config.ranks == 2 or config.pipe * config.tp > 1 or any(map(config.has_two_axes, config.strategies)):
            fewer = f"{_command(again)} --steps 50"
        return f"{fewer}{chosen}, with nothing beside it: so that times count"
    if config.pipe > 1:
        changed, why = _smaller_bubble(config)
        same = {name: value for name, value in again.items() if name not in changed}
        return f"{_command(same | changed)}: {why}"
    if "fsdp" not in ran:
        return f"{_command(again)} --strategies zero1,zero3,fsdp: what sharded parameters cost"
    if config.link is None:
        return f"{_command(again)} --strategies bucketed,zero3,fsdp --link 10Gbps,50us: what a slow link changes"
    of = " --params 7B" if config.workload is None else f" --workload {quote(again['workload'])}"
    return f"shardlab plan{of} --gpu h100 --ranks 8: what it holds on cards"


def _options(config: CompareConfig, place: str | None) -> dict[str, Any]:
    """The options of a comparison that are not their defaults, by name."""
    inside = {config.inside(name): None for name in config.strategies}  # each may be trained under several schedules
    found = {name: getattr(config, name) for name in _KEPT} | {
        "workload": None if config.workload is None else place or "FILE.py:NAME",
        "batch": _batch(config, config.data_ranks),
        "strategies": tuple(inside) if config.pipe > 1 and not inside.keys() <= {REFERENCE, "ddp"} else None,
    }
    if config.pipe > 1:
        found["accumulation"] = None  # micro_batches says it
    if config.accumulation == MICRO_BATCHES_PER_RANK * config.pipe:
        found["micro_batches"] = None
    return {name: value for name, value in found.items() if value not in (None, getattr(CompareConfig, name))}


def _command(options: Mapping[str, Any]) -> str:
    """``shardlab compare`` with the options that are not None."""
    said = "shardlab compare"
    for name, value in options.items():
        if value is not None:
            text = wrap_text(value) if name == "wrap" else ",".join(value) if isinstance(value, tuple) else str(value)
            said += f" --{name.replace('_', '-')}" + ("" if value is True else f" {quote(text)}")
    return said


def _batch(config: CompareConfig, data_ranks: int) -> int | None:
    """The batch, where it is none that follows from the number of ranks, and these divide it."""
    usual = SEQUENCES_PER_RANK * config.data_ranks * config.accumulation
    return None if config.batch in (None, usual) or config.batch % (data_ranks * config.accumulation) else config.batch


def _smaller_bubble(config: CompareConfig) -> tuple[dict[str, Any], str]:
    """What to change, and what for: the same rows in twice as many micro-batches, if they divide."""
    # Of a record the workload is a name, and the rows are there; none where data come in batches of their own.
    rows = config.batch if isinstance(config.workload, str) else config.resumed_rows
    number, begins = config.accumulation, config.begins or None
    known = tuple(name for name in config.schedule if name in PLANS)
    divides = rows is None or rows % (2 * number * config.data_ranks) == 0
    others = tuple(name for name in ("1f1b", "zb-h1") if name not in known)  # which any number of micro-batches suits
    if others and not (known and divides):
        begins = begins if len(config.begins) == config.pipe - 1 else None  # these have one stage a rank
        changed = {"begins": begins, "schedule": others, "batch": rows, "micro_batches": number}
        return changed, "which bubble other schedules have"
    if rows is not None and not divides:
        rows *= 2
    return {"begins": begins, "schedule": known, "batch": rows, "micro_batches": 2 * number}, "a smaller bubble"


def answer_of_plan(
    plans: pd.DataFrame, ranks: int, memory_bytes: float | None = None, collectives: pd.DataFrame | None = None,
    stages: pd.DataFrame | None = None,
) -> list[Line]:  # fmt: skip
    """The lines of a plan: what fits, where a GPU is known; who holds least; what is sent; what to try next.

    Args:
        plans: ``strategy``, bytes by role, ``wire_bytes_per_step``; ``messages_per_step``, ``left_bytes`` and
            ``rows_that_fit`` where they are known.
        ranks: how many.
        memory_bytes: of the GPU of each rank.
        collectives: the messages of all, where they are known.
        stages: of ``stages_of``, where there are any.
    """
    rows = side_by_side(plans.assign(ranks=ranks))
    sent = rows.dropna(subset="wire_bytes_per_step")
    unknown = [str(name) for name in rows.index.difference(sent.index, sort=False)]
    counts = sent["messages_per_step"].to_dict() if "messages_per_step" in sent else {}
    by_axis = {} if collectives is None else sent_by_axis(collectives)
    costs = [cost(sent, counts, by_axis)] if len(sent) else []
    costs += [f"what {listing(unknown)} {'sends' if len(unknown) == 1 else 'send'} is not known"] if unknown else []
    lines = [] if memory_bytes is None else [Line("WHAT FITS", what_fits(rows, memory_bytes, ranks))]
    lines += [Line("LEAST MEMORY", least_memory(rows)), Line("COST", "; ".join(costs))]
    if stages is not None and len(stages):
        lines.append(Line("BUBBLE", idle_line(stages)))
        return [*lines, Line("NEXT", "shardlab compare with these options: losses, times and the bubble on real ranks")]
    if "messages_per_step" not in plans:
        command = f"shardlab plan --workload train.py:workload --ranks {ranks}"
        return [*lines, Line("NEXT", f"shardlab template > train.py; {command}: your own model, with its messages")]
    if memory_bytes is None:
        return [*lines, Line("NEXT", "the same with --gpu h100: what is left of its memory, and how many rows fit")]
    return [*lines, Line("NEXT", "shardlab compare with this workload: its losses, times and peaks on real ranks")]


def what_fits(rows: pd.DataFrame, memory_bytes: float, ranks: int) -> str:
    """Which strategy is the first that a GPU has room for, and which leaves most; else what would fit.

    Args:
        rows: of a plan, by strategy, with ``left_bytes``.
        memory_bytes: of the GPU.
        ranks: each with such a GPU.
    """
    left, memory = rows["left_bytes"].astype("float64"), format_bytes(memory_bytes)
    counts = rows["rows_that_fit"].astype("float64") if "rows_that_fit" in rows else nan * left
    fitting = left[(left > 0) & ~(counts < 1)]
    if fitting.empty:
        return f"of {memory}, {_nothing_fits(left, memory_bytes, ranks)}"
    first = str(fitting.index[0])
    short = [str(name) for name in left.index.difference(fitting.index, sort=False)]
    fits = f"all fit: {first}" if len(left) > 1 else f"{first} fits: it"
    if short:
        fits = f"{listing(short)} {'does' if len(short) == 1 else 'do'} not fit; {first} is the first that fits: it"
    number = float(counts[first])
    many = f"{number:,.0f}" if number < 1e6 else f"{number / 1e6:,.1f} million"
    room = "" if isnan(number) else f", {many} rows"
    said = (
        f"of {memory}, {fits} takes {format_bytes(memory_bytes - left[first])}, and {format_bytes(left[first])} are "
        f"left for activations{room}"
    )
    return said + _leaves_more(rows, left, fitting)


def _nothing_fits(left: "pd.Series[float]", memory_bytes: float, ranks: int) -> str:
    """What is needed, and what would help; ``left`` is what strategies leave of the memory."""
    most = str(left.idxmax())
    if left[most] <= 0:
        need, ranked = memory_bytes - left[most], f"--ranks {ceil(ranks * (1 - left[most] / memory_bytes))} or more"
        advice = ranked if most in ROWS and ROWS[most].parameters else f"fsdp, which keeps 1/{ranks} of everything"
        return (
            f"nothing fits: {most}, which needs least, needs {format_bytes(need)}. Try {advice}, or an optimizer with "
            "less state; checkpointing saves activations alone"
        )
    return (
        f"nothing fits with a row: {most} leaves most, {format_bytes(left[most])}, and one row keeps more. Checkpoint "
        "layers in the model, or compute in 16 bits; where logits are most of it, a chunked loss helps"
    )


def _leaves_more(rows: pd.DataFrame, left: "pd.Series[float]", fitting: "pd.Series[float]") -> str:
    """Which other strategies leave more than the first that fits: of those that send as much, and of all."""
    first, most = str(fitting.index[0]), str(left.idxmax())
    sent = rows["wire_bytes_per_step"].astype("float64")
    same = fitting[sent[fitting.index] <= sent[first] * (1 + ALIKE)]
    alike, said = str(same.idxmax()) if len(same) else first, ""
    if left[alike] > left[first] * (1 + ALIKE) and alike != most:
        said = f"; {alike} sends as much and leaves {format_bytes(left[alike])}"
    if left[most] <= left[first] * (1 + ALIKE):
        return said
    times = sent[most] / sent[first] if sent[first] else nan
    ratio = "as much" if times < 1 + ALIKE else f"{times:.2f} times as much"
    return f"{said}; {most} leaves {format_bytes(left[most])}{'' if isnan(times) else f' and sends {ratio}'}"
