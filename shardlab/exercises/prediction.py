"""The reader's own number before a run, and how far it was from what the run found."""

import sys
from dataclasses import dataclass
from math import isfinite

import numpy as np

CLOSE = 0.1  # up to here a difference is said in percent, beyond it as a factor


@dataclass(frozen=True)
class Prediction:
    """A number that somebody has written down before the run; ``value`` is None if nobody has."""

    what: str
    value: float | None
    unit: str

    def against(self, found: float) -> None:
        """Print what was found beside it, and how far off it was."""
        number = float(found)
        if self.value is None:
            sys.stdout.write(f"{self.what}: {self._said(number)} (you made no prediction)\n")
            return
        predicted = f"you predicted {self._said(self.value)}, {distance(self.value, number)}"
        sys.stdout.write(f"{self.what}: {self._said(number)}; {predicted}\n")

    def _said(self, number: float) -> str:
        text = f"{number:,.0f}" if number.is_integer() else f"{number:,.4g}"
        return f"{text} {self.unit}".rstrip()


def predict(what: str, value: float | None = None, unit: str = "") -> Prediction:
    """Keep the reader's prediction; compare it after the run with ``.against(found)``.

    Args:
        what: what the number is of.
        value: the reader's number; None asks for one.
        unit: of both numbers; empty for a count.

    Raises:
        ValueError: ``value`` is no finite number.
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if value is not None and not (is_number and isfinite(value)):
        raise ValueError(f"value: {value!r} was given; give a finite number{f' of {unit}' if unit else ''}, or None")
    prediction = Prediction(what, None if value is None else float(value), unit)
    if value is None:
        of_unit = f", in {unit}" if unit else ""
        sys.stdout.write(f"{what}{of_unit}? Put your number in the place of None before you run on.\n")
    return prediction


def distance(predicted: float, found: float) -> str:
    """How far a prediction is from what was found, in words."""
    if predicted == found:
        return "exactly"
    if found and (share := abs(predicted / found - 1)) <= CLOSE:
        percent = f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"  # never 0.0%, which would be exact
        return f"{percent} too {'high' if predicted > found else 'low'}"
    if found * predicted > 0:
        larger, smaller = sorted((abs(predicted), abs(found)), reverse=True)
        return f"too {'high' if predicted > found else 'low'} by a factor of {larger / smaller:.2g}"
    return f"too {'high' if predicted > found else 'low'} by {abs(predicted - found):.4g}"
