"""A Python script, run as ``python SCRIPT ARGS`` would run it, inside ``record``."""

import builtins
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from shardlab.recording.record import TRACED_STEP, Place, check_steps, claim, record


@dataclass(frozen=True)
class Script:
    """A script and where its record goes.

    Args:
        path: of the script.
        arguments: its own.
        directory: new or empty.
        overwrite: see ``record``.
        watch_every: likewise.

    Raises:
        ValueError: there is no such script, the directory is not empty, or ``watch_every`` is no number of steps.
    """

    path: Path
    arguments: Sequence[str]
    directory: Path
    overwrite: bool
    watch_every: int

    def __post_init__(self) -> None:
        """Check before anything runs."""
        if not self.path.is_file():
            raise ValueError(f"script: {self.path} is not a file; name a Python script, then its arguments")
        check_steps(TRACED_STEP, self.watch_every)
        claim(self.directory, Place.here(), overwrite=self.overwrite)

    def __call__(self) -> None:
        """Run it as ``__main__``. What it raises, also ``SystemExit``, leaves as it is."""
        sys.argv = [str(self.path), *self.arguments]
        sys.path[0] = str(self.path.resolve().parent)  # where ``python SCRIPT`` finds the script's own modules
        # Not by runpy, which makes ``sys.argv[0]`` what ``__file__`` is; Python makes only the latter absolute.
        main, file = ModuleType("__main__"), str(self.path.absolute())
        loader = SourceFileLoader("__main__", file)
        vars(main).update(__file__=file, __loader__=loader, __builtins__=builtins, __cached__=None)
        sys.modules["__main__"] = main  # for good: at exit too, scripts pickle what is theirs
        with record(self.directory, watch_every=self.watch_every, overwrite=self.overwrite):
            exec(loader.source_to_code(loader.get_data(file), file), vars(main))
