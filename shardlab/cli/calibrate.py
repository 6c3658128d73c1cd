"""``shardlab calibrate``: what this machine's ranks, or its card, take, for forecasts of time."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardlab.cli.console import answer_table, names_in, progress_bar, refuse_others

CALIBRATION, CARD, LIMIT_S = Path("machine.json"), Path("card.json"), 600.0


def calibrate(
    context: typer.Context,
    ranks: Annotated[
        str, typer.Option(help="Comma-separated: how many ranks at once; by default 2,4, with --quick 2.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The file: by default machine.json, of a card card.json.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and readings: sooner, and less sure.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which no further part is begun.")] = LIMIT_S,
    device: Annotated[str, typer.Option(help="cpu: ranks of this machine. cuda: its first GPU.")] = "cpu",
) -> None:
    """Measure what this machine takes for operations and messages, for forecasts of time; leave it alone meanwhile.

    Parts that are measured are kept beside the file until it is whole: after an interrupt or the limit, go on by the
    same command. With --device cuda one card is measured: shardlab forecast and search take the file as --gpu.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r} is not one of cpu, cuda")
    out = out or (CALIBRATION if device == "cpu" else CARD)
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"out: {out} cannot be written; name a file in an existing directory")
    if device == "cuda":
        refuse_others(context, ("out", "device"), "of ranks on the CPU, and not of a card")
        return _calibrate_card(out)
    ranks = ranks or ("2" if quick else "2,4")
    counts = list(dict.fromkeys(int(text) if text.isdigit() else 0 for text in names_in(ranks)))
    if not counts or min(counts) < 2:
        raise ValueError(f"ranks: {ranks!r} is given; give numbers from 2 on, such as 2,4")
    if not limit > 0:
        raise ValueError(f"limit: {limit:g} is given; give seconds above 0")
    return _calibrate_ranks(counts, out, limit, quick=quick)


def _calibrate_ranks(counts: list[int], out: Path, limit: float, *, quick: bool) -> None:
    from shardlab.bench.calibrate import Calibration

    parts = out.with_name(f"{out.name}.part")
    calibration, console = Calibration(counts, is_quick=quick, path=parts), Console(highlight=False)
    total, missing = len(calibration.parts), len(calibration.missing)
    if missing < total:
        said = f"{total - missing} of {total} parts were measured before; remove {parts} to measure them again"
        console.print(said, soft_wrap=True)
    with progress_bar(missing) as advance, suppress(KeyboardInterrupt):
        calibration.measure(advance, limit)
    if left := len(calibration.missing):
        said = f"Stopped: {total - left} of {total} parts are measured, and kept in {parts}; the same command goes on"
        console.print(said, soft_wrap=True)
        raise typer.Exit(1)
    calibration.machine().write(out)
    calibration.kept.drop()
    console.print(f"Calibration: {out}", soft_wrap=True)


def _calibrate_card(out: Path) -> None:
    from shardlab.bench.calibrate_card import CudaCard, calibrate_card, parts

    device, console = CudaCard(), Console(highlight=False)
    with progress_bar(len([*parts(device)]), first="the card") as advance:
        found = calibrate_card(device, advance)
    gpu = found.gpu
    gpu.write(out)
    reached = {f"{name} products": share for name, share in gpu.product_fractions.items()}
    reached |= {"attention": gpu.attention_fraction, "memory": gpu.memory_fraction}
    host = ", ".join(f"{1e6 * seconds:.2g} us {kind}" for kind, seconds in gpu.host_seconds.items())
    console.print(answer_table([
        ("CARD", f"{gpu.name}: {gpu.source}"),
        ("REACHES", ", ".join(f"{share:.0%} of the peak in {name}" for name, share in reached.items())),
        ("A KERNEL", f"costs the host {host}"),
        *(("NOT MEASURED", f"{kind} launches, for which what is usual is taken: {why}") for kind, why in
          found.failed.items()),
        ("SHAPES", f"products of single shapes are up to {found.worst_product:.0%} from what they all say"),
        ("NEXT", f"shardlab forecast --config config.json --ranks 1 --gpu {out}"),
    ]))  # fmt: skip
