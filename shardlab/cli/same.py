"""``shardlab same``: is a script right? Its gradients on several ranks against one process, with the cause in words."""

import json as json_text
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli.console import answer_table, say, say_json

DIFFERENT = 1  # an exit code, also where nothing can be said


def same(
    script: Annotated[Path, typer.Argument(help="A Python script that trains.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks; under torchrun its own.", show_default="2")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each optimizer; then the script is ended.")] = 3,
    float64: Annotated[bool, typer.Option("--float64", help="Modules and rows in float64.")] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Leave dropout on.")] = False,
    alone: Annotated[
        str | None, typer.Option(help="Its arguments in one process, in quotes, as '--tp 1'.", show_default="the same")
    ] = None,
    limit_s: Annotated[float, typer.Option(help="Seconds after which ranks are ended.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the answer and all ratios as JSON.")] = False,
) -> Any:
    """Compare a script on several ranks with one process: gradients, norms, steps; and say what differs, and why."""
    from shardlab.launch.placement import torchrun_env
    from shardlab.same.process import Job

    env = torchrun_env()
    if env is not None and ranks not in (None, env.world_size):
        raise ValueError(f"ranks: {ranks} is given, but torchrun started {env.world_size}; leave --ranks out")
    number = env.world_size if env is not None else 2 if ranks is None else ranks
    if not limit_s > 0:
        raise ValueError(f"limit-s: {limit_s:g} is given; it must be a number of seconds above 0")
    try:
        of_one = None if alone is None else tuple(shlex.split(alone))
    except ValueError as error:
        raise ValueError(f"alone: {alone!r} is given, and cannot be read ({error}); give it as '--tp 1'") from None
    job = Job(script, tuple(arguments or ()), number, steps, float64, dropout, of_one)

    def run() -> int:
        """Called by main, when the command line has been dealt with: under torchrun the script runs here."""
        from shardlab.same.answer import SAME
        from shardlab.same.ranks import judged, judged_under_torchrun

        said = judged(job, limit_s) if env is None else judged_under_torchrun(job, env, limit_s)
        code = 0 if said is None or said.word == SAME else DIFFERENT
        if said is not None and json:
            rows = json_text.loads(said.table.to_json(orient="records"))
            say_json({"answer": said.lines, "rows": rows})
        elif said is not None:
            say(answer_table(said.lines))
        if env is not None:  # the group that the script has left open may wait for others at exit
            sys.stdout.flush()
            os._exit(code)
        return code

    return run
