"""Nine ideas, drawn: what is divided over ranks, and what ranks do over time. See ``drawings.py``.

Layers, stages and tokens are divided; over time ranks wait for each other, and things go wrong.
"""

from collections.abc import Sequence
from math import hypot
from typing import cast

from shardlab.analysis.intervals import intersect, subtract, total
from shardlab.context import positions_of
from shardlab.course.drawing import Pen, Span, drawing
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
    kinds = {Kind.FORWARD: "parameter", Kind.BACKWARD: "optimizer"}  # as in ``schedule_chart``
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
        "Blue: forward of a micro-batch, one slot. Green: its backward, two. Where nothing is drawn a rank idles: "
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


COMES_MS, SUM_MS = (20.0, 10.0, 60.0, 40.0), 10.0
MESSAGES_MS, COMPUTE_MS = ((0.0, 8.0), (12.0, 24.0)), ((6.0, 21.0),)
FIXED_MS, ROW_MS, EXPOSED_MS = 8.0, 4.0, 24.0
CALLED = (3, 2, 3, 3)  # collectives, by each rank
GRADIENTS = ((4.0, 0.0), (0.0, 3.0))  # of each rank's rows


@drawing
def last_to_come(pen: Pen) -> str:
    """Notebook 00: four ranks bring a number each, and one of them is late."""
    last = max(COMES_MS)
    rows: dict[str, list[Span]] = {
        f"rank {rank}": [
            (0, comes, "compute", str(rank)), (comes, last, "wait", f"{last - comes:g} ms" if comes < last else ""),
            (last, last + SUM_MS, "all-reduce", str(sum(range(RANKS)))),
        ]
        for rank, comes in enumerate(COMES_MS)
    }  # fmt: skip
    pen.rows(rows)
    pen.below("Grey: a rank's own work, and its number. Red: it waits. Teal: the sum of all four.")
    said = " + ".join(map(str, range(RANKS)))
    return (
        f"{said} = {sum(range(RANKS))}, on all four, at {max(COMES_MS) + SUM_MS:g} ms: a collective ends when its last "
        "rank has come."
    )


@drawing
def hidden_part(pen: Pen) -> str:
    """Notebook 04: which part of two messages lies over compute."""
    pieces = {
        "messages": (MESSAGES_MS, "all-reduce"), "compute": (COMPUTE_MS, "compute"),
        "hidden": (intersect(MESSAGES_MS, COMPUTE_MS).tolist(), "all-reduce"),
        "exposed": (subtract(MESSAGES_MS, COMPUTE_MS).tolist(), "wait"),
    }  # fmt: skip
    rows = {name: [(*one, colour, f"{one[1] - one[0]:g}") for one in times] for name, (times, colour) in pieces.items()}
    at = pen.rows(rows, names=90)
    for moment in COMPUTE_MS[0]:
        pen.line(at(moment), 4, at(moment), pen.height, width=1)
    pen.below("One rank over 24 ms. What is right or left of both lines is not hidden.")
    moved, hidden, exposed = (total(pieces[name][0]) for name in ("messages", "hidden", "exposed"))
    return f"{hidden:g} of {moved:g} ms are hidden: overlap {100 * hidden / moved:g} %. Exposed: {exposed:g} ms."


def step_of(batch: int, num_ranks: int) -> list[Span]:
    """The parts of a step: what does not depend on the rows, a rank's rows, exposed messages."""
    computed = FIXED_MS + ROW_MS * batch / num_ranks
    parts = [(0, FIXED_MS, "optimizer", ""), (FIXED_MS, computed, "compute", f"{batch // num_ranks} rows")]
    return [*parts, (computed, computed + EXPOSED_MS, "wait", f"{EXPOSED_MS:g}")] if num_ranks > 1 else parts


@drawing
def one_or_two(pen: Pen) -> str:
    """Notebook 05: a step of one rank and of two, for three batches."""
    longest = step_of(16, 1)[-1][1]
    for batch in (8, 12, 16):
        rows = {f"{batch} rows, {'1 rank' if num == 1 else '2 ranks'}": step_of(batch, num) for num in (1, 2)}
        pen.height += 8
        pen.rows(rows, {name: f"{spans[-1][1]:g} ms" for name, spans in rows.items()}, names=152, room=60, end=longest)
    pen.below(f"Green: {FIXED_MS:g} ms whatever the rows. Grey: {ROW_MS:g} ms a row. Red: exposed messages.")
    return (
        f"Two are faster with more than {2 * EXPOSED_MS / ROW_MS:g} rows: half of them then take longer than what is "
        "exposed."
    )


@drawing
def not_with_the_others(pen: Pen) -> str:
    """Notebook 13: three ranks wait in a collective, and the fourth never comes to it."""
    number, rows = max(CALLED), {}
    for rank, called in enumerate(CALLED):
        done = [(10.0 * one, 10.0 * one + 8, "all-reduce", str(one + 1)) for one in range(number - 1)]
        waits = (10.0 * number - 10, 62.0, "wait", f"waits in number {number}")
        rows[f"rank {rank}"] = [*done, waits if called == number else (waits[0], 62, "compute", "computes on and on")]
    pen.rows(rows)
    pen.below("Teal: collectives that all four have called, by their number.")
    late = CALLED.index(min(CALLED))
    return (
        f"{CALLED.count(max(CALLED))} ranks wait in number {max(CALLED)}, and time out. To blame is rank {late}, which "
        "is not there."
    )


def mean_gradient() -> tuple[float, float]:
    """Of one process with the rows of both ranks."""
    (x, y), (other_x, other_y) = GRADIENTS
    return (x + other_x) / 2, (y + other_y) / 2


def ratio_and_cosine(gradient: tuple[float, float]) -> tuple[float, float]:
    """Its norm over that of one process, and the cosine between both."""
    mean = mean_gradient()
    product = gradient[0] * mean[0] + gradient[1] * mean[1]
    return hypot(*gradient) / hypot(*mean), product / hypot(*gradient) / hypot(*mean)


@drawing
def never_reduced(pen: Pen) -> str:
    """Notebook 17: two ranks that each step with their own gradient."""
    unit, x = 34 if pen.is_narrow else 50, 24.0
    y = 16.0 + 3 * unit
    for name, (right, up), colour in (
        ("rank 0", GRADIENTS[0], "parameter"), ("rank 1", GRADIENTS[1], "gradient"),
        ("one process", mean_gradient(), "ink"),
    ):  # fmt: skip
        to_x, to_y = x + unit * right, y - unit * up
        pen.arrow(x, y, to_x, to_y, colour)
        pen.text(to_x + 8, to_y + 5, f"{name}: [{right:g}, {up:g}], norm {hypot(right, up):g}", colour=colour)
    pen.below("The gradient of one process is the mean over all rows, of both ranks.")
    (ratio, cosine), (other, its) = map(ratio_and_cosine, GRADIENTS)
    return (
        f"Never reduced: {ratio:g} and {other:g} times as long, cosines {cosine:g} and {its:g}. The loss falls all the "
        "same."
    )
