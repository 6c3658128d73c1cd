"""Rows of the tables made by hand, whose answers follow from arithmetic."""

import pandas as pd

from shardlab.tables import COLLECTIVES, SPANS

NAN = float("nan")
KEYS = {"run": "a", "source": "measured", "rank": 0, "step": 0}


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
