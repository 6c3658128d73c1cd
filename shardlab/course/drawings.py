"""Nine ideas, drawn: each function is the head of a notebook, and its numbers are those of a tiny example.

What the planner, the replay or the clock of the exercises knows comes from there.
"""

from collections.abc import Sequence
from typing import cast

from shardlab.context import positions_of
from shardlab.course.drawing import Drawing, Pen
from shardlab.course.exercises.exercise import VirtualClock
from shardlab.course.exercises.ladder.mesh import TWO_AXES
from shardlab.planner.formulas import ModelStates, model_states
from shardlab.schedules import Kind, Played, make_schedule, play

RANKS = 4
STAGES, MICRO_BATCHES = 3, 4
ROWS = 8  # of the weight that is borrowed
ROOT_KB, BLOCK_KB, BLOCKS = 82, 200, 6
BACKWARD_MS, BYTES_MS, LATENCY_MS = 40.0, 32.0, 2.0
SENT_AS = {"8 messages": (8, False), "1 message": (1, False), "4 buckets": (4, True)}


def ring() -> Drawing:
    """Notebook 01: an all-reduce around a ring."""
    hops, sent = 2 * (RANKS - 1), 2 * (RANKS - 1) / RANKS
    return Drawing(_ring, f"{hops} hops, a quarter each: 2(N - 1)/N of the vector, {sent:g} of it here.")


def ring_states() -> list[list[list[int]]]:
    """The four numbers of each rank, before the first hop and after each."""
    states = [[[10 * rank + cell for cell in range(RANKS)] for rank in range(RANKS)]]
    for hop in range(2 * (RANKS - 1)):
        now = [list(cells) for cells in states[-1]]
        adds = hop < RANKS - 1
        for rank in range(RANKS):
            cell = (rank - 1 - hop) % RANKS  # in this order rank r ends the first half with the sum of cell r
            to = (rank + 1) % RANKS
            now[to][cell] = states[-1][rank][cell] + (states[-1][to][cell] if adds else 0)
        states.append(now)
    return states


def _ring(pen: Pen) -> None:
    states, across = ring_states(), 2 if pen.is_narrow else 5
    names = {0: "start", 1: "hop 1", 2: "hop 2", 3: "hop 3", 6: "hop 6"}
    for place, (hop, name) in enumerate(names.items()):
        left, top = place % across * (190 if pen.is_narrow else 131), place // across * 178
        pen.text(left, top + 14, name, bold=True)
        for rank, cells in enumerate(states[hop]):
            pen.text(left + 28 * rank + 13, top + 36, f"r{rank}", "middle", colour="soft")
            for cell, number in enumerate(cells):
                is_whole = (rank - cell) % RANKS <= hop - (RANKS - 1)
                changed = number != states[0][rank][cell]
                colour = "parameter" if is_whole else "all-reduce" if changed else ""
                pen.box(left + 28 * rank, top + 44 + 28 * cell, 26, 26, colour, str(number), edge="soft")
    pen.below(
        "Hops 1 to 3: rank r hands ONE number to rank r + 1, which adds its own. Then each rank has one whole sum "
        "(blue), and in hops 4 to 6 the sums go round.",
        colour="soft",
    )


def buckets() -> Drawing:
    """Notebook 03: the same bytes in 8 messages, in one, and in four."""
    return Drawing(_buckets, "Same bytes. What counts is right of the line.")


def sent_at(num_messages: int, *, early: bool) -> tuple[list[tuple[float, float]], float]:
    """Begin and end in ms of equal messages, sent as backward goes on or after it, and the ms that are exposed."""
    clock, sent = VirtualClock(LATENCY_MS, 1.0), []
    clock.compute(0 if early else BACKWARD_MS)
    for _ in range(num_messages):
        clock.compute(BACKWARD_MS / num_messages if early else 0)
        end = clock.send(BYTES_MS / num_messages)
        sent.append((end - LATENCY_MS - BYTES_MS / num_messages, end))
    clock.wait(end)
    return sent, clock.exposed_us


