"""A reader's prediction: committed before the run, and compared with what was found after it.

Without one the notebook runs on, so that it can be shown or compared, and what was found is not printed.
"""

import sys
from dataclasses import dataclass
from math import isfinite

import numpy as np

CLOSE = 0.1  # up to here a difference is said in percent, beyond it as a factor


@dataclass(frozen=True)
class Prediction:
    """A number or a direction that somebody has written down before the run.

    Attributes:
        what: it is of.
        value: the number, or one of ``among``; None if nobody has predicted.
        unit: of the number, or of both that a direction compares.
        among: for a direction the words for more, as much and less; else empty.
    """

    what: str
    value: float | str | None
    unit: str = ""
    among: tuple[str, ...] = ()

    def against(self, found: float, beside: float = 0) -> None:
        """Print what was found, and how far off the prediction was; nothing of it without a prediction.

        Args:
            found: the number.
            beside: what it is compared with, for a direction.
        """
        if self.value is None:
            sys.stdout.write(f"{self.what}: shown once you have predicted it, in the place of None above.\n")
        elif isinstance(self.value, str):
            word = self.among[1 if found == beside else 0 if found > beside else 2]
            predicted = "as you predicted" if word == self.value else f"and you predicted {self.value!r}"
            numbers = f"{said(float(found), self.unit)} and {said(float(beside), self.unit)}"
            sys.stdout.write(f"{self.what}: {word} ({numbers}), {predicted}\n")
        else:
            predicted = f"you predicted {said(self.value, self.unit)}, {distance(self.value, float(found))}"
            sys.stdout.write(f"{self.what}: {said(float(found), self.unit)}; {predicted}\n")


def predict(what: str, value: float | str | None = None, unit: str = "", *, among: tuple[str, ...] = ()) -> Prediction:
    """Keep the reader's prediction; compare it after the run with ``.against(found)``.

    Args:
        what: what is predicted.
        value: the reader's number, or one of ``among``; None until there is one.
        unit: of the numbers; empty for a count.
        among: for a direction the words for more, as much and less than what is compared.

    Raises:
        ValueError: ``value`` is no finite number, or none of the words.
    """
    if value is None:
        words = f" ({', '.join(among)})" if among else ""
        question = f"{what}{f', in {unit}' if unit else ''}?{words}"
        sys.stdout.write(f"{question} Put your prediction in the place of None before you run on.\n")
    elif wrong := _wrong(value, unit, among):
        raise ValueError(wrong)
    return Prediction(what, value if value is None or isinstance(value, str) else float(value), unit, among)


def said(number: float, unit: str) -> str:
    """A number with its unit."""
    text = f"{number:,.0f}" if number.is_integer() else f"{number:,.4g}"
    return f"{text} {unit}".rstrip()


def _wrong(value: object, unit: str, among: tuple[str, ...]) -> str:
    """Why it is no prediction; empty if it is one."""
    if among:
        return "" if value in among else f"value: {value!r} was given; give one of {', '.join(among)}, or None"
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if is_number and isfinite(value):  # type: ignore[arg-type]  # it is a number
        return ""
    return f"value: {value!r} was given; give a finite number{f' of {unit}' if unit else ''}, or None"


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
