"""What is installed: the version of the package, its folder, and its data files."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
