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
    "single": 887, "ddp": 1045, "bucketed": 1247, "zero1": 1504, "zero2": 1536, "zero3": 1856, "fsdp": 2431,
}  # fmt: skip
ROOMS = {
    "__init__": 30, "__main__": 2, "analysis": 1746, "bench": 232, "cli": 1104, "comm": 2347, "data_sets": 161,
    "engines": 4871, "exercises": 1461, "experiment": 3195, "export": 609, "faults": 366, "field_types": 19,
    "installed": 26, "lab": 1245, "launch": 1666, "meta_device": 34, "models": 177, "optimizers": 236, "partition": 462,
    "planner": 1797, "plots": 1903, "recording": 994, "tables": 100, "tensor_parallel": 1400,
    "testing": 365, "trace": 1164, "units": 204, "vocabulary": 84, "widgets": 1325,
}  # fmt: skip
# Guards, 612 lines of them, stand in engines. What compare and plan answer took 180 more in experiment, 90 in plots and
# 30 in widgets, the bar below a cell 60 in launch and 15 in lab; one more in engines tells whether full_params() has
# changed anything, seven let what is refused of a gradient go with it. Why a step is long took 870 in analysis and 200
# in lab; forecasts took 975 in planner (18 of them for an allocator that asks again), 390 in experiment, 360 in lab,
# 360 in cli (15 of them for steps that were measured elsewhere, 37 for what a newcomer could not tell: what is planned,
# whether it fits, whose error stands beside it) and 134 in comm, of which 4 are in what every strategy pulls in: a
# clock that can be told. Two lines more split what-if's messages by whether a link is recorded.
WHOLE = 29_325

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
