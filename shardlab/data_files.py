"""Where data files lie: inside the package when it is installed from a wheel, beside it in a checkout."""

from pathlib import Path


def data_path(name: str) -> Path:
    """Path of the file ``name`` of the project's ``data`` folder, for example ``grammar.json``.

    Raises:
        FileNotFoundError: it is in neither place; the message names both.
    """
    package = Path(__file__).resolve().parent
    places = (package / "data" / name, package.parent / "data" / name)
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"data file {name!r} is neither {places[0]} nor {places[1]}")