def _buckets(pen: Pen) -> None:
    left = 0 if pen.is_narrow else 114
    scale = (pen.width - left - 2) / 90
    for place, (name, (count, early)) in enumerate(SENT_AS.items()):
        top = place * (108 if pen.is_narrow else 86) + (24 if pen.is_narrow else 0)
        messages, exposed = sent_at(count, early=early)
        pen.text(0, top - 6 if pen.is_narrow else top + 30, name, bold=True)
        for block in range(4):
            pen.box(left + 10 * block * scale, top, 10 * scale, 26, "compute", str(3 - block))
        for begin, end in messages:
            pen.box(left + begin * scale, top + 30, (end - begin) * scale, 22, "all-reduce")
        end_x, last_x = left + BACKWARD_MS * scale, left + messages[-1][1] * scale
        pen.line(end_x, top - 4, end_x, top + 66)
        pen.line(end_x, top + 58, last_x, top + 58, "wait", 5)
        pen.text(end_x + 6, top + 18, f"{exposed:g} ms exposed", colour="wait")
    pen.below(
        "Grey: backward of layers 3 to 0, 40 ms. Teal: all-reduce, 32 ms of bytes and 2 ms of latency each.",
        colour="soft",
    )


def who_keeps_what() -> Drawing:
    """Notebook 06: what data parallel and the three stages of ZeRO keep on each of four ranks."""
    kept = ", ".join(f"{bytes_of(name):g}" for name in ("ddp", "zero1", "zero2", "zero3"))
    return Drawing(_who_keeps_what, f"{kept} bytes a parameter: each stage divides one thing more by N.")


def bytes_of(strategy: str) -> float:
    """Bytes a parameter on each of four ranks, in fp32 with Adam."""
    return _states(strategy, RANKS).total_bytes / RANKS


def _states(strategy: str, num_params: int) -> ModelStates:
    return next(states for states in model_states(num_params, RANKS, "fp32") if states.strategy == strategy)


def _who_keeps_what(pen: Pen) -> None:
    whole = (("parameter", 40), ("gradient", 40), ("optimizer", 80))
    for place, (name, strategy) in enumerate(
        {"data parallel": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}.items()
    ):
        row, column = divmod(place, 2) if pen.is_narrow else (0, place)
        left, top = column * (188 if pen.is_narrow else 163), row * 262
        pen.text(left, top + 14, name, bold=True)
        states = _states(strategy, RANKS)
        held = (states.parameter_bytes / 4, states.gradient_bytes / 4, states.optimizer_bytes / 8)
        for rank in range(RANKS):
            x, y = left + 36 * rank, top + 24
            for (colour, height), part in zip(whole, held, strict=True):
                pen.box(x, y, 30, height)
                share = height * part / RANKS
                pen.box(x, y + (rank * share if share < height else 0), 30, share, colour)
                y += height + 4
            pen.text(x + 15, y + 14, f"r{rank}", "middle", colour="soft")
        pen.text(left, top + 228, f"{bytes_of(strategy):g} bytes", bold=True)
    _step_of_zero1(pen)
    pen.below(
        "Blue: parameters, 4 bytes each. Orange: gradients, 4. Green: Adam, 8. Dashed: what a rank no longer holds.",
        colour="soft",
    )


def _step_of_zero1(pen: Pen) -> None:
    top, each = pen.height + 8, pen.width / (2 if pen.is_narrow else 4)
    pen.text(0, top + 14, "one step of ZeRO-1", bold=True)
    acts = {
        "backward": "gradient",
        "reduce-scatter": "reduce-scatter",
        "step 1/N": "optimizer",
        "all-gather": "all-gather",
    }
    for place, (name, colour) in enumerate(acts.items()):
        row, column = divmod(place, 2) if pen.is_narrow else (0, place)
        pen.box(column * each, top + 22 + 36 * row, each - 8, 30, colour, name)


def borrow() -> Drawing:
    """Notebook 07: what one of four ranks holds of a weight of 8 rows, from forward to the reduced gradient."""
    zero2, zero3 = (_states(name, ROWS).wire_elements for name in ("zero2", "zero3"))
    each = ROWS * (RANKS - 1) // RANKS
    return Drawing(_borrow, f"Three trips of {each} of {ROWS} rows = {zero3:g}; ZeRO-2 makes two, {zero2:g}.")


