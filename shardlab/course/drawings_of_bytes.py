"""Six ideas, drawn: what a rank holds, writes and sends, and what is left. See ``drawings.py``."""

from itertools import pairwise

from shardlab.course.drawing import Pen, drawing, stacked
from shardlab.course.drawings_of_ranks import OF_RANKS
from shardlab.partition.chunks import even_bounds
from shardlab.planner.formulas import PRECISIONS, ModelStates, model_states

LAYERS, KEPT_MB = 3, 6.0  # of a million parameters each; what a layer keeps for backward
BLOCKS, SHARDED_OVER, INPUT_MB = 4, 2, 0.5  # likewise; the input of a block
NUMBERS, WRITERS, READERS = 12, 4, 3
BILLIONS, GPUS, GPU_GB, ROW_GB = 3, 4, 40.0, 2.5
LIMIT = 11.0  # bytes a parameter
CHANGES = {  # the strategy, ranks, buckets
    "as it is": ("ddp", 2, 4), "8 ranks": ("ddp", 8, 4), "ZeRO-1": ("zero1", 2, 4), "ZeRO-3": ("zero3", 2, 4),
    "small buckets": ("ddp", 2, 16), "a slow link": ("ddp", 2, 4),
}  # fmt: skip
FILLED = ("parameter", "all-reduce", "gathered")  # what has changed of holds, sends, messages
STAGES = {"data parallel": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}


def states_of(strategy: str, num_params: float, num_ranks: int) -> ModelStates:
    """In float32 with Adam."""
    return next(one for one in model_states(num_params, num_ranks, "fp32") if one.strategy == strategy)


def held(strategy: str, num_params: float, num_ranks: int) -> dict[str, float]:
    """What a rank has at rest, by colour."""
    states = states_of(strategy, num_params, num_ranks)
    kinds = states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes
    return dict(zip(("parameter", "gradient", "optimizer"), kinds, strict=True))


def over_a_step() -> dict[str, dict[str, float]]:
    """MB by colour, at rest and after each layer of forward and backward."""
    whole, moments = held("ddp", LAYERS, 1), {"rest": (LAYERS, 0)}
    moments |= {f"F{layer}": (0, layer + 1) for layer in range(LAYERS)}
    moments |= {f"B{layer}": (LAYERS - layer, layer) for layer in reversed(range(LAYERS))}
    return {
        name: whole | {"gradient": whole["gradient"] * gradients / LAYERS, "activation": kept * KEPT_MB}
        for name, (gradients, kept) in moments.items()
    }


@drawing
def bytes_of_a_step(pen: Pen) -> str:
    """Notebook 02: what one process holds of three layers, from step to step."""
    moments = over_a_step()
    floor = 3 * max(sum(parts.values()) for parts in moments.values()) + 44
    for name, left, top in pen.panels(moments, floor + 12, wide=7, narrow=4):
        y = top + floor
        for colour in ("parameter", "optimizer", "gradient", "activation"):
            size = moments[name][colour]
            y -= 3 * size
            if size:
                pen.box(left, y, 64, 3 * size, colour, f"{size:g}")
        pen.text(left + 32, y - 6, f"{sum(moments[name].values()):g} MB", "middle")
    pen.below(
        "Blue: parameters. Green: Adam. Orange: gradients, cleared before forward. Sand: activations, kept from a "
        "layer's forward (F) to its backward (B)."
    )
    rest, *others = (sum(parts.values()) for parts in moments.values())
    said = f"{rest:g} MB at rest, {rest / LAYERS:g} bytes a parameter. The peak, {max(others):g}, is where all "
    return said + "activations are kept."


def held_by_option() -> dict[str, tuple[dict[str, float], str]]:
    """MB by colour that a rank has on its GPU, and the price: of blocks of a million parameters, each a unit."""
    rest, of_block = held("zero3", BLOCKS, SHARDED_OVER), PRECISIONS["fp32"].parameter
    float32 = rest | {"gathered": 2.0 * of_block, "activation": BLOCKS * KEPT_MB}
    sent = BLOCKS * (SHARDED_OVER - 1) / SHARDED_OVER
    return {
        "FSDP": (float32, f"sends {12 * sent:g} MB"),
        "bf16": (float32 | {"gathered": 1.0 * of_block, "activation": BLOCKS * KEPT_MB / 2},
                 f"rounds; sends {8 * sent:g} MB"),
        "offload all": (float32 | dict.fromkeys(rest, 0.0), f"bus: {12 * BLOCKS / SHARDED_OVER:g} MB"),
        "recompute": (float32 | {"activation": BLOCKS * INPUT_MB + KEPT_MB}, "forward twice"),
    }  # fmt: skip


@drawing
def three_prices(pen: Pen) -> str:
    """Notebook 09: what rounding, host memory and recomputation save on a rank of FSDP."""
    options = held_by_option()
    pen.rows(
        {name: stacked(parts.items()) for name, (parts, _) in options.items()},
        {name: price for name, (_, price) in options.items()},
        names=100, room=180,
    )  # fmt: skip
    pen.below(
        "Blue, orange, green: a rank's half of parameters, gradients, Adam. Violet: gathered. Sand: activations. At "
        "the right: the price."
    )
    whole, *less = (sum(parts.values()) for parts, _ in options.values())
    return f"{whole:g} MB become {', '.join(f'{one:g}' for one in less)}: each saves another part, at another price."


