"""``shardlab record``: run a script as Python would, and record what it trains."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Out = Annotated[Path | None, typer.Option(help="A new or empty directory; by default runs/DATE.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove the record that is in --out.")]
WatchEvery = Annotated[
    int, typer.Option(min=1, help="Record what is sent, exposed or hidden in the first 16 steps, then in one in N.")
]
SCRIPT_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Arguments after the script belong to the script, even if they look like options."""


def record(
    script: Annotated[Path, typer.Argument(help="A Python script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    out: Out = None,
    overwrite: Overwrite = False,
    watch_every: WatchEvery = 16,
) -> Any:
    """Run a script that knows nothing of shardlab, and record it; under torchrun every rank of it.

    The output, the errors and the exit code are the script's own. Then: shardlab report DIR.
    """
    from shardlab.experiment import is_reporter
    from shardlab.recording.place import directory_by_date
    from shardlab.recording.script import Script

    # Called by main, when the command line has been dealt with: what the script raises is no error of an option.
    prepared = Script(script, tuple(arguments or ()), out or directory_by_date(), overwrite, watch_every)
    if out is None and is_reporter():
        Console(stderr=True, highlight=False).print(
            f"records go to {prepared.directory}; then: shardlab report {prepared.directory}", soft_wrap=True
        )
    return prepared