BORROWED = {  # of rank 0: own rows, gathered rows, rows of the gradient
    "own": (2, 0, 0), "gather": (2, 8, 0), "forward": (2, 8, 0), "free": (2, 0, 0), "gather again": (2, 8, 0),
    "backward": (2, 8, 8), "reduce": (2, 0, 2),
}  # fmt: skip


def _borrow(pen: Pen) -> None:
    columns = 4 if pen.is_narrow else 7
    for place, (name, rows) in enumerate(BORROWED.items()):
        left, top = place % columns * (91 if not pen.is_narrow else 90), place // columns * 216
        for line, word in enumerate(name.split()):
            pen.text(left, top + 14 + 17 * line, word, bold=True)
        for kind, (count, colour) in enumerate(zip(rows, ("parameter", "gathered", "gradient"), strict=True)):
            for row in range(ROWS):
                if count > row or kind == 0:
                    pen.box(left + 26 * kind, top + 40 + 17 * row, 23, 15, colour if count > row else "")
        pen.text(left, top + 196, f"{sum(rows)} rows")
        for y in (top + 90, top + 110, top + 130) if name in ("gather", "gather again", "reduce") else ():
            out, back = (left + 54, left + 88) if name == "reduce" else (left + 74, left + 52)
            pen.arrow(out, y, back, y, "reduce-scatter" if name == "reduce" else "all-gather")
    pen.below(
        "Rank 0 of 4. Blue: its own 2 of 8 rows; violet: all 8, gathered; orange: the gradient, whole until it is "
        "reduced and scattered.",
        colour="soft",
    )


def window() -> Drawing:
    """Notebook 08: which blocks FSDP holds gathered, with one of them ahead."""
    return Drawing(_window, "The root and two blocks, however deep the model is.")


MOMENTS = {"forward of 1": (1, 2), "forward of 4": (4, 5), "backward of 3": (3, 2)}  # what computes, what is ahead


def gathered_kb() -> tuple[int, int]:
    """What FSDP with one block ahead holds gathered at most, and ZeRO-3."""
    return ROOT_KB + 2 * BLOCK_KB, ROOT_KB + BLOCKS * BLOCK_KB


def _window(pen: Pen) -> None:
    top, width = 0.0, 46 if pen.is_narrow else 66
    for name, (now, ahead) in MOMENTS.items():
        pen.text(0, top + 14, name, bold=True)
        pen.text(pen.width, top + 14, f"computes {now}, gathers {ahead}", "end", colour="soft")
        for number in range(-1, BLOCKS):
            x, colour = (number + 1) * (width + 5), "gathered" if number in (-1, now, ahead) else ""
            pen.box(x, top + 24, width, 34, colour)
            pen.box(x, top + 24, width / 2, 34, "parameter")
            pen.text(x + width / 2, top + 76, "root" if number < 0 else str(number), "middle")
            if number == now:
                pen.box(x - 3, top + 21, width + 6, 40, edge="ink")
        top += 96
    for name, kb in zip(("FSDP", "ZeRO-3"), gathered_kb(), strict=True):
        pen.text(0, top + 16, name)
        pen.box(64, top, kb / gathered_kb()[1] * (pen.width - 150), 22, "gathered")
        pen.text(pen.width, top + 16, f"{kb:,} kB", "end")
        top += 30
    pen.below("Blue: the half that a rank owns. Violet: gathered from the other. Framed: computes now.", colour="soft")


def column_then_row() -> Drawing:
    """Notebook 10: the two layers of an MLP on two tensor-parallel ranks."""
    return Drawing(_column_then_row, "Nothing between, one all-reduce of b x 4 after; one more in backward.")


def _column_then_row(pen: Pen) -> None:
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
        "first would need a gather in the middle.",
        colour="soft",
    )


