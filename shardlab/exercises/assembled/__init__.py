"""The ladder's end: engines made of the learner's parts train the small GPT, beside ours and torch's.

    assemble(buckets_assign, collectives_ring_all_reduce, zero1_owners, clip_global_norm, zero3_forward, fsdp_units)

Each function has the name of its exercise. A strategy of which a part is missing, raises or hangs says so in its row.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.exercises.assembled.engines import BUCKET_BYTES, MAX_NORM, Assembled, Parts
from shardlab.exercises.assembled.train import ENGINES, ROWS, SEED, SMALL_GPT, Trained, train_on_rank
from shardlab.exercises.exercise import Function
from shardlab.exercises.judge import TIMEOUT_S, why_not_ready
from shardlab.exercises.ladder import LADDER
from shardlab.exercises.values import told_apart
from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.comparison import PRELOAD, Comparison
from shardlab.experiment.summary import tolerance_of
from shardlab.launch import RankDied, RankError, RankHang, RankPool

TORCHS = {"torch_ddp": "ddp", "torch_zero1": "zero1", "torch_fsdp2": "fsdp"}
WHOSE = ("", "yours", "ours", "torch's")
DTYPES = {  # a row without a result has no numbers
    "strategy": "object", "whose": "object", "last loss": "Float64", "as one process": "boolean", "messages": "Int64",
    "bytes sent": "Int64", "bytes at rest": "Int64", "why not": "object",
}  # fmt: skip


def assemble(*functions: Function, steps: int = 3, ranks: int = 2, pool: RankPool | None = None) -> pd.DataFrame:
    """Train the small GPT with engines made of ``functions``, and set them beside ours and torch's.

    Args:
        functions: the learner's, each with the name of its exercise, as ``zero1_owners``.
        steps: optimizer steps.
        ranks: 1, 2 or 4, which divide the rows of a step.
        pool: warm ranks, as many; None starts ranks and ends them.

    Returns:
        One row for each engine: the strategy and whose it is, the last loss, whether every loss is that of one process,
        messages and bytes that rank 0 sends in a step, bytes that it holds between two steps (parameters, gradients,
        optimizer state); and why a row is empty or wrong.

    Raises:
        ValueError: a function has not the name of an exercise, the ranks do not divide the rows, or the pool has
            another number of them, or GPUs.
    """
    parts = named_parts(functions)
    if ranks not in (1, 2, ROWS):
        raise ValueError(f"ranks: {ranks} was given; {ROWS} rows divide among 1, 2 or {ROWS}")
    if pool is None:
        with RankPool(ranks, device="cpu", timeout_s=TIMEOUT_S, preload=PRELOAD, notice_s=None) as own_pool:
            return _assemble(parts, steps, own_pool)
    if pool.world_size != ranks:
        raise ValueError(f"pool: {pool.world_size} ranks, but ranks is {ranks}; give the same number")
    if pool.placement.device_type != "cpu":
        raise ValueError("pool: its ranks are on GPUs; the parts train on the CPU, so make it with device='cpu'")
    return _assemble(parts, steps, pool)


def _assemble(parts: Parts, steps: int, pool: RankPool) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as folder:
        others = compare(_config(steps, pool.world_size), Path(folder) / "others", pool=pool)
    wanted = others.records.steps.query("run == 'single'").groupby("step")["loss"].first().tolist()
    own = [row_of(engine, parts, pool, wanted) for engine in ENGINES.values()]
    order = ["single", *ENGINES]
    rows = sorted([*own, *_rows(others)], key=lambda row: (order.index(row[0]), WHOSE.index(row[1])))
    return pd.DataFrame(rows, columns=list(DTYPES)).astype(DTYPES)


def named_parts(functions: Sequence[Function]) -> Parts:
    """The functions by their names.

    Raises:
        ValueError: see ``assemble``.
    """
    known = [exercise.function_name for exercise in LADDER]
    for function in functions:
        if (name := getattr(function, "__name__", repr(function))) not in known:
            raise ValueError(f"functions: {name} is not the name of an exercise; there are {', '.join(known)}")
    return {function.__name__: function for function in functions}


def _config(steps: int, ranks: int) -> CompareConfig:
    return CompareConfig(
        strategies=("single", *ENGINES, *TORCHS), ranks=ranks, steps=steps, workload=SMALL_GPT, seed=SEED,
        clip=MAX_NORM, bucket_mib=BUCKET_BYTES / 2**20, device="cpu",
    )  # fmt: skip


def row_of(engine: type[Assembled], parts: Parts, pool: RankPool, wanted: list[float]) -> tuple[Any, ...]:
    """The row of one strategy of the learner's; ``wanted``: the losses of one process, step by step."""
    begin = (engine.name, "yours")
    if missing := [name for name in engine.needs if name not in parts]:
        return (*begin, *(None,) * 5, f"{' and '.join(missing)} missing")
    if not_ready := why_not_ready(pool):
        return (*begin, *(None,) * 5, not_ready)
    try:
        found: list[Trained] = pool.run(train_on_rank, engine.name, parts, pool.world_size, len(wanted))
    except RankDied as error:
        return (*begin, *(None,) * 5, f"the process of rank {error.rank} ended")
    except (RankError, RankHang, TypeError) as error:
        return (*begin, *(None,) * 5, str(error).partition("\n")[0])
    losses = [sum(of_step) / len(found) for of_step in zip(*(of_rank.losses for of_rank in found), strict=True)]
    differs = [step for step, pair in enumerate(zip(losses, wanted, strict=True)) if not _is_equal(*pair)]
    why = ""
    if differs:
        found_loss, wanted_loss = told_apart(losses[differs[0]], wanted[differs[0]])
        why = f"the loss of step {differs[0]} is {found_loss}, not {wanted_loss}"
    return (*begin, losses[-1], not differs, found[0].messages, round(found[0].sent_bytes), found[0].rest_bytes, why)


def _is_equal(loss: float, wanted: float) -> bool:
    return abs(loss - wanted) <= tolerance_of("float64")  # False for NaN


def _rows(others: Comparison) -> Iterator[tuple[Any, ...]]:
    """Of our engines, torch's, and the single process."""
    sent = others.records.collectives.query("rank == 0 and phase != 'metrics'")
    sent = sent[sent["step"] == sent["step"].max()]
    messages, num_bytes = sent.groupby("run").size(), sent.groupby("run")["wire_bytes"].sum()
    for _, row in others.summary.iterrows():
        run = row["strategy"]
        whose = "" if run == "single" else "torch's" if run in TORCHS else "ours"
        at_rest = row["parameter_bytes"] + row["gradient_bytes"] + row["optimizer_bytes"]
        counts = int(messages.get(run, 0)), round(num_bytes.get(run, 0.0)), int(at_rest)
        yield (TORCHS.get(run, run), whose, row["loss_last"], bool(row["losses_equal"]), *counts, "")
