"""Five ideas, drawn: what ranks do over time, who waits for whom, and what goes wrong. See ``drawings.py``."""

from math import hypot

from shardlab.analysis.intervals import intersect, subtract, total
from shardlab.course.drawing import Pen, Span, drawing
from shardlab.course.drawings_of_layers import RANKS

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
