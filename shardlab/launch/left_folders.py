"""Removes the folders of pools whose process was killed; importing it does that, and only the forkserver imports it.

The forkserver outlives its parent by a moment: it ends when the pipe to its parent closes. Its own exit is the only
Python that still runs after a signal has ended the parent.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def _remove(forkserver_pid: int, parent_pid: int) -> None:
    if os.getpid() == forkserver_pid:  # a rank is a fork of it, and inherits what it has registered
        for folder in Path(tempfile.gettempdir()).glob(f"shardlab-{parent_pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)


atexit.register(_remove, os.getpid(), os.getppid())
