"""What a notebook's measurements show, in sentences computed from them, so that no machine can refute the text.

Each function takes a table of times and returns a sentence with the figures it rests on. Two times count as different
only if their ratio exceeds ``ALIKE``. Where a formula predicts a result, the sentence says whether it came true.
``busy_in_steps`` and ``busy_in_messages`` say whether equal work took unequal time, for then other work had the cores.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from math import log

import pandas as pd
import psutil

from shardlab.analysis import attribution
from shardlab.analysis.overlap import hidden_by_run
from shardlab.experiment.told.verdicts import busy_verdict
from shardlab.plots.text import format_bytes, format_percent, format_us, listing, tick
from shardlab.records.store import Records
from shardlab.why import recorded_step, what_if_free

ALIKE = 1.1  # ratios up to this are no difference
BUSY = 1.5  # median over best of equal work
QUIET = 0.2  # of the cores


def busy_in_steps(steps: pd.DataFrame) -> str:
    """Whether equal steps of a run took equal time.

    Args:
        steps: columns ``run``, ``step``, ``step_us``; the first step, which warms up, is left out where others follow.
    """
    timed = steps[steps["step"] > steps["step"].min()] if steps["step"].nunique() > 1 else steps
    each = timed.groupby(["run", "step"])["step_us"].max().groupby("run")
    return _busy(each.median() / each.min(), "steps")


def busy_in_messages(messages: pd.DataFrame) -> str:
    """Whether equal messages took equal time.

    Args:
        messages: of ``message_sweep``: ``time_us`` (the best) and ``median_us``.
    """
    return _busy(messages["median_us"] / messages["time_us"], "messages")


def _busy(ratios: "pd.Series[float]", what: str) -> str:
    typical = float(ratios.median())
    if typical > BUSY:
        return (
            f"This machine was busy: half of the {what} took at least {typical:.1f} times as long as the fastest of "
            "their kind, so expect other figures from another run."
        )
    alike = "took about equal time" if typical <= ALIKE else "did not take equal time"
    return f"Equal {what} {alike}: the median is {typical:.2f} times the fastest."


def busy_now(seconds: float = 0.5) -> str:
    """What other programs do now; call it while the ranks are idle.

    Args:
        seconds: for how long to look.
    """
    return others_verdict(psutil.cpu_percent(interval=seconds) / 100, psutil.cpu_count() or 1)


def others_verdict(share: float, cores: int) -> str:
    """What it means that others use a share of the cores."""
    if share <= QUIET:
        return f"This machine is quiet: other programs use {format_percent(share)} of its {cores} cores."
    used = f"other programs use {format_percent(share)} of its {cores} cores"
    return f"This machine is busy: {used}, so expect other times from another run."


def cores_verdict(*records: Records) -> str:
    """Whether ranks had their cores, as the answer of a comparison says it.

    Args:
        records: of measured steps, the first of which warms up.
    """
    if busy := next(filter(None, map(busy_verdict, records)), ""):
        return f"{busy} What the virtual clock shows still holds."
    return "Ranks had their cores while they trained."


def clock_verdict(clock: "pd.Series[float]", measured: "pd.Series[float]") -> str:
    """Whether measured times come in the order in which the virtual clock puts them.

    Times that are alike on the clock are in no order. Those that are not are compared pair by pair.

    Args:
        clock: microseconds by name.
        measured: microseconds by the same names.
    """
    here, there = clock.sort_values().astype(float).to_dict(), measured.astype(float).to_dict()
    pairs = [(less, more) for less, more in combinations(here, 2) if here[more] > ALIKE * here[less]]
    turned = [f"{more} took less than {less}" for less, more in pairs if there[less] > ALIKE * there[more]]
    alike = [f"{less} and {more}" for less, more in pairs if 1 / ALIKE <= there[more] / there[less] <= ALIKE]
    words = f"Measured: {listing([f'{name} {format_us(there[name])}' for name in here])}."
    if turned:
        return f"{words} This is NOT the order of the clock: {listing(turned)}."
    if alike:
        return f"{words} This is the order of the clock, but {listing(alike)} took about as long here."
    return f"{words} This is the order of the clock."


def message_verdicts(messages: pd.DataFrame, op: str) -> list[str]:
    """What the time of a message depends on, at the small end and at the large one; and how busy the machine was.

    Args:
        messages: of ``message_sweep``, with four sizes or more.
        op: which.
    """
    sizes = sorted(messages.loc[messages["op"] == op, "bytes"].unique())
    ends = ((sizes[0], sizes[2]), (sizes[-2], sizes[-1]))
    return [*(growth_verdict(messages, op, *pair) for pair in ends), busy_in_messages(messages)]


def growth_verdict(messages: pd.DataFrame, op: str, smaller: int, larger: int) -> str:
    """What makes a message longer between two sizes: latency or bandwidth.

    Args:
        messages: columns ``op``, ``bytes``, ``time_us``.
        op: which.
        smaller: size in bytes; both are in the table.
        larger: size in bytes.
    """
    times = messages[messages["op"] == op].set_index("bytes")["time_us"]
    more_bytes, more_time = larger / smaller, float(times[larger] / times[smaller])
    by_bandwidth = log(max(more_time, 1e-9)) / log(more_bytes) > 0.5  # nearer to "as many times" than to "no longer"
    cost = "bandwidth" if by_bandwidth else "latency"
    return (
        f"{op}, {_size(smaller)} to {_size(larger)}: {more_bytes:g} times the bytes took {more_time:.2g} times as long "
        f"({format_us(times[smaller])}, {format_us(times[larger])}). Here the cost is mostly {cost}."
    )


def bus_verdict(bus: pd.DataFrame) -> str:
    """Whether bus bandwidth stayed when ranks were added.

    Args:
        bus: columns ``group_size`` and ``bus_gb_per_s``, one row per number of ranks.
    """
    speeds = bus.sort_values("group_size").set_index("group_size")["bus_gb_per_s"]
    first, last = float(speeds.iloc[0]), float(speeds.iloc[-1])
    words = listing([f"{speed:.3g} GB/s with {size} ranks" for size, speed in speeds.items()])
    if max(first, last) <= ALIKE * min(first, last):
        return f"{words}: it stayed, as it must where each rank has a link of its own."
    if last < first:
        return (
            f"{words}: it fell to {last / first:.0%}. So these ranks share what they send over: cores, memory or a bus."
        )
    return f"{words}: it rose to {last / first:.0%}: with fewer ranks something else than the link was slow."


def prediction_verdict(predicted: Sequence[float], measured: Sequence[float], above: str, below: str) -> str:
    """How measured times compare with predicted ones.

    Args:
        predicted: times.
        measured: times, in the same unit and order.
        above: why a measured time may be longer.
        below: why it may be shorter.
    """
    ratios = [found / wanted for found, wanted in zip(measured, predicted, strict=True)]
    words = f"Measured over predicted: {listing([f'{ratio:.2g}' for ratio in ratios])}."
    reasons = [f"Above: {above}."] * any(ratio > ALIKE for ratio in ratios)
    reasons += [f"Below: {below}."] * any(ratio < 1 / ALIKE for ratio in ratios)
    return " ".join([words, *(reasons or ["The formula holds."])])


def bucket_verdict(sweep: pd.DataFrame) -> str:
    """Which bucket size was best, and whether it lies in between.

    Args:
        sweep: columns ``bucket_bytes`` and ``step_us``; medians by size are compared.
    """
    steps = sweep.groupby("bucket_bytes")["step_us"].median().sort_index()
    best = int(str(steps.idxmin()))
    words = f"Buckets of {_size(best)} were best, {format_us(steps[best])} a step"
    smallest, largest = int(str(steps.index[0])), int(str(steps.index[-1]))
    ends = {"the smallest": smallest, "the largest": largest}
    near = min(ends, key=lambda name: float(steps[ends[name]]))
    if max(steps.iloc[0], steps.iloc[-1]) <= ALIKE * steps[best]:
        why = "Both ends are within a tenth of it: here the size hardly matters."
    elif best == smallest:
        why = "It is the smallest: here latency cost less than a late start of the first bucket."
    elif best == largest:
        why = "It is the largest: here further messages cost more than overlap saved."
    elif steps[ends[near]] <= ALIKE * steps[best]:
        why = f"It lies in between, but {near} is within a tenth of it."
    else:
        why = "It lies in between: smaller buckets pay latency, larger ones start late."
    others = [
        f"{_size(size)} took {format_us(steps[size])}, {steps[size] / steps[best]:.2f} times as long"
        for size in (smallest, largest) if size != best
    ]  # fmt: skip
    return f"{words}; {', '.join(others)}. {why}"


def message_gains(collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Each message of one step: how long it took, what hid it, and how much shorter the step were without it.

    Args:
        collectives: table ``collectives`` of one run and step, all ranks.
        spans: table ``spans``.
        steps: table ``steps`` of that run and step.

    Returns:
        One row per tag, in ms: ``duration`` (on the rank where it took longest: the step waits for that one),
        ``hidden`` and ``exposed`` of the same rank, ``unit`` (that hid most of it), ``gain``. Where a tag is sent once
        in the step, its gain is at most its duration.
    """
    each = attribution(collectives, spans).sort_values("duration_us", ascending=False, kind="stable")
    longest = each.drop_duplicates("tag").set_index("tag").loc[collectives["tag"].drop_duplicates()]
    table = longest[["duration_us", "hidden_us", "exposed_us"]].div(1e3)
    table["unit"] = longest["unit"].where(longest["hidden_us"] > 0, "–")
    table["gain"] = what_if_free(recorded_step(collectives, spans, steps)).set_index("tag")["gain_us"].div(1e3)
    return table.rename(columns=lambda name: name.replace("_us", " (ms)").replace("gain", "gain (ms)"))


