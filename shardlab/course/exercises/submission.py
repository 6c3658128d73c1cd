"""What a student hands in, read statement by statement, so that a typo costs the function that it stands in.

A submission is a ``.py`` file or a notebook. Of a notebook what defines something is run: imports, functions, classes,
and names of values for which nothing has to be called but what Python has for numbers and lists. The rest of its cells
trains and checks, and is left out.
"""

import __future__

import ast
import hashlib
import json
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType

SUFFIXES = (".py", ".ipynb")
PREFIX = "submission_"
# What may be a statement of its own, where the whole cannot be parsed: with its decorators.
BEGINS = re.compile(r"^(?:@.*\n)*(?=[^\s#)\]}@])(?!(?:elif|else|except|finally)\b)", re.MULTILINE)
QUICK = {
    "abs", "bool", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "range", "round", "set", "sorted",
    "str", "sum", "tuple",
}  # fmt: skip
NAMED = re.compile(r"^(?:async +)?(?:def|class) +(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Submission:
    """What came of a file.

    Attributes:
        module: holds what could be defined.
        troubles: why something could not, by the name that was meant; '' for the first that defines no function.
    """

    module: ModuleType
    troubles: dict[str, str] = field(default_factory=dict)


def module_name(path: str) -> str:
    """Of a submission: the same one at each import, and none of a library."""
    return f"{PREFIX}{hashlib.sha256(path.encode()).hexdigest()[:16]}"


def _forget_helpers(folder: Path) -> None:
    """Forget what was imported from other folders of the student: each may have a helper of the same name."""
    files = [(name, vars(module).get("__file__")) for name, module in sys.modules.items()]
    lies_in = {name: Path(file).parent for name, file in files if file}
    others = {lies_in[name] for name in lies_in if name.startswith(PREFIX)} - {folder}
    for name in lies_in:
        if lies_in[name] in others and not name.startswith(PREFIX):
            del sys.modules[name]


def read_submission(path: str) -> Submission:
    """Run what a file defines; a statement that fails is a trouble, and the next one is run all the same."""
    # A student's own files beside it may be imported by name.
    sys.path.insert(0, str(Path(path).parent))
    _forget_helpers(Path(path).parent)
    module = sys.modules[module_name(path)] = ModuleType(module_name(path))
    module.__file__ = path
    found = Submission(module)
    for names, place, code in _statements(path):
        try:
            if not isinstance(code, CodeType):
                raise code
            exec(code, vars(module))
        except (Exception, SystemExit) as error:
            words = error.msg if isinstance(error, SyntaxError) else error
            for name in names:
                found.troubles.setdefault(name, f"{place}: {type(error).__name__}: {words}")
    return found


def _statements(path: str) -> Iterator[tuple[list[str], str, CodeType | Exception]]:
    """The names that a statement defines, where it stands, and its code or why there is none."""
    flags = 0
    for source_name, text in _sources(Path(path)):
        # Read by tracebacks, and not from a disk, where a cell is no file.
        linecache.cache[source_name] = (len(text), None, text.splitlines(keepends=True), source_name)
        is_cell = source_name != path
        for block, first_line in _blocks(text):
            name = "".join(NAMED.findall(block)[:1])
            try:
                nodes = ast.parse("\n" * (first_line - 1) + block).body
            except SyntaxError as error:
                yield [name], f"{Path(source_name).name}, line {error.lineno or first_line}", error
                continue
            for node in nodes:
                names, place = _names(node), f"{Path(source_name).name}, line {node.lineno}"
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    flags = __future__.annotations.compiler_flag  # the others are Python's by now
                if not is_cell or _defines(node):
                    yield names, place, compile(ast.Module([node], []), source_name, "exec", flags)
                elif not isinstance(node, ast.Expr):
                    yield names[:-1], place, RuntimeError("what calls something is not run in a notebook")


def _sources(path: Path) -> Iterator[tuple[str, str]]:
    """The text of a file, or of each cell with code, under the name that a traceback gives."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix.lower() == ".py":
        yield str(path), text
        return
    try:
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("it is no notebook of format 4; open it in Jupyter, and save it") from error
    for number, (kind, source) in enumerate(cells):
        if kind == "code":
            # IPython's own lines, for a shell or a magic, are no Python.
            yield f"{path}, cell {number}", re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)


def _blocks(text: str) -> Iterator[tuple[str, int]]:
    """The whole text if it can be parsed; else what begins at the margin, each with its first line."""
    try:
        ast.parse(text)
    except SyntaxError:
        begins = [found.start() for found in BEGINS.finditer(text)]
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
            yield text[begin:end], text.count("\n", 0, begin) + 1
    else:
        yield text, 1


def _names(node: ast.stmt) -> list[str]:
    """What a statement gives a value; of all but a function or class also '', which is last."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    parts = [*ast.walk(node)]
    imported = [one.asname or one.name.partition(".")[0] for one in parts if isinstance(one, ast.alias)]
    stored = [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
    defined = [part.name for part in parts if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    return [*imported, *stored, *defined, ""]


def _defines(node: ast.AST) -> bool:
    """Whether a statement of a cell defines something, and runs next to nothing for it."""
    if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):  # an import, and what stands in its place
        inside = ast.iter_child_nodes(node)
        return all(_is_quick(part) if isinstance(part, ast.expr) else _defines(part) for part in inside)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return _is_quick(node)
    others = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass
    return isinstance(node, others)


def _is_quick(node: ast.AST) -> bool:
    """Whether nothing is called but ``QUICK`` now; what a lambda calls is called later."""
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in QUICK):
        return False
    return isinstance(node, ast.Lambda) or all(map(_is_quick, ast.iter_child_nodes(node)))
