"""``shardlab modules``: what each part of the model costs at rest, from the records of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardlab.cli.records import AsJson, Directory, print_json, table_of

MB = 1e6


def modules(
    directory: Directory,
    strategy: Annotated[str | None, typer.Option(help="Which run, if there are several.")] = None,
    depth: Annotated[int | None, typer.Option(help="Parts of a module's name that count: 2 for blocks.3.")] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank; by default the one that holds the most.")] = None,
    json: AsJson = False,
) -> None:
    """Print the bytes that a rank holds of each module: parameters, gradients, optimizer state."""
    from shardlab.analysis.modules import held_at_rest, module_bytes
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
    sizes = own.set_index("module").astype("float64") / MB
    shown = sizes.rename(columns=lambda name: f"{name.removesuffix('_bytes').replace('bytes', 'all')}\nMB")
    console = Console(highlight=False)
    console.print(table_of(shown.reset_index(), f"{records.shards['run'].iloc[0]}, rank {chosen}, at rest", 2))
    console.print(f"In all {sizes['bytes'].sum():.2f} MB.")


def _run(directory: Path, strategy: str | None) -> Path:
    """The directory of the one run that is meant."""
    from shardlab.trace.store import run_directories

    found = {path.name: path for path in run_directories(directory)}
    if strategy is None and len(found) == 1:
        return next(iter(found.values()))
    if strategy not in found:
        raise ValueError(f"strategy: {strategy or 'none given'}; {directory} holds {', '.join(found)}")
    return found[strategy]