def gain_verdict(gains: pd.DataFrame) -> str:
    """What the columns ``exposed`` and ``gain`` of ``message_gains`` say about each other."""
    more = gains[gains["gain (ms)"] > ALIKE * gains["exposed (ms)"]]
    most = str(gains["gain (ms)"].idxmax())
    first = f"Without {most} the step would gain most, {float(gains['gain (ms)'].max()):.1f} ms."
    if more.empty:
        return f"{first} Here no message gains more than it exposes: none holds up another."
    tag = str((more["gain (ms)"] - more["exposed (ms)"]).idxmax())
    exposed, gain = (float(more[column].to_dict()[tag]) for column in ("exposed (ms)", "gain (ms)"))
    return (
        f"{first} {tag} exposes {exposed:.1f} ms and gains {gain:.1f}: messages behind it in the queue leave earlier."
    )


def hidden_verdict(overlap: pd.DataFrame, runs: Sequence[str]) -> str:
    """How much of the communication each run hides, and what the next one changes.

    Args:
        overlap: of ``analysis.overlap``; the numbers of ``analysis.overlap.hidden_by_run`` are compared.
        runs: names, in the order to compare them in.
    """
    by_run = hidden_by_run(overlap)
    share, exposed = (by_run[column].astype(float).to_dict() for column in ("overlap", "exposed_us"))
    hidden = {name: f"{format_percent(share[name])} ({format_us(exposed[name])} exposed)" for name in runs}
    said = [f"{runs[0]} hides {hidden[runs[0]]}"]
    for before, name in pairwise(runs):
        now, then = exposed[name], exposed[before]
        alike = max(now, then) <= ALIKE * min(now, then)
        change = "about as much exposed as" if alike else "less exposed than" if now < then else "MORE exposed than"
        said.append(f"{name} {hidden[name]}, {change} {before}")
    return "; ".join(said) + "."


