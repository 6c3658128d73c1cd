"""``shardlab modules``: what each part of the model costs at rest, from the records of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardlab.cli.console import decimals_of, unit_of
from shardlab.cli.records import ROOMY, AsJson, Directory, print_json, table_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "parameter_bytes": "params", "gradient_bytes": "grads", "optimizer_bytes": "optim", "offloaded_bytes": "host",
    "other_bytes": "other", "bytes": "all",
}  # fmt: skip


def modules(
    directory: Directory,
    strategy: Annotated[str | None, typer.Option(help="Which run, if there are several.")] = None,
    depth: Annotated[int | None, typer.Option(help="Parts of a module's name that count: 2 for blocks.3.")] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank; by default the one that holds the most.")] = None,
    json: AsJson = False,
) -> None:
    """Print the bytes that a rank holds of each module: parameters, gradients, optimizer state."""
    from shardlab.analysis.held_bytes import held_at_rest, module_bytes
    from shardlab.trace.store import load_runs

    records = load_runs([_run(directory, strategy)])
    if not len(records.shards):
        raise ValueError(f"run: {directory} does not say who holds what; only a finished comparison does")
    table = module_bytes(records.shards, held_at_rest(records.memory), depth)
    ranks = table.groupby("rank")["bytes"].sum()
    chosen = sorted(ranks.index, key=lambda known: -ranks[known])[0] if rank is None else rank
    if chosen not in ranks.index:
        raise ValueError(f"rank: {chosen} is not one of {', '.join(map(str, ranks.index))}")
    own = table[table["rank"] == chosen].drop(columns=["run", "source", "rank"])
    if json:
        print_json(own)
        return
    _print(own.set_index("module"), set(table["module"]), f"{records.shards['run'].iloc[0]}, rank {chosen}, at rest")


def _print(held: "pd.DataFrame", modules: set[str], title: str) -> None:
    """In the unit of the largest number, without columns of zeros; what this rank holds nothing of is named."""
    largest = float(held.to_numpy().max())
    unit, power = unit_of(largest)
    decimals, total = decimals_of(largest / 10**power), held["bytes"].sum() / 10**power
    texts = (held.loc[:, held.any()] / 10**power).map(lambda size: f"{size:,.{decimals}f}")
    shown = texts.rename(columns=lambda name: f"{COLUMNS[name]}\n{unit}")
    console = Console(highlight=False)
    gap = 2 if console.width >= ROOMY else 0
    console.print(table_of(shown.reset_index(), title, gap, right=shown.columns))
    console.print(f"In all {total:,.{decimals}f} {unit}.")
    if elsewhere := sorted(modules - set(held.index)):
        console.print(f"This rank holds nothing of {', '.join(elsewhere)}: other ranks do.")


def _run(directory: Path, strategy: str | None) -> Path:
    """The directory of the one run that is meant."""
    from shardlab.trace.store import run_directories

    found = {path.name: path for path in run_directories(directory)}
    if strategy is None and len(found) == 1:
        return next(iter(found.values()))
    if strategy not in found:
        names = ", ".join(found)
        raise ValueError(f"strategy: {strategy or 'none given'}; {directory} holds {names}, name one of them")
    return found[strategy]
