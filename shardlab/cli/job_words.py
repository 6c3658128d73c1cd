"""What is said of a job: how it is trained, whether it fits, how much it does in a second.

``shardlab forecast --strategy all`` says it of all strategies in one table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from shardlab.cli.console import answer_table, count, say, say_json, table_of
from shardlab.cli.counted_model import CountedModel
from shardlab.forecast.job import Job
from shardlab.forecast.peak import logits_bytes, peak_bytes, rest_bytes
from shardlab.forecast.predict import RESERVED, USABLE, forecast_of
from shardlab.forecast.published import Pair

DOES_NOT_FIT = "it does not fit"
MARK = "* Warned of: a range, to what that may cost; shardlab forecast says why, of one way alone."
RANGES = "Of a range, tokens/s and MFU are without what is warned of, over the fastest links, on a usual host."
LOST = ("waiting for messages", "slowed by messages")  # parts of a step


def planned(job: Job, gpu: str) -> str:
    """How it is trained, on which GPUs; the strategy first."""
    kept = f"{job.precision} with {job.kept.total} bytes a parameter"
    return f"{job.way}; rows of {count(job.seq_len, 'token')}, {kept}, on {job.data * job.tensor} x {gpu}"


def memory_of(job: Job, room: float) -> str:
    """Bytes of a GPU with so much memory, and whether they fit."""
    peak = peak_bytes(job)
    said = f"{rest_bytes(job) / 1e9:.3g} GB at rest, {peak / 1e9:.3g} GB in tensors at the peak, of {room / 1e9:.3g} GB"
    return f"{said}: {verdict(peak, room)}{_of_logits(job, room)}"


def verdict(peak: float, room: float) -> str:
    """Whether tensors of so many bytes fit, with what the allocator reserves on top."""
    least, most = RESERVED
    if least * peak > room:
        return DOES_NOT_FIT
    if peak > USABLE * room:
        return f"it hardly fits, with less than {1 - USABLE:.0%} left for libraries and the allocator"
    if most * peak < room:
        return "it fits"
    often = f"{room / peak:.3g} times that; {least:g} to {most:g} times were seen"
    return f"it fits, unless the allocator reserves more than {often}"


def _of_logits(job: Job, room: float) -> str:
    """What helps, where it does not fit or hardly, and logits are the reason; else empty."""
    logits, peak = logits_bytes(job), peak_bytes(job)
    if peak <= USABLE * room or (2 * logits < peak and peak - logits > USABLE * room):
        return ""
    return (
        f"; {logits / 1e9:.3g} GB of it are logits, {job.tokens:,} tokens x {job.vocab:,} words: a chunked loss, which "
        "makes them for some tokens at a time, would save most of these"
    )


def in_seconds(row: Mapping[str, Any]) -> str:
    """Seconds of a row of a table: a range where something is warned of, with a mark, or where links are not known."""
    ends = [in_digits(row[f"{end}_seconds"], 2) for end in ("least", "most")]
    said = in_digits(row["seconds"], 3) if ends[0] == ends[1] else " to ".join(ends)
    return said + (" *" if row["warnings"] else "  ")


def say_marks(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say what the mark and the ranges of a table mean, if it has any."""
    said = "".join(map(in_seconds, rows))
    for sign, meaning in {" *": MARK, " to ": RANGES}.items():
        if sign in said:
            say(meaning)


def would_do(enough: Job | None) -> str:
    """How many cards would do, and how such a step is trained."""
    if enough is None:
        return "no number of cards: one sequence alone needs more than a card has; give shorter ones by --seq-len"
    cards, peak = enough.data * enough.tensor, peak_bytes(enough) / 1e9
    return f"{count(cards, 'card')}, with a sequence for each: {enough.way} needs {peak:.3g} GB of tensors"


def rates(job: Job, seconds: float) -> dict[str, float]:
    """Tokens a second and a day over all ranks, and the MFU."""
    rate = job.tokens_per_step / seconds
    return {"tokens_per_second": rate, "tokens_per_day": 86400 * rate, "mfu": job.mfu(seconds)}


def in_digits(value: float, digits: int) -> str:
    """A number rounded to so many digits, and written out: 19100000 is 19,100,000."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1e6 else f"{rounded:,g}"


def tell_all(
    model: CountedModel, jobs: Sequence[Job], steps: Sequence[Pair], gpu: str, memory: float | None, *, json: bool
) -> None:
    """Memory and time of all strategies; memory alone, where the card's speed is not known."""
    rows = [_row(job, steps, memory) for job in jobs]
    if json:
        say_json({**model.as_json(), "strategies": rows})
        return
    first = jobs[0]
    each = planned(first, gpu).replace(first.strategy, "each strategy", 1)
    say(answer_table([model.line, ("PLANNED", each)]))
    forms = {
        "rest_bytes": ("at rest (GB)", 1e9), "peak_bytes": ("peak (GB)", 1e9), "seconds": ("step (s)", 1),
        "message_seconds": ("lost (s)", 1), "tokens_per_second": ("tokens/s", 1), "mfu": ("MFU (%)", 0.01),
    }  # fmt: skip
    shown = pd.DataFrame({"strategy": [row["strategy"] for row in rows]})
    for name, (head, divisor) in forms.items():
        if name in rows[0]:
            shown[head] = [in_seconds(row) if name == "seconds" else in_digits(row[name] / divisor, 3) for row in rows]
    shown["fits"] = ["perhaps" if "unless" in row["fits"] else row["fits"].removeprefix("it ").partition(",")[0]
                     for row in rows]  # fmt: skip
    say(table_of(shown, "", 2, right=[*dict(forms.values())]))
    if first.assumed_gigabits and memory is None:
        least, most = first.assumed_gigabits
        say(f"Links between hosts are not given: {most:g} to {least:g}Gb/s per GPU are assumed.")
    say_marks(rows if memory is None else [])
    miss = " --strategy fsdp says how far its forecast may miss." if memory is None else ""
    lost = " Lost: to messages." if memory is None else ""
    say(f"At rest and at the peak: in tensors, of a GPU.{lost}{miss}")


def _row(job: Job, steps: Sequence[Pair], memory: float | None) -> dict[str, Any]:
    peak = peak_bytes(job)
    row = {"strategy": job.strategy, "rest_bytes": rest_bytes(job), "peak_bytes": peak}
    row["fits"] = verdict(peak, job.card.memory_bytes if memory is None else memory)
    if memory is not None:
        return row
    found = forecast_of(job, steps)
    lost = sum(found.parts.get(part, 0.0) for part in LOST)
    row |= {name: getattr(found, name) for name in ("seconds", "least_seconds", "most_seconds", "warnings")}
    return {**row, "message_seconds": lost, **rates(job, found.seconds)}