def pay_off_verdict(speeds: pd.DataFrame, alone: str, ranks: int = 2) -> str:
    """From how many rows on the other runs train more tokens per second than one rank alone.

    Args:
        speeds: columns ``name``, ``rows``, ``tokens_per_s``.
        alone: the name of the run of one rank.
        ranks: number of ranks of the other runs, which can do at most so many times the work of one.
    """
    table = speeds.pivot(index="rows", columns="name", values="tokens_per_s").sort_index()
    others = [name for name in table.columns if name != alone]
    return " ".join(_pays_off(str(name), table[name] / table[alone], ranks) for name in others)


def _pays_off(name: str, ratios: "pd.Series[float]", ranks: int) -> str:
    wins = [int(rows) for rows in ratios.index[ratios > 1]]
    most = f"with {ratios.idxmax()} rows they do {ratios.max():.2f} times as much"
    if ratios.max() > ranks * ALIKE:
        most += f", more than {ranks} ranks can: the machine had less time for the one"
    if not wins:
        return f"{name}: slower than one at every number of rows here; {most}."
    if len(wins) == len(ratios):
        return f"{name}: faster than one already with {wins[0]} rows; {most}."
    if wins == [int(rows) for rows in ratios.index[-len(wins) :]]:
        return f"{name}: faster than one from {wins[0]} rows on; {most}."
    where = listing([str(rows) for rows in wins])
    return f"{name}: faster than one with {where} rows only, so the machine was uneven; {most}."


