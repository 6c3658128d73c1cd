"""Four synthetic runs (single, ddp, bucketed, zero1), 4 ranks, 10 steps, whose figures follow from the formulas."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from shardlab.records.tables import COLLECTIVES, MEMORY, SHARDS, SPANS, STEPS
from tests.analysis.hand_made import collective

NUM_RANKS = 4
NUM_STEPS = 10
NUMEL = 1_200_000
NUM_BLOCKS = 4
RUNS = ("single", "ddp", "bucketed", "zero1")
BYTES_BY_ROLE = {
    run: {"parameter": 4 * NUMEL, "gradient": 4 * NUMEL, "optimizer_state": 8 * NUMEL // parts}
    for run, parts in zip(RUNS, (1, 1, 1, NUM_RANKS), strict=True)
}


@dataclass(frozen=True)
class Records:
    """The five tables of all runs."""

    collectives: pd.DataFrame
    spans: pd.DataFrame
    memory: pd.DataFrame
    shards: pd.DataFrame
    steps: pd.DataFrame


def trace(figure, name):
    return next(part for part in figure.data if part.name == name)


def ranks_of(run):
    return 1 if run == "single" else NUM_RANKS


def every_step():
    return [(run, rank, step) for run in RUNS for rank in range(ranks_of(run)) for step in range(NUM_STEPS)]


def keys(run, rank, step):
    return {"run": run, "source": "measured", "rank": rank, "step": step}


def step_spans(run, rank, step):
    """Root, four blocks and a child in each, forward then backward; then the optimizer. Microseconds."""
    begin = step * 100_000 + 200 * rank
    spans = []

    def add(unit, kind, start, length):
        spans.append({**keys(run, rank, step), "unit": unit, "kind": kind, "start_us": start, "end_us": start + length})

    add("data", "data", begin, 1_000)
    for kind, start, block in (("forward", begin + 1_000, 4_000), ("backward", begin + 18_000, 8_000)):
        add("gpt", kind, start, block * NUM_BLOCKS)
        order = range(NUM_BLOCKS) if kind == "forward" else reversed(range(NUM_BLOCKS))
        for place, index in enumerate(order):
            add(f"blocks.{index}", kind, start + place * block, block * 0.97)
            add(f"blocks.{index}.mlp", kind, start + place * block, block / 2)
    length = 6_000 if run != "zero1" else 1_500
    add("optimizer", "optimizer", begin + 60_000, length)
    return spans


def moved(run, rank, step, seq, op, numel, tag, times):
    return collective(
        rank, seq, times, (max(times[0], times[2] - 500), times[2]), run=run, step=step, op=op, tag=tag, numel=numel,
        phase="step" if op == "all_gather" else "backward", bytes=4 * numel, group_size=NUM_RANKS,
        wire_bytes=(2 if op == "all_reduce" else 1) * 4 * numel * (NUM_RANKS - 1) / NUM_RANKS,
    )  # fmt: skip


def step_collectives(run, rank, step):
    """ddp: everything after backward; bucketed and zero1: four buckets from the middle of backward on."""
    begin = step * 100_000 + 200 * rank
    if run == "single":
        return []
    rows, op = [], "reduce_scatter" if run == "zero1" else "all_reduce"
    for index in range(NUM_BLOCKS):
        issue = begin + 50_000 if run == "ddp" else begin + 18_000 + 8_000 * (index + 1)
        start, length = (begin + 50_000 + 2_500 * index, 2_500) if run == "ddp" else (issue + 300, 6_000)
        times = (issue, start, start + length)
        tag = f"gradients of bucket {index}"
        rows.append(moved(run, rank, step, 8 * step + index, op, NUMEL // NUM_BLOCKS, tag, times))
    if run == "zero1":
        times = (begin + 61_500, begin + 61_600, begin + 66_000)
        rows.append(moved(run, rank, step, 8 * step + 4, "all_gather", NUMEL, "parameters", times))
    return rows


def memory_rows(run, rank, step):
    rows = []
    for where, extra in (("rest", {}), ("peak", {"activation": 9_000_000 + 1_000 * rank + 10 * step})):
        for role, size in {**BYTES_BY_ROLE[run], **extra}.items():
            row = {"time_us": 100_000.0 * step, "phase": "step", "where": where, "role": role, "bytes": size}
            rows.append({**keys(run, rank, step), **row, **dict.fromkeys(MEMORY.column_names[-5:], pd.NA)})
    return rows


def step_row(run, rank, step):
    loss = 5.5 * np.exp(-step / 8) + 1 + (0 if run in ("single", "ddp") else 1e-8 * (1 + step % 3))
    step_us = {"single": 90_000, "ddp": 70_000, "bucketed": 66_000, "zero1": 68_000}[run] + 900.0 * (step * 7 % 10)
    return {
        **keys(run, rank, step), "loss": loss, "grad_norm": 1.0, "learning_rate": 3e-4, "step_us": step_us,
        "exposed_comm_us": np.nan, "overlap": np.nan, "peak_bytes": pd.NA, "wire_bytes": 0.0, "num_tokens": 512,
        "traced_memory": step == 0,
    }  # fmt: skip


PARAMETERS = {"embed.weight": (3000, 100), "blocks.0.w": (300, 1000), "blocks.1.w": (599, 1000), "norm": (1000,)}


def shard_rows(run, rank):
    """Every rank holds whole parameters; the optimizer state of zero1 is cut in equal element ranges."""
    rows, offset, share = [], 0, NUMEL // NUM_RANKS
    for name, shape in PARAMETERS.items():
        numel = int(np.prod(shape))
        low, high = (rank * share, (rank + 1) * share) if run == "zero1" else (0, NUMEL)
        pieces = {"parameter": (0, numel), "optimizer_state": (max(low - offset, 0), min(high - offset, numel))}
        for role, (start, stop) in pieces.items():
            if stop > start:
                piece = {"parameter": name, "shape": "x".join(map(str, shape)), "role": role, "bucket": 0}
                rows.append({**keys(run, rank, 0), **piece, "start": start, "stop": stop, "bytes": 4 * (stop - start)})
        offset += numel
    return rows


def make_records():
    return Records(
        COLLECTIVES.frame([row for place in every_step() for row in step_collectives(*place)]),
        SPANS.frame([row for place in every_step() for row in step_spans(*place)]),
        MEMORY.frame([row for place in every_step() for row in memory_rows(*place)]),
        SHARDS.frame([row for run in RUNS for rank in range(ranks_of(run)) for row in shard_rows(run, rank)]),
        STEPS.frame([step_row(*place) for place in every_step()]),
    )
