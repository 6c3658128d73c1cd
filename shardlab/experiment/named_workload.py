"""The place of a workload, as a terminal names it: ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from shardlab.experiment.workload import Workload
from shardlab.vocabulary import class_of


def workload_at(place: str) -> Workload:
    """The workload that a file or an importable module holds under a name.

    A file is read anew each time, so it may have been edited since.

    Raises:
        ValueError: there is no such file, module or name, importing fails, or the name is no ``Workload``.
    """
    source, _, name = place.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(
            f"workload: {place!r} is not FILE.py:NAME or PACKAGE.MODULE:NAME, for example train.py:workload"
        )
    module = _from_file(Path(source)) if source.endswith(".py") else _imported(source)
    found = getattr(module, name, None)
    if isinstance(found, Workload):
        return found
    known = [key for key, value in vars(module).items() if isinstance(value, Workload)]
    what = "has no" if found is None else f"has {class_of(found)}, not a Workload, as"
    raise ValueError(f"workload: {source} {what} {name!r}; its workloads are: {', '.join(known) or 'none'}")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"workload: there is no file {path.absolute()}")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: it may import its neighbours, here and on the ranks
    known = sys.modules.get(path.stem)
    is_free = known is None or getattr(known, "__file__", None) == str(path.absolute())
    name = path.stem if is_free else f"workload_{path.stem}"  # a file may be called like a module, random.py say
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickling looks up what it defines
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)  # half of it
        raise ValueError(f"workload: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"workload: module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