def parts_verdict(split: pd.DataFrame, pairs: Mapping[str, str]) -> str:
    """Compare runs in pairs: how long a step takes, and how much of it is exposed communication.

    Args:
        split: of ``analysis.step_split``: ``run``, ``step_us``, ``moving_us``; medians are compared.
        pairs: a run, and the one it is compared with.
    """
    medians = split.groupby("run")[["step_us", "moving_us"]].median()
    steps, moving = (medians[name].astype(float).to_dict() for name in ("step_us", "moving_us"))
    said = []
    for run, other in pairs.items():
        ratio, share = steps[run] / steps[other], moving[run] / steps[run]
        verb = "as long as" if 1 / ALIKE <= ratio <= ALIKE else "longer than" if ratio > 1 else "shorter than"
        said.append(f"{run} is {verb} {other} ({ratio:.2f} times, {format_percent(share)} of it exposed)")
    return "; ".join(said) + "."


def floor_verdict(split: pd.DataFrame, alone: str) -> str:
    """How much longer the same compute takes when ranks are added, with the time in which its rank is off the CPU.

    Args:
        split: of ``analysis.step_split``: ``run``, ``compute_us``, ``off_cpu_us``; the same rows a rank in each run.
        alone: the run of one rank.
    """
    compute = (split["compute_us"] + split["off_cpu_us"]).groupby(split["run"], sort=False).median()
    ratios = (compute / compute[alone]).drop(alone)
    words = listing([f"{ratio:.2f} times as long with {run}" for run, ratio in ratios.items()])
    why = "more ranks did not slow it here"
    if ratios.max() > ALIKE:
        why = "those ranks share cores or memory, and no faster link brings that back"
    return f"Compute, with the time off the CPU in it, takes {words}: {why}."


def late_verdict(collectives: pd.DataFrame) -> str:
    """Who was longest in one collective, and whether its ranks left together.

    Args:
        collectives: rows of one collective, all ranks: ``rank``, ``start_us``, ``end_us``.
    """
    length = (collectives["end_us"] - collectives["start_us"]).set_axis(collectives["rank"])
    starts, ends = collectives.set_index("rank")["start_us"], collectives["end_us"]
    apart = float(ends.max() - ends.min())
    return (
        f"Rank {length.idxmax()} was in it for {format_us(length.max())}, rank {length.idxmin()} for "
        f"{format_us(length.min())}. Rank {starts.idxmax()} came last, {format_us(starts.max() - starts.min())} after "
        f"the first, and all left within {format_us(apart)}."
    )


def _size(num_bytes: int) -> str:
    return tick(format_bytes(num_bytes))
