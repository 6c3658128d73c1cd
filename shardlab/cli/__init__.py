"""The command line, from ``compare`` to ``doctor``: a function each.

Exit codes: 0 done; 1 a rank failed, losses differ or are not finite; 2 bad input, said in one
line; 130 interrupted.
Under torchrun every process runs this, and only rank 0 prints.
"""

import sys
from typing import Annotated

import typer
from rich.table import Table

from shardlab.cli.bench import bench
from shardlab.cli.calibrate import calibrate, validate
from shardlab.cli.compare import compare
from shardlab.cli.console import BAD_INPUT, bad_input, complain, say
from shardlab.cli.exercises import exercises
from shardlab.cli.forecast import forecast
from shardlab.cli.plan import plan
from shardlab.cli.records import SCRIPT_ARGUMENTS, diff, modules, record, report, trace
from shardlab.cli.same import same
from shardlab.cli.search import search
from shardlab.cli.step_times import what_if
from shardlab.installed import __version__, data_path

NO_ADAPTERS = (
    "lora: no command adds adapters to a model, and forecast and search train all parameters; add and freeze them in a "
    "module of your own, which plan and compare take as --workload FILE.py:NAME"
)
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="The guide: notebooks/guide/README.md, in the repository.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardlab {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Sharded training, hand-written and measured."""


def template() -> None:
    """Print a workload to begin with: shardlab template > train.py."""
    typer.echo(data_path("train.py").read_text(), nl=False)


app.command()(compare)
app.command()(template)
app.command(context_settings=SCRIPT_ARGUMENTS)(bad_input()(record))
app.command(context_settings=SCRIPT_ARGUMENTS)(bad_input()(same))
for _command in (plan, forecast, search, calibrate, validate, what_if, bench, exercises, report, modules, trace, diff):
    app.command()(bad_input()(_command))


@app.command()
def doctor() -> None:
    """Say what this machine has, and what that means for ranks."""
    from shardlab.launch.doctor import doctor as examine

    table = Table("check", "value", "verdict")
    for row in examine():
        table.add_row(*(str(part) for part in row))
    say(table)


def main() -> None:
    """Entry point: one line for bad input, the rank's traceback if a rank failed, else Python's own traceback."""
    try:
        done = app(standalone_mode=False)
    except Exception as error:
        # An error of Click, of which newer versions of Typer have their own copy.
        if (usage := getattr(error, "format_message", None)) is not None:
            complain(NO_ADAPTERS if getattr(error, "option_name", "") == "--lora" else usage())
            sys.exit(BAD_INPUT)
        if isinstance(error, RuntimeError):
            from shardlab.launch import RankError, RankHang

            # Its message holds the traceback of the rank that failed, to which the parent's own would add nothing.
            if isinstance(error, RankError | RankHang):
                complain(str(error))
                sys.exit(1)
        raise
    # The script of 'record' runs out here, since its exceptions are none of a command.
    sys.exit(done() if callable(done) else done or 0)
