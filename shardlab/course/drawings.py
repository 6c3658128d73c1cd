"""Ideas, drawn: each function is the head of a notebook, and its numbers are those of a tiny example.

What the planner, the replay or the clock of the exercises knows comes from there. Here are those of data parallel, ZeRO
and FSDP; bytes have a file of their own beside, and so have ranks: what is divided over them, and what they do.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from shardlab.course.drawing import Pen, drawing
from shardlab.course.exercises.exercise import VirtualClock

from shardlab.course.drawings_of_bytes import (  # isort: skip
    STAGES, bytes_of_a_step, fits_and_sends, one_change, states_of, three_prices, what_is_left, who_reads_what,
)  # fmt: skip
from shardlab.course.drawings_of_ranks import (  # isort: skip
    RANKS, column_then_row, hidden_part, last_to_come, never_reduced, not_with_the_others, one_or_two, pipeline_lists,
    two_axes_of_a_mesh, zigzag_of_pieces,
)  # fmt: skip

ROWS = 8  # of the weight that is borrowed
ROOT_KB, BLOCK_KB, BLOCKS = 82, 200, 6
BACKWARD_MS, BYTES_MS, LATENCY_MS = 40.0, 32.0, 2.0
SENT_IN = {"32 bits": (32.0, False), "16 bits, waits": (16.0, True), "16 bits": (16.0, False)}  # ms of bytes
SENT_AS = {"8 messages": (8, False), "1 message": (1, False), "4 buckets": (4, True)}


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


@drawing
def ring(pen: Pen) -> str:
    """Notebook 01: an all-reduce around a ring."""
    states, names = ring_states(), {"start": 0, "hop 1": 1, "hop 2": 2, "hop 3": 3, "hop 6": 6}
    for name, left, top in pen.panels(names, 178, wide=5, narrow=2):
        hop = names[name]
        for rank, cells in enumerate(states[hop]):
            pen.text(left + 28 * rank + 13, top + 36, f"r{rank}", "middle", colour="soft")
            for cell, number in enumerate(cells):
                is_whole = (rank - cell) % RANKS <= hop - (RANKS - 1)
                changed = number != states[0][rank][cell]
                colour = "parameter" if is_whole else "all-reduce" if changed else ""
                pen.box(left + 28 * rank, top + 44 + 28 * cell, 26, 26, colour, str(number), edge="soft")
    pen.below(
        "Hops 1 to 3: rank r hands ONE number to rank r + 1, which adds its own. Then each rank has one whole sum "
        "(blue), and in hops 4 to 6 the sums go round."
    )
    hops, sent = 2 * (RANKS - 1), 2 * (RANKS - 1) / RANKS
    return f"{hops} hops, a quarter each: 2(N - 1)/N of the vector, {sent:g} of it here."


def sent(num_messages: int, *, early: bool = True, bytes_ms: float = BYTES_MS, waits: bool = False) -> VirtualClock:
    """A backward in ms with equal messages, sent as it goes on or after it; waited for at once, or all at the end."""
    clock = VirtualClock(LATENCY_MS, 1.0)
    if not early:
        clock.compute(BACKWARD_MS)
    for _ in range(num_messages):
        if early:
            clock.compute(BACKWARD_MS / num_messages)
        end = clock.send(bytes_ms / num_messages)
        clock.wait(end if waits else 0)
    clock.wait(end)
    return clock


def of_kind(clock: VirtualClock, kind: str) -> list[tuple[float, float]]:
    """Begin and end of what the clock has computed, or of its messages."""
    return [(begin, end) for what, begin, end in clock.spans if what == kind]


def lanes(pen: Pen, names: Iterable[str], left: int, all_ms: float) -> Iterator[tuple[str, float, float, float]]:
    """Each name, which is written in bold, with the left and the top of its two lanes, and the px of a ms."""
    left = 0 if pen.is_narrow else left
    for place, name in enumerate(names):
        top = place * (108 if pen.is_narrow else 86) + (24 if pen.is_narrow else 0)
        pen.text(0, top - 6 if pen.is_narrow else top + 30, name, bold=True)
        yield name, left, top, (pen.width - left - 2) / all_ms


@drawing
def buckets(pen: Pen) -> str:
    """Notebook 03: the same bytes in 8 messages, in one, and in four."""
    for name, left, top, scale in lanes(pen, SENT_AS, 114, 90):
        count, early = SENT_AS[name]
        clock = sent(count, early=early)
        messages = of_kind(clock, "message")
        for block in range(4):
            pen.box(left + 10 * block * scale, top, 10 * scale, 26, "compute", str(3 - block))
        for begin, end in messages:
            pen.box(left + begin * scale, top + 30, (end - begin) * scale, 22, "all-reduce")
        end_x, last_x = left + BACKWARD_MS * scale, left + messages[-1][1] * scale
        pen.line(end_x, top - 4, end_x, top + 66)
        pen.line(end_x, top + 58, last_x, top + 58, "wait", 5)
        pen.text(end_x + 6, top + 18, f"{clock.exposed_us:g} ms exposed", colour="wait")
    pen.below("Grey: backward of layers 3 to 0, 40 ms. Teal: all-reduce, 32 ms of bytes and 2 ms of latency each.")
    return "Same bytes. What counts is right of the line."


@drawing
def half_the_bytes(pen: Pen) -> str:
    """Notebook 20: what half of the bytes is worth, and when not."""
    for name, left, top, scale in lanes(pen, SENT_IN, 124, 92):
        bytes_ms, waits = SENT_IN[name]
        clock = sent(4, bytes_ms=bytes_ms, waits=waits)
        said = f"{clock.exposed_us:g} ms exposed"
        pen.text(pen.width, top - 6 if pen.is_narrow else top + 18, said, "end", colour="wait")
        for what, begin, end in clock.spans:
            y, height, colour = (top, 26, "compute") if what == "compute" else (top + 30, 22, "all-reduce")
            pen.box(left + begin * scale, y, (end - begin) * scale, height, colour)
        for (_, begin), (end, _) in pairwise([*of_kind(clock, "compute"), (clock.now_us, clock.now_us)]):
            if begin < end:
                pen.line(left + begin * scale, top + 58, left + end * scale, top + 58, "wait", 5)
    pen.below(
        "Grey: backward of four layers, 40 ms. Teal: all-reduce of their gradients, 32 or 16 ms of bytes and 2 ms of "
        "latency each. Red: the rank waits."
    )
    whole, waited, hidden = (sent(4, bytes_ms=ms, waits=waits).exposed_us for ms, waits in SENT_IN.values())
    return f"Half the bytes: {hidden:g} ms exposed, not {whole:g}; {waited:g} if each message is waited for at once."


def bytes_of(strategy: str) -> float:
    """Bytes a parameter on each of four ranks, in fp32 with Adam."""
    return states_of(strategy, RANKS, RANKS).total_bytes / RANKS


@drawing
def who_keeps_what(pen: Pen) -> str:
    """Notebook 06: what data parallel and the three stages of ZeRO keep on each of four ranks."""
    whole = (("parameter", 40), ("gradient", 40), ("optimizer", 80))
    for name, left, top in pen.panels(STAGES, 262, wide=4, narrow=2):
        strategy = STAGES[name]
        states = states_of(strategy, RANKS, RANKS)
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
        "Blue: parameters, 4 bytes each. Orange: gradients, 4. Green: Adam, 8. Dashed: what a rank no longer holds."
    )
    kept = ", ".join(f"{bytes_of(name):g}" for name in STAGES.values())
    return f"{kept} bytes a parameter: each stage divides one thing more by N."


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


BORROWED = {  # of rank 0: own rows, gathered rows, rows of the gradient
    "own": (2, 0, 0), "gather": (2, 8, 0), "forward": (2, 8, 0), "free": (2, 0, 0), "gather again": (2, 8, 0),
    "backward": (2, 8, 8), "reduce": (2, 0, 2),
}  # fmt: skip


@drawing
def borrow(pen: Pen) -> str:
    """Notebook 07: what one of four ranks holds of a weight of 8 rows, from forward to the reduced gradient."""
    for name, left, top in pen.panels(BORROWED, 216, wide=7, narrow=4):
        rows = BORROWED[name]
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
        "reduced and scattered."
    )
    zero2, zero3 = (states_of(name, ROWS, RANKS).wire_elements for name in ("zero2", "zero3"))
    each = ROWS * (RANKS - 1) // RANKS
    return f"Three trips of {each} of {ROWS} rows = {zero3:g}; ZeRO-2 makes two, {zero2:g}."


MOMENTS = {"forward of 1": (1, 2), "forward of 4": (4, 5), "backward of 3": (3, 2)}  # what computes, what is ahead


def gathered_kb() -> tuple[int, int]:
    """What FSDP with one block ahead holds gathered at most, and ZeRO-3."""
    return ROOT_KB + 2 * BLOCK_KB, ROOT_KB + BLOCKS * BLOCK_KB


@drawing
def window(pen: Pen) -> str:
    """Notebook 08: which blocks FSDP holds gathered, with one of them ahead."""
    width = 46 if pen.is_narrow else 66
    for name, _, top in pen.panels(MOMENTS, 96, wide=1, narrow=1):
        now, ahead = MOMENTS[name]
        pen.text(pen.width, top + 14, f"computes {now}, gathers {ahead}", "end", colour="soft")
        for number in range(-1, BLOCKS):
            x, colour = (number + 1) * (width + 5), "gathered" if number in (-1, now, ahead) else ""
            pen.box(x, top + 24, width, 34, colour)
            pen.box(x, top + 24, width / 2, 34, "parameter")
            pen.text(x + width / 2, top + 76, "root" if number < 0 else str(number), "middle")
            if number == now:
                pen.box(x - 3, top + 21, width + 6, 40, edge="ink")
    bars = zip(("FSDP", "ZeRO-3"), gathered_kb(), strict=True)
    pen.rows({f"{kb:,} kB": [(0.0, float(kb), "gathered", name)] for name, kb in bars}, names=90)
    pen.below("Blue: the half that a rank owns. Violet: gathered from the other. Framed: computes now.")
    return "The root and two blocks, however deep the model is."


DRAWINGS = (
    last_to_come, ring, bytes_of_a_step, buckets, hidden_part, one_or_two, who_keeps_what, borrow, window, three_prices,
    column_then_row, two_axes_of_a_mesh, who_reads_what, not_with_the_others, what_is_left, fits_and_sends, one_change,
    never_reduced, pipeline_lists, zigzag_of_pieces, half_the_bytes,
)  # fmt: skip
