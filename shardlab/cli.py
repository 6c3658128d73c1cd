"""The terminal's face: ``shardlab compare``, ``plan``, ``bench``, ``report``, ``trace``, ``diff`` and ``doctor``.

Exit codes: 0 done; 1 a rank failed, or losses differ or are not finite; 2 bad input, said in one line; 130 interrupted.
Under torchrun every process runs this, and rank 0 alone prints.
"""

import contextlib
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from shardlab import __version__
from shardlab.cli_bench import bench
from shardlab.cli_plan import plan
from shardlab.cli_records import diff, print_result, report, trace

if TYPE_CHECKING:
    from shardlab.experiment import CompareConfig, Comparison
    from shardlab.experiment.run import Progress as StepDone

BAD_INPUT, INTERRUPTED = 2, 130
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sharded training, hand-written and measured.",
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


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """A ValueError inside is the user's to mend: one line, no traceback. Elsewhere it is a bug and stays one."""
    try:
        yield
    except ValueError as error:
        from shardlab.experiment import is_reporter

        if is_reporter():
            _complain(str(error))
        raise typer.Exit(BAD_INPUT) from None


@app.command()
def compare(
    strategies: Annotated[str, typer.Option(help="Comma-separated, in order.")] = "single,ddp,bucketed,zero1",
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
    bucket_mib: Annotated[float, typer.Option(help="Bucket capacity in MiB.")] = 1.0,
    partition: Annotated[
        str, typer.Option(help="ZeRO, FSDP: elements, round_robin, contiguous, balanced.")
    ] = "elements",
    sharding: Annotated[
        str, typer.Option(help="FSDP: full_shard, shard_grad_op, no_shard, hybrid_shard.")
    ] = "full_shard",
    shard_group: Annotated[
        int | None, typer.Option(help="hybrid_shard: ranks in a group; by default the most that divide.")
    ] = None,
    wrap: Annotated[str, typer.Option(help="FSDP units: block, root, or a number of parameters.")] = "block",
    prefetch: Annotated[int, typer.Option(help="FSDP: units gathered ahead.")] = 1,
    layout: Annotated[str, typer.Option(help="FSDP: flat or dim0.")] = "flat",
    precision: Annotated[str, typer.Option(help="ZeRO and FSDP: full, bf16 or fp16.")] = "full",
    offload: Annotated[str, typer.Option(help="FSDP, into host memory: none, parameters, all.")] = "none",
    replicate_below: Annotated[int, typer.Option(help="FSDP: smaller parameters stay replicated.")] = 0,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; they divide the ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="With --tp: divide the sequence too.")
    ] = False,
    link: Annotated[str | None, typer.Option(help="Emulate a link, for example 10Gbps,50us.")] = None,
    transport: Annotated[
        str | None, typer.Option(help="shared_memory or gloo; by default the first that the ranks can use.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="A collective that takes longer ends the run.")] = 300.0,
) -> None:
    """Train one model with several strategies on real ranks; compare losses, memory, communication and time."""
    from shardlab import experiment  # torch takes 1.5 s to import, and --help needs none of it

    directory = out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    with bad_input():
        config = experiment.CompareConfig(
            strategies=tuple(name.strip() for name in strategies.split(",") if name.strip()),
            ranks=ranks, steps=steps, model=model, text=text, batch=batch, seq_len=seq_len, accumulation=accumulation,
            dtype=dtype, device=device, seed=seed, learning_rate=learning_rate, clip=clip, bucket_mib=bucket_mib,
            partition=partition, sharding=sharding, shard_group=shard_group, wrap=wrap, prefetch=prefetch,
            layout=layout, precision=precision, offload=offload, replicate_below=replicate_below, tp=tp,
            sequence_parallel=sequence_parallel, link=link, transport=transport, timeout_s=timeout_s,
        )  # fmt: skip
        if experiment.is_reporter():
            experiment.claim(directory)
    comparison = _with_progress(config, directory)
    if experiment.is_reporter():
        print_result(comparison, config, experiment.write_report(comparison, config))
    if not comparison.losses_equal:
        raise typer.Exit(1)


for _command in (plan, bench, report, trace, diff):
    app.command()(bad_input()(_command))


@app.command()
def doctor() -> None:
    """Say what this machine has, and what that means for ranks."""
    from shardlab.launch.doctor import doctor as examine

    table = Table("check", "value", "verdict")
    for row in examine():
        table.add_row(*(str(part) for part in row))
    Console().print(table)


def main() -> None:
    """Entry point: what a user got wrong is one line; a rank's failure is its traceback; else Python's own."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except Exception as error:
        if (usage := getattr(error, "format_message", None)) is not None:  # Click's; newer Typers have their own Click
            _complain(_with_commands(usage()))
            sys.exit(BAD_INPUT)
        if not _is_rank_failure(error):
            raise
        _complain(str(error))
        sys.exit(1)


def _with_commands(message: str) -> str:
    """A command that does not exist is answered with those that do."""
    if not message.startswith("No such command"):
        return message
    names = (info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands)
    return f"{message} Commands: {', '.join(names)}."


def _is_rank_failure(error: Exception) -> bool:
    """Whether the message already holds the traceback of the rank that failed; the parent's own says nothing."""
    if not isinstance(error, RuntimeError):
        return False
    from shardlab.launch import RankError, RankHang

    return isinstance(error, RankError | RankHang)


def _complain(text: str) -> None:
    if text:
        Console(stderr=True, highlight=False, soft_wrap=True).print("[bold red]error:[/]", Text(text))


class _Seconds(ProgressColumn):
    """Time of a strategy so far; it stands still when the strategy is done."""

    def render(self, task: Task) -> Text:
        """For example ``4.2 s``."""
        elapsed = task.finished_time if task.finished else task.elapsed
        return Text("waits" if elapsed is None else f"{elapsed:.1f} s", style="progress.elapsed", justify="right")


class _Bars:
    """A bar for each strategy; one starts when the one before it is done."""

    def __init__(self, config: "CompareConfig", console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            _Seconds(),
        )
        self.progress = Progress(*columns, console=console)
        self._order = list(config.strategies)
        self._tasks: dict[str, TaskID] = {
            name: self.progress.add_task(name, total=config.steps, loss="", start=name == self._order[0])
            for name in self._order
        }

    def advance(self, done: "StepDone") -> None:
        """Rank 0 has finished a step."""
        task = self._tasks[done.strategy]
        self.progress.update(task, completed=done.step + 1, loss=f"loss {done.loss:.4f}")
        following = self._order.index(done.strategy) + 1
        if self.progress.tasks[task].finished and following < len(self._order):
            self.progress.start_task(self._tasks[self._order[following]])


def _with_progress(config: "CompareConfig", directory: Path) -> "Comparison":
    from shardlab import experiment

    console = Console(stderr=True, quiet=not experiment.is_reporter(), highlight=False)
    console.print(
        f"{_count(config.ranks, 'rank')}, {_count(config.steps, 'step')} of {config.model} each; "
        f"records go to {directory}",
        soft_wrap=True,
    )
    bars = _Bars(config, console)
    try:
        with bars.progress:
            return experiment.compare(config, directory, on_progress=bars.advance)
    except KeyboardInterrupt:
        console.print(f"interrupted: the ranks are gone; the records so far are in {directory}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
