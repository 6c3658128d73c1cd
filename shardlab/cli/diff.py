"""``shardlab diff``: what differs between two comparisons or runs."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from shardlab.cli.console import table_of
from shardlab.cli.records import AsJson, print_json

LOSSES_DIFFER = 1


def diff(
    first: Annotated[Path, typer.Argument(help="A comparison, or one run.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The other one.", show_default=False)],
    json: AsJson = False,
) -> None:
    """Compare two comparisons or runs: every number of each strategy, and whether the losses are equal."""
    from shardlab.experiment import load_saved
    from shardlab.experiment.told.differences import differences, losses_compared, readable, set_otherwise
    from shardlab.recording.report import is_recorded, load_recorded

    if is_recorded(first) or is_recorded(second):
        one, other = (load_recorded(path) if is_recorded(path) else load_saved(path)[0] for path in (first, second))
        lines, are_equal = ["Losses were not compared: a script was recorded, and its data are not known."], True
    else:
        saved = load_saved(first), load_saved(second)
        (one, _), (other, _) = saved
        losses = losses_compared(*saved)
        lines, are_equal = [*set_otherwise(*saved), *(said for _, said in losses)], all(equal for equal, _ in losses)
    table = differences(one.summary, other.summary)
    if json:
        print_json(table)
    else:
        _print_quantities(readable(table))
        for line in lines:
            Console(highlight=False).print(line, soft_wrap=True)
    if not are_equal:
        raise typer.Exit(LOSSES_DIFFER)


def _print_quantities(readable: pd.DataFrame) -> None:
    console = Console(highlight=False)
    for strategy, rows in readable.groupby("strategy", sort=False):
        texts = pd.DataFrame([_texts(row) for row in rows.to_dict("records")])
        console.print(table_of(texts, str(strategy), 2, right=("first", "second", "difference", "ratio")))


def _texts(row: Mapping[Hashable, Any]) -> dict[str, str]:
    """A quantity of both runs as text. Each row has its own format, and losses need many digits."""
    from shardlab.plots.text import column_text

    values = [row["first"], row["second"], row["difference"]]
    is_loss = str(row["quantity"]).endswith("loss")
    texts = [f"{value:.7f}" for value in values] if is_loss else column_text(pd.Series(values, dtype="float64"))
    (ratio,) = column_text(pd.Series([row["ratio"]], dtype="float64"))
    return {"quantity": row["quantity"], "first": texts[0], "second": texts[1], "difference": texts[2], "ratio": ratio}
