"""Numbers as a person reads them: decimal bytes, times, counts, in three significant digits with their unit."""

import math

NONE = "–"
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
TIME_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))

Units = tuple[tuple[float, str], ...]


def format_bytes(num_bytes: float) -> str:
    """Decimal bytes: 12_345_678 is '12.3 MB'; a missing value is a dash."""
    return _format(num_bytes, BYTE_UNITS)


def format_us(time_us: float) -> str:
    """Microseconds: 12_345 is '12.3 ms'."""
    return _format(time_us, TIME_UNITS)


def format_count(count: float) -> str:
    """Elements and the like: 1_234_567 is '1.23 M'."""
    return _format(count, COUNT_UNITS)


def format_percent(share: float) -> str:
    """A share of one: 0.4567 is '46 %', 0.0321 is '3.2 %'."""
    if math.isnan(share):
        return NONE
    whole = abs(share) >= 0.0995 or share == 0
    return f"{100 * share:.0f} %" if whole else f"{100 * share:.1f} %"


def tick(text: str) -> str:
    """A formatted number without zeros at its end, for the marks of an axis: '1.00 kB' is '1 kB'."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}".rstrip()


def byte_scale(largest: float) -> tuple[float, str]:
    """(divisor, unit) in which an axis up to ``largest`` bytes reads well."""
    return scale(largest, BYTE_UNITS)


def scale(largest: float, units: Units) -> tuple[float, str]:
    """The largest unit that ``largest`` reaches, as (divisor, name); the smallest unit below that."""
    return next(((divisor, name) for divisor, name in units if abs(largest) >= divisor), units[-1])


def significant(value: float, digits: int = 3) -> str:
    """Rounded to significant digits, never in scientific notation between 1e-4 and 1e6: '0.0123', '1.20', '417'."""
    if not math.isfinite(value):
        return NONE if math.isnan(value) else str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -5 < exponent < 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - exponent, 0)}f}"


def _format(value: float, units: Units) -> str:
    if math.isnan(value):
        return NONE
    # 999.96 kB rounds to 1000 kB: choose the unit after rounding, so that it reads 1.00 MB
    rounded = float(f"{value:.2e}")
    divisor, name = scale(rounded, units)
    exact = divisor == 1.0 and float(value).is_integer()
    number = f"{int(value)}" if exact else significant(value / divisor)
    return f"{number} {name}".rstrip()
