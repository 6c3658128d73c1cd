"""Removes the folders of pools whose process was killed; importing it does that, and only the forkserver imports it.

The forkserver outlives its parent by a moment: it ends when the pipe to its parent closes. Its own exit is the only
Python that still runs after a signal has ended the parent.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from time import sleep


def _remove(forkserver_pid: int, parent_pid: int) -> None:
    if os.getpid() != forkserver_pid:  # a rank is a fork of it, and inherits what it has registered
        return
    for _ in range(100):  # the pipe closes a moment before the kernel gives the children of a process to another
        if os.getppid() != parent_pid:
            break
        sleep(0.01)
    else:
        return  # it lives, and has lost this forkserver alone: its pools go on, and find each other in their folders
    for folder in Path(tempfile.gettempdir()).glob(f"shardlab-{parent_pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(_remove, os.getpid(), os.getppid())
