"""Rows of the tables made by hand, whose answers follow from arithmetic."""

import random

import pandas as pd

from shardlab.records.tables import COLLECTIVES, SPANS, STEPS

NAN = float("nan")
KEYS = {"run": "a", "source": "measured", "rank": 0, "step": 0}
# Of table ``steps``.
STEP = {"loss": 1.0, "grad_norm": NAN, "learning_rate": 0.1, "step_us": 1.0, "exposed_comm_us": NAN, "overlap": NAN}
STEP |= {"peak_bytes": None, "wire_bytes": 0.0, "num_tokens": 1, "traced_memory": False}


def collective(rank, seq, times, wait=(NAN, NAN), **columns):
    """A row; ``times`` are issue, start and end."""
    row = {**KEYS, "rank": rank, "seq": seq, "axis": "data", "op": "all_reduce", "tag": f"bucket {seq}"}
    row |= {"phase": "backward", "dtype": "float32", "numel": 250, "bytes": 1000, "wire_bytes": 1000.0, "group_size": 2}
    row |= {"transport": "gloo", **dict(zip(("issue_us", "start_us", "end_us"), times, strict=True))}
    return row | {"wait_start_us": wait[0], "wait_end_us": wait[1]} | columns


def span(rank, unit, kind, start, end, **columns):
    return {**KEYS, "rank": rank, "unit": unit, "kind": kind, "start_us": start, "end_us": end} | columns


def collectives(*rows):
    return COLLECTIVES.frame(list(rows))


def spans(*rows):
    return SPANS.frame(list(rows))


def timed(moved, worked):
    """Both, and the steps: each lasts on its rank from the first span to the last span or wait."""
    training = moved[moved["phase"] != "metrics"].rename(columns={"issue_us": "from_us", "wait_end_us": "until_us"})
    times = pd.concat([worked.rename(columns={"start_us": "from_us", "end_us": "until_us"}), training])
    rows = []
    for (run, source, rank, step), own in times.groupby(["run", "source", "rank", "step"]):
        begin, end = own["from_us"].min(), own["until_us"].max()
        keys = {"run": run, "source": source, "rank": rank, "step": step}
        rows.append(STEP | keys | {"start_us": begin, "step_us": end - begin})
    return moved, worked, STEPS.frame(rows)


def two_ranks():
    """Backward in two halves with a bucket after each; rank 1 is 20 us late with the first and waits for nobody.

    rank 0   [0 ─ half 1 ─ 40][40 ─ half 2 ─ 80][wait ─ 110][130 in all: 115 ─ optimizer ─ 130]
    rank 1   [0 ──── half 1 ──── 60][60 ─ half 2 ─ 100][wait ─ 110][115 ─ optimizer ─ 125]
    bucket 0 issued at 40 and 60, so it moves from 60 to 90; bucket 1 is issued at 80 and 100 and moves from 100 to 110.
    """
    moved = collectives(
        collective(0, 0, (40, 40, 90), (80, 90)),
        collective(0, 1, (80, 90, 110), (90, 110)),
        collective(1, 0, (60, 60, 90), (100, 100)),
        collective(1, 1, (100, 100, 110), (100, 110)),
    )
    worked = spans(
        span(0, "model", "backward", 0, 80),
        span(0, "half 1", "backward", 0, 40),
        span(0, "half 2", "backward", 40, 80),
        span(0, "model", "optimizer", 115, 130),
        span(1, "model", "backward", 0, 100),
        span(1, "half 1", "backward", 0, 60),
        span(1, "half 2", "backward", 60, 100),
        span(1, "model", "optimizer", 115, 125),
    )
    return moved, worked


def together(*frames):
    return pd.concat(frames, ignore_index=True)


def random_step(seed, slow=1.0, ranks=2, buckets=4, apart=3.0):
    """Buckets of one backward, sent one after another, each from when the last rank has it; waits come at the end.

    ``apart``: by how much at most the ranks' ends of a bucket differ.
    """
    draw = random.Random(seed)
    ready = [sorted(slow * draw.uniform(0, 100) for _ in range(buckets)) for _ in range(ranks)]
    rows, free, waited = [], [0.0] * ranks, [slow * 100.0] * ranks
    for seq in range(buckets):
        starts = [max(ready[rank][seq], free[rank]) for rank in range(ranks)]
        took = slow * draw.uniform(5, 60)
        for rank in range(ranks):
            free[rank] = max(starts) + took + slow * draw.uniform(0, apart)
            before, waited[rank] = waited[rank], max(waited[rank], free[rank])
            times = (ready[rank][seq], starts[rank], free[rank])
            rows.append(collective(rank, seq, times, (before, waited[rank])))
    halves = [(rank, half) for rank in range(ranks) for half in (0, 1)]
    work = [span(rank, f"block {half}", "backward", slow * 50 * half, slow * 50 * (half + 1)) for rank, half in halves]
    end = max(waited) + slow
    work += [span(rank, "model", "optimizer", end, end + slow) for rank in range(ranks)]
    return collectives(*rows), spans(*work)
