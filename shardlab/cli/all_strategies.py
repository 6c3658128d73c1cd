"""``shardlab forecast --strategy all``: bytes, seconds and what fits of all strategies in one table."""

import json as json_text
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import typer
from rich.console import Console

from shardlab.cli.console import answer_table, table_of
from shardlab.cli.counted_model import CountedModel
from shardlab.cli.job_words import MARK, in_digits, in_seconds, planned, rates, verdict

if TYPE_CHECKING:
    from shardlab.forecast.job import Job
    from shardlab.forecast.published import Pair

LOST = ("waiting for messages", "slowed by messages")  # parts of a step


def tell_all(
    model: CountedModel, jobs: Sequence["Job"], steps: Sequence["Pair"], gpu: str, memory: float | None, *, json: bool
) -> None:
    """Memory and time of all strategies; memory alone, where the card's speed is not known."""
    rows = [_row(job, steps, memory) for job in jobs]
    if json:
        typer.echo(json_text.dumps({**model.as_json(), "strategies": rows}, indent=2))
        return
    console, first = Console(highlight=False), jobs[0]
    each = planned(first, gpu).replace(first.strategy, "each strategy", 1)
    console.print(answer_table([model.line, ("PLANNED", each)]))
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
    console.print(table_of(shown, "", 2, right=[*dict(forms.values())]))
    if first.assumed_gigabits and memory is None:
        console.print(f"Links between hosts are not given: {first.assumed_gigabits[1]:g}Gb/s per GPU are assumed.")
    if any(row.get("warnings") for row in rows):
        console.print(MARK)
    miss = " --strategy fsdp says how far its forecast may miss." if memory is None else ""
    lost = " Lost: to messages." if memory is None else ""
    console.print(f"At rest and at the peak: in tensors, of a GPU.{lost}{miss}")


def _row(job: "Job", steps: Sequence["Pair"], memory: float | None) -> dict[str, Any]:
    from shardlab.forecast.peak import peak_bytes, rest_bytes
    from shardlab.forecast.predict import forecast_of

    peak = peak_bytes(job)
    row = {"strategy": job.strategy, "rest_bytes": rest_bytes(job), "peak_bytes": peak}
    row["fits"] = verdict(peak, job.card.memory_bytes if memory is None else memory)
    if memory is not None:
        return row
    found = forecast_of(job, steps)
    lost = sum(found.parts.get(part, 0.0) for part in LOST)
    row |= {"seconds": found.seconds, "most_seconds": found.most_seconds, "warnings": [*found.warnings]}
    return {**row, "message_seconds": lost, **rates(job, found.seconds)}
