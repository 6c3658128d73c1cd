"""``shardlab compare``: an option for each field of ``CompareOptions``, a progress bar for each strategy, a table."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardlab.cli.console import bad_input, count, names_in
from shardlab.cli.records import print_result
from shardlab.experiment.options import CompareOptions

if TYPE_CHECKING:
    from shardlab.experiment import CompareConfig, Comparison
    from shardlab.experiment.run import Progress as StepDone

INTERRUPTED = 130  # an exit code
Out = Annotated[Path | None, typer.Option(help="A new or empty directory; by default runs/DATE.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove the run that is in --out, finished or not.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for each field of ``CompareOptions`` in place of its ``**`` arguments."""
    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *_options()]
    # Typer takes the defaults from the signature and the types from the annotations.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _options() -> Iterator[inspect.Parameter]:
    helps = _helps(inspect.getdoc(CompareOptions) or "")
    for field in fields(CompareOptions):
        names = [f"--{field.name.replace('_', '-')}"] if field.type is bool else []  # no --no-...
        option = typer.Option(*names, help=helps.get(field.name, ""))
        kind, default = _on_command_line(field)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


def _on_command_line(field: "Field[Any]") -> tuple[Any, Any]:
    """Type and default of an option; several values are one text with commas."""
    if isinstance(field.default, tuple):
        return str, ",".join(field.default)
    # Python takes an object there, the command line its place.
    return (str | None if field.type is Any else field.type), field.default


def _helps(docstring: str) -> dict[str, str]:
    """The text for each field in the section 'Attributes' of a docstring."""
    section = docstring.partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: text[:1].upper() + re.sub(r"\s+", " ", text[1:]) for name, text in entries}


@with_options
def compare(out: Out = None, overwrite: Overwrite = False, **chosen: Any) -> None:
    """Train one model with several strategies on real ranks; compare losses, memory, communication and time."""
    from shardlab import experiment  # here, because it imports torch, which takes 1.5 s and --help does not need

    directory = out or experiment.new_directory()
    with bad_input():
        if overwrite and out is None:
            raise ValueError("overwrite: only with --out; name the directory to replace there")
        chosen["strategies"] = names_in(chosen["strategies"])
        config = experiment.CompareConfig(**chosen)
        experiment.prepare(config, directory, overwrite=overwrite)
    comparison = _with_progress(config, directory)
    if experiment.is_reporter():
        with bad_input():
            page = experiment.write_report(comparison, config)
        print_result(comparison, config, page)
    if not comparison.losses_equal:
        raise typer.Exit(1)


@contextmanager
def _bars(config: "CompareConfig", console: Console) -> "Iterator[Callable[[StepDone], None]]":
    """A bar for each strategy; each starts when the one before it is done. Call what this yields after each step."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=config.steps, loss="", start=False) for name in config.strategies}
        waiting = iter(bars.values())
        progress.start_task(next(waiting))

        def advance(done: "StepDone") -> None:
            progress.update(bars[done.strategy], completed=done.step + 1, loss=f"loss {done.loss:.4f}")
            if done.step + 1 == config.steps and (following := next(waiting, None)) is not None:
                progress.start_task(following)

        yield advance


def _with_progress(config: "CompareConfig", directory: Path) -> "Comparison":
    from shardlab import experiment
    from shardlab.launch import RankError, RankHang

    console = Console(stderr=True, quiet=not experiment.is_reporter(), highlight=False)
    console.print(
        f"{count(config.ranks, 'rank')}, {count(config.steps, 'step')} of {config.title} each; "
        f"records go to {directory}",
        soft_wrap=True,
    )
    try:
        with _bars(config, console) as advance:
            return experiment.compare(config, directory, on_progress=advance)
    except KeyboardInterrupt:
        console.print(f"interrupted: the ranks have ended; the records so far are in {directory}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    except (RankError, RankHang):
        console.print(
            f"the ranks have failed; if steps were finished, 'shardlab report {directory}' shows them", soft_wrap=True
        )
        raise
