"""Four ideas, drawn: layers, stages and tokens that are divided over ranks. See ``drawings.py``."""

from collections.abc import Sequence
from typing import cast

from shardlab.context import positions_of
from shardlab.course.drawing import Pen, drawing
from shardlab.course.exercises.ladder.mesh import TWO_AXES
from shardlab.schedules import Kind, Played, make_schedule, play

RANKS = 4
STAGES, MICRO_BATCHES = 3, 4


@drawing
def column_then_row(pen: Pen) -> str:
    """Notebook 10: the two layers of an MLP on two tensor-parallel ranks."""
    step = 176 if pen.is_narrow else 132
    for rank, colour in enumerate(("parameter", "optimizer")):
        top, unit = rank * step, 15
        pen.text(0, top + 14, f"rank {rank}", bold=True)
        x, places = 0.0, ((3, 4, "compute", "X", "b x 4"), (4, 4, colour, f"A{rank + 1}", "4 x 4"),
                          (3, 4, colour, f"Y{rank + 1}", "b x 4"), (4, 4, colour, f"B{rank + 1}", "4 x 4"),
                          (3, 4, "all-reduce", f"Z{rank + 1}", "b x 4"))  # fmt: skip
        gap = (pen.width - 20 * unit) / 4 if pen.is_narrow else 62
        for number, (rows, columns, fill, name, shape) in enumerate(places):
            pen.box(x, top + 26 + (4 - rows) * unit / 2, columns * unit, rows * unit, fill, name)
            pen.text(x + columns * unit / 2, top + 106, shape, "middle", colour="soft")
            sign = ("x", "=", "x", "=", "")[number]
            pen.text(x + columns * unit + gap / 2, top + 61, sign, "middle")
            x += columns * unit + gap
    middle = pen.width - 30 if pen.is_narrow else 4 * (60 + 62) + 30
    pen.arrow(middle, 112, middle, step + 26, "all-reduce")
    pen.arrow(middle, step + 26, middle, 112, "all-reduce")
    pen.text(middle - 14, 150 if pen.is_narrow else 142, "all-reduce: Z = Z1 + Z2", "end", colour="all-reduce")
    pen.below(
        "A (4 x 8) is cut by columns, B (8 x 4) by rows, so rank r multiplies its own Y with its own rows of B. Row "
        "first would need a gather in the middle."
    )
    return "Nothing between, one all-reduce of b x 4 after; one more in backward."


def _numbers(vector: object) -> str:
    numbers = [f"{number:g}" for number in cast("Sequence[float]", vector)]
    return f"[{', '.join(numbers)}]"


@drawing
def two_axes_of_a_mesh(pen: Pen) -> str:
    """Notebook 11: four ranks, tensor parallel across and data parallel down; the numbers are those of the exercise."""
    case = TWO_AXES.cases()[0]
    width, across, down = (150, 210, 178) if pen.is_narrow else (220, 400, 158)
    for place, ((parts,), wanted) in enumerate(zip(case.inputs, case.wanted, strict=True)):
        given, found = cast("dict[str, list[float]]", parts), cast("dict[str, list[float]]", wanted)
        row, column = divmod(place, 2)
        x, y = column * across, row * down
        pen.box(x, y, width, 104, edge="soft")
        pen.text(x + 10, y + 22, f"rank {place}", bold=True)
        pen.text(x + 10, y + 44, f"{'rows' if pen.is_narrow else 'batch rows'} {'AB'[row]}, slice {column}")
        pen.text(x + 10, y + 68, f"out {_numbers(given['output'])}", colour="all-reduce")
        pen.text(x + 10, y + 92, f"grad {given['slice'][0]:g}", colour="gradient")
        pen.box(x + width - 26, y + 78, 16, 16, "optimizer")
        if column == 0:
            pen.arrow(x + width + 4, y + 52, x + across - 4, y + 52, "all-reduce")
            pen.arrow(x + across - 4, y + 52, x + width + 4, y + 52, "all-reduce")
            if not pen.is_narrow:
                pen.text(x + (width + across) / 2, y + 40, "+", "middle", bold=True)
                pen.text(x + (width + across) / 2, y + 74, _numbers(found["output"]), "middle", colour="all-reduce")
        if row == 0:
            pen.arrow(x + 40, y + 108, x + 40, y + down - 4, "gradient")
            pen.arrow(x + 40, y + down - 4, x + 40, y + 108, "gradient")
            pen.text(x + 54, y + 104 + (down - 104) / 2 + 6, f"mean {found['slice'][0]:g}", colour="gradient")
    if pen.is_narrow:
        sums = [_numbers(cast("dict[str, list[float]]", wanted)["output"]) for wanted in case.wanted[::2]]
        pen.below(f"Across, teal: rows A add up to {sums[0]}, rows B to {sums[1]}.", colour="all-reduce")
    pen.below("Green: a norm's weight, which all four have whole: averaged down only, counted once in the norm.")
    return "Outputs add up across, gradients are averaged down; what all have is counted once."


