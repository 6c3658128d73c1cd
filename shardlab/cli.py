"""The terminal's face: ``shardlab compare`` and ``shardlab doctor``.

Exit codes: 0 done; 1 a rank failed, or losses differ; 2 bad input; 130 interrupted.
"""

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from shardlab.experiment import CompareConfig, Comparison
    from shardlab.experiment.run import Progress as StepDone

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Sharded training, hand-written and measured.")
DEFAULTS = {"strategies": "single,ddp,bucketed,zero1"}


@app.command()
def compare(
    strategies: Annotated[str, typer.Option(help="Comma-separated, in order.")] = DEFAULTS["strategies"],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    model: Annotated[str, typer.Option(help="Name of a model, for example gpt-1m, gpt-30m, mlp.")] = "gpt-1m",
    text: Annotated[str, typer.Option(help="'stdlib', 'grammar' or a file.")] = "stdlib",
    out: Annotated[Path | None, typer.Option(help="A new or empty directory; by default runs/DATE.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Global batch in sequences; by default 4 a rank.")] = None,
    seq_len: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 64,
    accumulation: Annotated[int, typer.Option(help="Micro-batches a step.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of model and data.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    clip: Annotated[float | None, typer.Option(help="Maximal global gradient norm; none by default.")] = None,
    bucket_mib: Annotated[float, typer.Option(help="Bucket capacity in MiB.")] = 25.0,
    partition: Annotated[str, typer.Option(help="zero1: elements, round_robin, contiguous, balanced.")] = "elements",
    link: Annotated[str | None, typer.Option(help="Emulate a link, for example 10Gbps,50us.")] = None,
    timeout_s: Annotated[float, typer.Option(help="A collective that takes longer ends the run.")] = 300.0,
) -> None:
    """Train one model with several strategies on real ranks; compare losses, memory, communication and time."""
    from shardlab import experiment  # torch takes 1.5 s to import, and --help needs none of it
    from shardlab.experiment.compare import check_empty

    directory = out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    config = experiment.CompareConfig(
        strategies=tuple(name.strip() for name in strategies.split(",") if name.strip()),
        ranks=ranks, steps=steps, model=model, text=text, batch=batch, seq_len=seq_len, accumulation=accumulation,
        dtype=dtype, device=device, seed=seed, learning_rate=learning_rate, clip=clip, bucket_mib=bucket_mib,
        partition=partition, link=link, timeout_s=timeout_s,
    )  # fmt: skip
    check_empty(directory)
    comparison = _with_progress(config, directory)
    report = experiment.write_report(comparison, config)
    _print_result(comparison, report)
    if not comparison.losses_equal:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Say what this machine has, and what that means for ranks."""
    from shardlab.launch.doctor import doctor as examine

    table = Table("check", "value", "verdict")
    for row in examine():
        table.add_row(*(str(part) for part in row))
    Console().print(table)


def main() -> None:
    """Entry point: errors become one line (or a rank's traceback) and an exit code."""
    try:
        app()
    except ValueError as error:
        _complain(str(error), 2)
    except RuntimeError as error:  # RankError, RankDied, RankHang carry their rank's traceback in the message
        _complain(str(error), 1)


def _complain(text: str, exit_code: int) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print("[bold red]error[/]:", Text(text))
    sys.exit(exit_code)


def _with_progress(config: "CompareConfig", directory: Path) -> "Comparison":
    from shardlab.experiment import compare as run_comparison

    columns = (
        TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"), TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    console.print(f"{config.model} on {config.ranks} ranks, {config.steps} steps each; records go to {directory}")
    with Progress(*columns, console=console) as bars:
        tasks = {name: bars.add_task(name, total=config.steps, loss="", start=False) for name in config.strategies}

        def advance(progress: "StepDone") -> None:
            task = tasks[progress.strategy]
            if progress.step == 0:
                bars.start_task(task)
            bars.update(task, completed=progress.step + 1, loss=f"loss {progress.loss:.4f}")

        try:
            return run_comparison(config, directory, on_progress=advance)
        except KeyboardInterrupt:
            console.print(f"interrupted: the ranks are gone; the records so far are in {directory}")
            raise typer.Exit(130) from None


def _print_result(comparison: "Comparison", report: Path) -> None:
    from shardlab.experiment.report import readable_summary, verdict
    from shardlab.plots.tables import column_text

    shown = readable_summary(comparison.summary)
    table = Table()
    for name in shown.columns:
        numeric = pd.api.types.is_numeric_dtype(shown[name])
        table.add_column(name.replace(" (", "\n("), justify="right" if numeric else "left", overflow="fold")
    texts = [column_text(shown[name]) for name in shown.columns]
    for row in zip(*texts, strict=True):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(verdict(comparison))
    console.print(f"Report: {report}", soft_wrap=True)
