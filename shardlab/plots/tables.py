"""A column of a table as text: one number of decimals in a column, so that digits stand under digits."""

import math

import pandas as pd

from shardlab.plots.units import NONE, significant

DIGITS = 4
WIDEST_RATIO = 1e5


def column_text(column: pd.Series) -> list[str]:
    """The cells as text.

    Integers get thousands separators. Floats share the number of decimals that gives the largest four significant
    digits; where they span more than five decades each gets three digits of its own. Missing values are a dash.
    """
    values = [None if pd.isna(value) else value for value in column.tolist()]
    sizes = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value) and value != 0]
    even = bool(sizes) and max(sizes) / min(sizes) < WIDEST_RATIO and max(sizes) >= 1e-4
    decimals = max(DIGITS - 1 - math.floor(math.log10(max(sizes))), 0) if even else None
    return [_cell(value, decimals) for value in values]


def _cell(value: object, decimals: int | None) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return significant(value) if decimals is None else f"{value:,.{decimals}f}"
    return str(value)