def _played(name: str) -> Played:
    return play(make_schedule(name, STAGES, MICRO_BATCHES), {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0})


@drawing
def pipeline_lists(pen: Pen) -> str:
    """Notebook 18: two schedules of one pipeline, as the clock plays them."""
    kinds = {Kind.FORWARD: "parameter", Kind.BACKWARD: "gradient"}
    for name, words in {"gpipe": "GPipe", "1f1b": "1F1B"}.items():
        played = _played(name)
        pen.below(words, bold=True, colour="ink")
        pen.rows({
            f"rank {rank}": [
                (played.begins[one], played.ends[one], kinds[one.kind], str(one.micro_batch)) for one in actions
            ]
            for rank, actions in enumerate(played.schedule.ranks)
        })  # fmt: skip
    pen.below(
        "Blue: forward of a micro-batch, one slot. Orange: its backward, two. Where nothing is drawn a rank idles: "
        "3(p - 1) slots in both."
    )
    gpipe, other = (_played(name) for name in ("gpipe", "1f1b"))
    held = [max(map(one.schedule.in_flight, range(STAGES))) for one in (gpipe, other)]
    return (
        f"{gpipe.seconds:g} slots, and {other.seconds:g}: 1F1B is no faster. It holds {held[1]} micro-batches, not "
        f"{held[0]}."
    )


PIECES = 2 * RANKS
OF_RANKS = ("parameter", "optimizer", "gradient", "gathered")


def boxes_of_ranks(*, zigzag: bool) -> list[int]:
    """Of each rank, the pairs of a piece of queries and a piece of keys that is not later."""
    return [sum(piece + 1 for piece in _pieces_of(rank, zigzag=zigzag)) for rank in range(RANKS)]


def _pieces_of(rank: int, *, zigzag: bool) -> list[int]:
    return [int(piece) for piece in positions_of(PIECES, RANKS, rank, zigzag=zigzag)]


@drawing
def zigzag_of_pieces(pen: Pen) -> str:
    """Notebook 19: who computes which part of causal attention, in contiguous parts and in a zigzag."""
    for name, left, top in pen.panels(("contiguous", "zigzag"), 258, wide=2, narrow=1):
        for rank, colour in enumerate(OF_RANKS):
            for piece in _pieces_of(rank, zigzag=name == "zigzag"):
                y = top + 26 + 28 * piece
                pen.text(left, y + 18, f"r{rank}", colour="soft")
                for key in range(piece + 1):
                    pen.box(left + 28 + 28 * key, y, 26, 26, colour)
    pen.below(
        "Rows: eight pieces of a sequence, with the rank that has them. Boxes: the pieces of keys that their queries "
        "see."
    )
    one, other = (boxes_of_ranks(zigzag=zigzag) for zigzag in (False, True))
    return f"Contiguous: {', '.join(map(str, one))} boxes. In a zigzag each rank has {other[0]}."