def read_by_rank() -> list[list[tuple[int, int, int]]]:
    """Of each reader the pieces that it reads: begin, end, and the rank that wrote it."""
    written, wanted = (list(pairwise(even_bounds(NUMBERS, num))) for num in (WRITERS, READERS))
    return [
        [(max(low, begin), min(high, end), rank) for rank, (begin, end) in enumerate(written)
         if max(low, begin) < min(high, end)]
        for low, high in wanted
    ]  # fmt: skip


@drawing
def who_reads_what(pen: Pen) -> str:
    """Notebook 12: which files the ranks of another number read."""
    written, readers = list(pairwise(even_bounds(NUMBERS, WRITERS))), read_by_rank()
    files = [(begin, end, OF_RANKS[rank], f"file {rank}") for rank, (begin, end) in enumerate(written)]
    at = pen.rows({"saved": files})
    foot = pen.height
    pen.height += 40
    pieces = [piece for one in readers for piece in one]
    pen.rows({"read": [(begin, end, OF_RANKS[rank], f"{end - begin}") for begin, end, rank in pieces]})
    top = pen.height - 28
    for begin, end, rank in pieces:
        x = at(begin + (end - begin) * (2 / 3 if pen.is_narrow else 1 / 2))  # beside the word 'read'
        pen.arrow(x, foot, x, top, OF_RANKS[rank])
    for rank, piece in enumerate(readers):
        left, right = at(piece[0][0]), at(piece[-1][1])
        pen.box(left, top, right - left, 26, edge="ink")
        pen.text((left + right) / 2, top + 44, f"rank {rank}", "middle")
    return (
        f"{WRITERS} wrote {NUMBERS // WRITERS} each, {READERS} read {NUMBERS // READERS} each, from "
        f"{', '.join(str(len(piece)) for piece in readers)} files: the manifest says where each number is."
    )


def rows_left(strategy: str) -> int:
    """Rows whose activations fit on a GPU beside what is at rest."""
    return max(0, int((GPU_GB - states_of(strategy, BILLIONS, GPUS).total_bytes) // ROW_GB))


@drawing
def what_is_left(pen: Pen) -> str:
    """Notebook 14: how many rows fit beside what is at rest."""
    rows = {
        name: stacked((held(strategy, BILLIONS, GPUS) | {"activation": ROW_GB * rows_left(strategy)}).items())
        for name, strategy in STAGES.items()
    }
    notes = {name: f"{rows_left(strategy)} rows" for name, strategy in STAGES.items()}
    at = pen.rows(rows, notes, names=120, room=70)
    pen.line(at(GPU_GB), 4, at(GPU_GB), pen.height)
    pen.below(
        f"{BILLIONS} billion parameters in float32 with Adam, {GPUS} GPUs of {GPU_GB:g} GB (the line). Sand: "
        f"activations, {ROW_GB:g} GB a row."
    )
    fitting = ", ".join(f"{rows_left(strategy)}" for strategy in STAGES.values())
    return f"{fitting} rows: what is at rest is divided by N, a row's activations are not."


@drawing
def fits_and_sends(pen: Pen) -> str:
    """Notebook 15: what each strategy holds and sends on two ranks, and a limit."""
    rows, begin = {}, states_of("ddp", 1, 2).total_bytes + 2
    for name, strategy in STAGES.items():
        sent = states_of(strategy, 1, 2).wire_bytes
        rows[name] = [*stacked(held(strategy, 1, 2).items()), (begin, begin + sent, "all-reduce", f"{sent:g}")]
    at = pen.rows(rows, names=120)
    pen.line(at(LIMIT), 4, at(LIMIT), pen.height)
    pen.below(
        f"Two ranks, bytes a parameter. Blue, orange, green: held at rest; the line: a limit of {LIMIT:g}. Teal: sent "
        "in a step."
    )
    fitting = [name for name, strategy in STAGES.items() if states_of(strategy, 1, 2).total_bytes <= LIMIT]
    best = min(fitting, key=lambda name: states_of(STAGES[name], 1, 2).wire_bytes)
    return f"{' and '.join(fitting)} fit, and {best} sends least. That much follows from shapes; a run tells the time."


def bytes_and_messages() -> dict[str, tuple[float, float, int]]:
    """Of each setting the bytes a parameter that a rank holds and sends, and its messages."""
    a_bucket = {"ddp": 1, "zero1": 2, "zero3": 3}  # an all-reduce; reduce-scatter and all-gather; another all-gather
    found = {}
    for name, (strategy, num_ranks, buckets) in CHANGES.items():
        states = states_of(strategy, num_ranks, num_ranks)
        found[name] = states.total_bytes / num_ranks, states.wire_bytes / num_ranks, buckets * a_bucket[strategy]
    return found


@drawing
def one_change(pen: Pen) -> str:
    """Notebook 16: what one change of the settings changes."""
    found, (left, step) = bytes_and_messages(), (118, 61) if pen.is_narrow else (150, 120)
    titles = ("holds", "sends", "msgs" if pen.is_narrow else "messages", "time")
    for column, title in enumerate(titles):
        pen.text(left + column * step, 14, title, bold=True)
    for row, (setting, numbers) in enumerate(found.items()):
        y = 26 + 34 * row
        pen.text(0, y + 18, setting)
        for column, (number, before, colour) in enumerate(zip(numbers, found["as it is"], FILLED, strict=True)):
            pen.box(left + column * step, y, step - 8, 26, colour if number != before else "", f"{number:g}")
        pen.box(left + 3 * step, y, step - 8, 26, words="run it")
    pen.below("A rank's bytes for a parameter, and its messages of parameters and gradients. Filled: changed.")
    return "One change at a time: its bytes are known before the run, its time after it."
