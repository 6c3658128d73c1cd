"""Eight broken training programs: the reader finds the line, mends it, and ``same`` marks that on two ranks.

None of them raises an error, and the loss of each falls. They are stories of the matrix (``course.same_scripts``).
"""

from collections.abc import Mapping

from shardlab.course.same_scripts import BROKEN, judged_text
from shardlab.same.answer import Answer

PROGRAMS = (
    ("not divided by ranks", "by hand", "dist.all_reduce"),
    ("the module inside is called", "DDP", "model.module(x)"),
    ("a mean of means", "FSDP2", "F.cross_entropy"),
    ("cleared in each micro-batch", "DDP", "            optimizer.zero_grad()"),
    ("the norm of own pieces", "FSDP2", "norm = sum"),
    ("a tied weight reduced twice", "by hand", "remove_duplicate"),
    ("clipped before reduced", "by hand", "clip_grad_norm_"),
    ("stepped weights are overwritten", "by hand", "dist.broadcast"),
)
"""Story, kind of script, and a part of the line at fault."""


def broken_program(number: int) -> str:
    """The text of one of the eight, 1 to 8.

    Raises:
        ValueError: there is none of that number.
    """
    story, kind, _ = _found(number)
    return BROKEN[story].script(kind)


def numbered(number: int) -> str:
    """The same with the numbers of its lines."""
    lines = broken_program(number).splitlines()
    return "\n".join(f"{at:3}  {line}" for at, line in enumerate(lines, 1))


def is_at_fault(number: int, line: int) -> bool:
    """Whether the line, or one beside it, is what makes the program wrong."""
    lines = broken_program(number).splitlines()
    return any(_found(number)[2] in text for text in lines[max(0, line - 2) : line + 1])


def mended(number: int, lines: Mapping[int, str]) -> Answer:
    """What ``same`` says on two ranks of the program with other lines.

    Args:
        number: of the program.
        lines: what stands in the place of a line, by its number, with its indentation; several lines, or none if empty.

    Raises:
        ValueError: there is no such program, or no such line.
    """
    text = dict(enumerate(broken_program(number).splitlines(), 1))
    if unknown := sorted(set(lines) - set(text)):
        raise ValueError(f"lines: {unknown[0]} is given; program {number} has lines 1 to {len(text)}")
    return judged_text("\n".join((text | dict(lines)).values()) + "\n")


def _found(number: int) -> tuple[str, str, str]:
    if not 1 <= number <= len(PROGRAMS):
        raise ValueError(f"number: {number} is given; there are programs 1 to {len(PROGRAMS)}")
    return PROGRAMS[number - 1]
