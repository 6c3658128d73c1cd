"""Code lines have a budget: those of each strategy with all that it pulls in, of each room, and of the whole package.

A code line has code on it: blank lines, comments and docstrings do not count. Who takes lines out lowers the budget;
who needs more raises it and says why, in a comment beside the number.
"""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from math import ceil

from tests.test_architecture import PACKAGE, STRATEGY_FILES, closure, modules, room

SLACK, FEW = 0.01, 3  # a budget lies at most one percent, or so few lines, above what stands
# Each with the files that it imports, also for the type checker; without packages' __init__ and guards.
CLOSURES = {
    "single": 717, "ddp": 735, "bucketed": 1072, "zero1": 1395, "zero2": 1405, "zero3": 1604, "fsdp": 2199,
}  # fmt: skip
ROOMS = {
    "__init__": 30, "__main__": 2, "analysis": 706, "bench": 924, "cli": 1786, "comm": 2718, "context": 221,
    "course": 5677, "data_sets": 80, "dry": 325, "engines": 5206, "experiment": 4290, "export": 672, "field_types":
    19, "forecast": 1631, "installed": 29, "launch": 1747, "meta_device": 34, "models": 185, "optimizers": 234,
    "partition": 685, "pipeline": 374, "planner": 670, "plots": 1481, "recording": 1081, "records": 473, "same":
    2215, "schedules": 226, "tensor_parallel": 1352, "testing": 633, "trace": 947, "units": 207, "vocabulary": 80,
    "why": 1209,
}  # fmt: skip
# Guards stand in engines. What took most of late: scripts judged by one process (same 1,780, course 300), a model's
# configuration counted by its architecture (forecast 230, cli 100), the error of this very job (forecast 130), searches
# that fit (forecast 150), a card that is measured (bench 160, cli 60, planner 25), what to try next
# (forecast 30, cli 20), unlike steps that are traced (trace 140), strategies checked over checkpoints (testing 210),
# losses that are weighed or send (experiment 300), rows over two axes (engines 130, planner 60, cli 20), pipelines and
# their schedules (470), drawings (600, one a notebook), a block over ranks that is weighed (course 120), mistakes
# that are recognised, memory over time and schedules that are drawn (course 130), marks that are never silent (35),
# small steps that take no longer than torch's (comm 14, engines 25): messages that begin in the caller's thread, views
# of a buffer that are made once; what is warned of in every table of forecasts, and cards that would do (cli 34), ways
# to launch that a card refuses (bench 7); messages that nobody can wait for (comm 17), gradients scaled after backward
# and several optimizers after one backward (same 45); letters, which wake no thread (comm 170);
# what checkpoints compute again in a mode (comm 24, context 28), what a forecast is a range of (cli 20, forecast 15);
# guards that look once at the micro-batches of a pipeline (engines 20); messages in one order (comm 5); copies
# of heads, norms that are not fused, what is said of --lora and of links (forecast 15, cli 14); a drawing (course 33);
# sparse tensors that are recorded or refused (comm 5, engines 6, experiment 5, same 4, trace 10), an optimizer that
# steps inside backward (same 5); steps that a scaler skipped (experiment 15); steps that are given a closure, and SAM's
# first gradients (same 33), parts that a checkpoint calls again, and meshes of killed runs (recording 13), what stages
# refuse of tied weights and options (pipeline 4, engines 7), dtypes that travel to ranks (launch 7), plans that leave
# the reader's model, loss and loader as they are, arrays and strings that are cut (experiment 47), penalties (same 7);
# the reader's own autocast, units of stages and losses that call backward (experiment 23), an emulated link's share
# of a message (why 10); options that differ by rank (engines 7), results that cannot be made again (launch 7), an
# optimizer that is none, a dataset's generator (experiment 16); steps that send unlike bytes, what NEXT keeps
# (experiment 53, recording 10); when a message of stages leaves (why 17); wholes in front of divided layers
# (tensor_parallel 53, comm 6); threads, forks and storages of ranks (launch 43); what a class writes (course 68), what
# else ranks do that one process does not (same 46), files and numbers that are none (cli 7, planner 5); a function that
# had two ideas (forecast 2); hooks that are out while a schedule runs, and its line, looked for once (engines 20,
# comm 27); an optimizer that steps in backward (engines 11), who is missing of a group (launch 9), losses that are not
# finite and what figures leave out (plots 46, analysis 8), gradients over the rows of all ranks (same 61, export 1),
# refusals of batches, optimizers and options without effect (experiment 15, cli 22), a slower host (forecast 23).
WHOLE = 38_149

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines with code, docstrings of attributes left out too."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, node.end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


@cache
def sizes() -> dict[str, int]:
    found = {}
    for module in modules():
        path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        found[module] = code_lines(path.read_text())
    return found


def in_closure(strategy: str) -> int:
    start = f"shardlab.engines.{strategy}"
    files = {start, *closure(start)}
    return sum(sizes()[name] for name in files if not name.endswith("__init__") and "guards" not in name.split("."))


def wrong(what: str, stands: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """One line for each number that has to change, and what to do about it."""
    said = []
    for name in sorted({*stands, *budgets}):
        if name not in budgets:
            said.append(f'{what} {name} has no budget: add "{name}": {stands[name]}')
        elif name not in stands:
            said.append(f"{what} {name} is gone: take its budget out")
        elif stands[name] > budgets[name]:
            said.append(
                f"{what} {name} has {stands[name]} code lines, and its budget is {budgets[name]}: take lines out, or "
                "raise the budget and say why beside it"
            )
        elif budgets[name] > stands[name] + max(FEW, ceil(SLACK * stands[name])):
            said.append(f'{what} {name} has only {stands[name]} code lines: lower its budget, "{name}": {stands[name]}')
    return said


def test_nothing_is_over_its_budget_and_no_budget_is_left_above_what_stands() -> None:
    rooms = Counter[str]()
    for module, lines in sizes().items():
        rooms[room(module)] += lines
    assert not [
        *wrong("strategy", {name: in_closure(name) for name in STRATEGY_FILES}, CLOSURES),
        *wrong("room", rooms, ROOMS),
        *wrong("package", {"shardlab": rooms.total()}, {"shardlab": WHOLE}),
    ]


def test_only_code_is_counted() -> None:
    text = '''"""Head."""

import a  # why

# alone
class B:
    """Doc."""

    c = """one
    two"""
    """Of c."""
'''
    assert code_lines(text) == 4
    assert wrong("room", {"a": 11, "b": 9, "new": 1}, {"a": 10, "b": 20, "old": 1}) == [
        "room a has 11 code lines, and its budget is 10: take lines out, or raise the budget and say why beside it",
        'room b has only 9 code lines: lower its budget, "b": 9',
        'room new has no budget: add "new": 1',
        "room old is gone: take its budget out",
    ]