def two_axes_of_a_mesh() -> Drawing:
    """Notebook 11: four ranks, tensor parallel across and data parallel down; the numbers are those of the exercise."""
    return Drawing(_two_axes, "Outputs add up across, gradients are averaged down; what all have is counted once.")


def _numbers(vector: object) -> str:
    numbers = [f"{number:g}" for number in cast("Sequence[float]", vector)]
    return f"[{', '.join(numbers)}]"


def _two_axes(pen: Pen) -> None:
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
    pen.below(
        "Green: a norm's weight, which all four have whole: averaged down only, counted once in the norm.",
        colour="soft",
    )


def pipeline_lists() -> Drawing:
    """Notebook 18: two schedules of one pipeline, as the clock plays them."""
    gpipe, other = (_played(name) for name in ("gpipe", "1f1b"))
    held = [max(map(one.schedule.in_flight, range(STAGES))) for one in (gpipe, other)]
    return Drawing(
        _pipeline,
        f"{gpipe.seconds:g} slots, and {other.seconds:g}: 1F1B is no faster. It holds {held[1]} micro-batches, not "
        f"{held[0]}.",
    )


def _played(name: str) -> Played:
    return play(make_schedule(name, STAGES, MICRO_BATCHES), {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0})


def _pipeline(pen: Pen) -> None:
    slot, left = (17, 26) if pen.is_narrow else (30, 62)
    for place, (name, words) in enumerate({"gpipe": "GPipe", "1f1b": "1F1B"}.items()):
        played, top = _played(name), place * 128
        pen.text(0, top + 16, words, bold=True)
        for rank, actions in enumerate(played.schedule.ranks):
            y = top + 26 + 30 * rank
            pen.text(0, y + 19, f"r{rank}" if pen.is_narrow else f"rank {rank}", colour="soft")
            for action in actions:
                begin, end = played.begins[action], played.ends[action]
                colour = "parameter" if action.kind is Kind.FORWARD else "gradient"
                pen.box(left + slot * begin, y, slot * (end - begin), 26, colour, str(action.micro_batch))
    pen.below(
        "Blue: forward of a micro-batch, one slot. Orange: its backward, two. Where nothing is drawn a rank idles: "
        "3(p - 1) slots in both.",
        colour="soft",
    )


PIECES = 2 * RANKS
OF_RANKS = ("parameter", "optimizer", "gradient", "gathered")


def zigzag_of_pieces() -> Drawing:
    """Notebook 19: who computes which part of causal attention, in contiguous parts and in a zigzag."""
    one, other = (boxes_of_ranks(zigzag=zigzag) for zigzag in (False, True))
    return Drawing(_zigzag, f"Contiguous: {', '.join(map(str, one))} boxes. In a zigzag each rank has {other[0]}.")


def boxes_of_ranks(*, zigzag: bool) -> list[int]:
    """Of each rank, the pairs of a piece of queries and a piece of keys that is not later."""
    return [sum(piece + 1 for piece in _pieces_of(rank, zigzag=zigzag)) for rank in range(RANKS)]


def _pieces_of(rank: int, *, zigzag: bool) -> list[int]:
    return [int(piece) for piece in positions_of(PIECES, RANKS, rank, zigzag=zigzag)]


def _zigzag(pen: Pen) -> None:
    for place, name in enumerate(("contiguous", "zigzag")):
        left, top = (0, place * 258) if pen.is_narrow else (place * 330, 0)
        pen.text(left, top + 16, name, bold=True)
        for rank, colour in enumerate(OF_RANKS):
            for piece in _pieces_of(rank, zigzag=name == "zigzag"):
                y = top + 26 + 28 * piece
                pen.text(left, y + 18, f"r{rank}", colour="soft")
                for key in range(piece + 1):
                    pen.box(left + 28 + 28 * key, y, 26, 26, colour)
    pen.below(
        "Rows: eight pieces of a sequence, with the rank that has them. Boxes: the pieces of keys that their queries "
        "see.",
        colour="soft",
    )


DRAWINGS = (
    ring, buckets, who_keeps_what, borrow, window, column_then_row, two_axes_of_a_mesh, pipeline_lists,
    zigzag_of_pieces,
)  # fmt: skip
