"""What a recorder would have written, made by hand."""

import math
import os

import pandas as pd

from shardlab.records.journal import END

WORKED_OUT = {"exposed_comm_us", "overlap", "wire_bytes"}  # of the steps, by whoever reads


def heard(rows):
    """Rows of one table as a recorder hands them on: columns, times in nanoseconds."""
    left_out = WORKED_OUT if rows and "loss" in rows[0] else ()
    names = [name for name in (rows[0] if rows else ()) if name not in left_out]
    return dict(_column(name, [row[name] for row in rows]) for name in names)


def rows_of(table, rank, step):
    """The rows of one step in a DataFrame, as plain Python."""
    rows = table[(table["rank"] == rank) & (table["step"] == step)].astype("object").to_dict("records")
    return [{name: None if pd.isna(value) else value for name, value in row.items()} for row in rows]


def add(path, data):
    """Append bytes to a journal as its writer would."""
    with path.open("r+b") as file:
        (end,) = END.unpack(os.pread(file.fileno(), END.size, 0))
        os.pwrite(file.fileno(), data, end)
        os.pwrite(file.fileno(), END.pack(end + len(data)), 0)


def _column(name, values):
    if not name.endswith("_us"):
        return name, values
    return name.removesuffix("_us") + "_ns", [
        math.nan if value is None or math.isnan(value) else round(1e3 * value) for value in values
    ]
