"""Text for people: numbers with units, lists, columns of tables, and notes on where numbers come from."""

import math

import pandas as pd

NONE = "–"
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
TIME_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))

Units = tuple[tuple[float, str], ...]
CELL_DIGITS = 4
NAME_LETTERS = 30
WIDEST_RATIO = 1e5
SOURCE_NOTES = {
    "emulated": "emulated link: communication was delayed on purpose",
    "predicted": "predicted, not run",
}


def format_bytes(num_bytes: float | None) -> str:
    """Decimal bytes: 12_345_678 is '12.3 MB'; a missing value (None, NA, NaN) is a dash."""
    return _format(num_bytes, BYTE_UNITS)


def format_us(time_us: float) -> str:
    """Microseconds: 12_345 is '12.3 ms'."""
    return _format(time_us, TIME_UNITS)


def format_count(count: float) -> str:
    """A count, for example of elements: 1_234_567 is '1.23 M'."""
    return _format(count, COUNT_UNITS)


def format_percent(share: float) -> str:
    """A fraction as a percentage: 0.4567 is '46 %', 0.0321 is '3.2 %'."""
    if math.isnan(share):
        return NONE
    whole = abs(share) >= 0.0995 or share == 0
    return f"{100 * share:.0f} %" if whole else f"{100 * share:.1f} %"


def shortened(name: str) -> str:
    """A name without its middle, if it is long: the ends tell names of modules apart."""
    return name if len(name) <= NAME_LETTERS else f"{name[: NAME_LETTERS // 3]}…{name[-(NAME_LETTERS // 2) :]}"


def tick(text: str) -> str:
    """A formatted number without trailing zeros, for the ticks of an axis: '1.00 kB' is '1 kB'."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}".rstrip()


def byte_scale(largest: float) -> tuple[float, str]:
    """(divisor, unit) in which an axis up to ``largest`` bytes reads well."""
    return scale(largest, BYTE_UNITS)


def scale(largest: float, units: Units) -> tuple[float, str]:
    """The largest unit that ``largest`` reaches, else the smallest, as (divisor, name)."""
    return next(((divisor, name) for divisor, name in units if abs(largest) >= divisor), units[-1])


def significant(value: float) -> str:
    """Rounded to three digits, never in scientific notation between 1e-4 and 1e6: '0.0123', '1.20', '417'."""
    if not math.isfinite(value):
        return NONE if math.isnan(value) else str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:.{max(2 - exponent, 0)}f}" if -5 < exponent < 6 else f"{value:.2e}"


def _format(value: float | None, units: Units) -> str:
    if value is None or pd.isna(value):
        return NONE
    # 999.96 kB rounds to 1000 kB: choose the unit after rounding, so that it reads 1.00 MB
    rounded = float(f"{value:.2e}")
    divisor, name = scale(rounded, units)
    exact = divisor == 1.0 and float(value).is_integer()
    number = f"{int(value)}" if exact else significant(value / divisor)
    return f"{number} {name}".rstrip()


def column_text(column: pd.Series) -> list[str]:
    """The cells as text.

    Integers get thousands separators. Floats share a number of decimals, such that the largest has four significant
    digits, or none if all are whole; if they span more than five decades, each has three significant digits. Missing
    values are a dash.
    """
    values = [None if pd.isna(value) else value for value in column.tolist()]
    sizes = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value) and value != 0]
    even = bool(sizes) and max(sizes) / min(sizes) < WIDEST_RATIO and max(sizes) >= 1e-4
    digits = 1 if all(size.is_integer() for size in sizes) else CELL_DIGITS
    decimals = max(digits - 1 - math.floor(math.log10(max(sizes))), 0) if even else None
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


def source_note(frame: pd.DataFrame) -> str:
    """A note on emulated or predicted rows; empty if all are measured."""
    notes = []
    for source, note in SOURCE_NOTES.items():
        runs = frame.loc[frame["source"] == source, "run"]
        names = "" if len(runs) == len(frame) else f" ({', '.join(str(run) for run in runs.drop_duplicates())})"
        notes += [note + names] if len(runs) else []
    return "; ".join(notes)


def subtitle(frame: pd.DataFrame, text: str = "") -> str:
    """``text`` after the note on the source, if any: a narrow figure cuts off the end of the line."""
    return joined(source_note(frame), text)


def joined(*parts: str) -> str:
    """The parts of a subtitle that are not empty."""
    return " · ".join(part for part in parts if part)


def averaged(frame: pd.DataFrame, average: str) -> str:
    """What the values are averages of: 'median over 2 ranks and 5 steps'; a single rank or step by its number.

    Args:
        frame: rows with ``label``, ``step`` and optionally ``rank``.
        average: 'mean' or 'median'.
    """
    several, single = [], []
    for column in ("rank", "step"):
        if column in frame.columns and len(frame):
            each = frame.groupby("label")[column].nunique()
            if each.max() > 1:
                several.append(f"{each.max()} {column}s" if each.min() == each.max() else f"all {column}s of each")
            else:
                is_one = frame[column].nunique() == 1
                single.append(f"{column} {frame[column].iloc[0]}" if is_one else f"one {column} each")
    return ", ".join([f"{average} over {' and '.join(several)}", *single] if several else single)


def emulated_note(frame: pd.DataFrame) -> str:
    """A note if a link was emulated; empty for a table without the column ``source``."""
    if "source" not in frame.columns or not (frame["source"] == "emulated").any():
        return ""
    return SOURCE_NOTES["emulated"]


def byte_listing(sizes: pd.Series) -> str:
    """'zero1 1.00 MB and zero2 500 kB', of sizes by label."""
    return listing([f"{label} {format_bytes(size)}" for label, size in sizes.items()])


def listing(parts: list[str]) -> str:
    """'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "none"
