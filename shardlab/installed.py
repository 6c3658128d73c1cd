"""What is installed: the version of the package, its folder, its data files, and Python's own library."""

import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parent
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})

try:
    __version__ = version("shardlab")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"


@cache
def is_standard_library(path: str) -> bool:
    """Whether a frame of this file belongs to Python itself, so that its line is never the user's."""
    # Other packages are installed in a folder of the standard library, except in a virtual environment.
    if "/site-packages/" in path or "/dist-packages/" in path:
        return False
    return path.startswith((*_STANDARD_LIBRARY, "<frozen "))


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
