"""What is here: the package's version, folder and data, names that are imported when used, and this machine's cores.

No torch: the command line shows its options, and the default number of ranks, without it.
"""

import ast
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent

try:
    __version__ = version("shardlab")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"


def data_path(name: str) -> Path:
    """Path of a file or folder of the project's ``data`` folder, for example ``grammar.json``.

    The folder lies inside the package when it is installed from a wheel, and beside it in a checkout.

    Raises:
        FileNotFoundError: it is in neither place; the message names both.
    """
    package = PACKAGE.resolve()
    places = (package / "data" / name, package.parent / "data" / name)
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(f"data {name!r} is neither {places[0]} nor {places[1]}")


def imported_when_used(package: str, file: str) -> Callable[[str], Any]:
    """A package's ``__getattr__``: what it imports for type checkers is imported when it is first used.

    Args:
        package: its name.
        file: its ``__init__``, which says the modules once, in imports below ``if TYPE_CHECKING``.
    """
    imports = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.ImportFrom))
    module_of = {name.name: node.module for node in imports for name in node.names if node.col_offset}

    def of_package(name: str) -> Any:
        if (module := module_of.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(module_of))}")
        return getattr(import_module(module), name)

    return of_package


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
