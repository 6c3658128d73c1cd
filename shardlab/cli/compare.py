"""``shardlab compare``: an option for each field of ``CompareOptions``, a progress bar, the answer, a table."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.console import Console

from shardlab import experiment  # whose names are imported when they are used: they need torch, which takes 1.5 s
from shardlab.cli.console import INTERRUPTED, bad_input, count, names_in, progress_bar
from shardlab.cli.records import print_result
from shardlab.experiment.options import CompareOptions, option_helps

Out = Annotated[Path | None, typer.Option(help="A new or empty directory; by default runs/DATE.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove the run that is in --out, finished or not.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for each field of ``CompareOptions`` in place of its ``**`` arguments."""
    *own, _ = inspect.signature(command).parameters.values()
    parameters = [*own, *_options()]
    # Typer takes the defaults from the signature and the types from the annotations.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _options() -> Iterator[inspect.Parameter]:
    helps = option_helps()
    for field in fields(CompareOptions):
        names = [f"--{field.name.replace('_', '-')}"] if field.type is bool else []  # no --no-...
        option = typer.Option(*names, help=helps.get(field.name, ""))
        # Python takes an object there, the command line its place.
        kind, default = (str | None if field.type is Any else field.type), field.default
        if isinstance(default, tuple):  # several values are one text with commas
            kind, default = str, ",".join(default)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


@with_options
def compare(out: Out = None, overwrite: Overwrite = False, **chosen: Any) -> None:
    """Train one model with several strategies on real ranks; compare losses, memory, communication and time."""
    directory = out or experiment.new_directory()
    with bad_input():
        if overwrite and out is None:
            raise ValueError("overwrite: only with --out; name the directory to replace there")
        chosen |= {field: names_in(chosen[field]) for field in ("strategies", "schedule", "begins")}
        config = experiment.CompareConfig(**chosen)
        experiment.prepare(config, directory, overwrite=overwrite)
    comparison = _with_progress(config, directory)
    if experiment.is_reporter():
        with bad_input():
            page = experiment.write_report(comparison, config)
        print_result(comparison, config, page)
    if not comparison.losses_equal or comparison.failed:
        raise typer.Exit(1)


def _with_progress(config: "experiment.CompareConfig", directory: Path) -> "experiment.Comparison":
    from shardlab.launch import RankError, RankHang

    quiet = not experiment.is_reporter()
    console = Console(stderr=True, quiet=quiet, highlight=False)
    each = f"{count(config.ranks, 'rank')}, {count(config.steps, 'step')} of {config.title} each"
    console.print(f"{each}; records go to {directory}", soft_wrap=True)
    try:
        with progress_bar(len(config.strategies) * config.steps, quiet=quiet) as advance:
            said = "{0.strategy}, loss {0.loss:.4f}".format
            return experiment.run_prepared(config, directory, on_progress=lambda done: advance(said(done)))
    except KeyboardInterrupt:
        console.print(f"interrupted: the ranks have ended; the records so far are in {directory}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    except (RankError, RankHang):
        rest = f"if steps were finished, shardlab report {quote(str(directory))} shows them"
        console.print(f"the ranks have failed; {rest}", soft_wrap=True)
        raise
