"""The process all ranks are forked from: it has imported torch once, so that a rank is up in hundredths of a second.

It is Python's own forkserver: one small process per parent, free of CUDA and of threads, which ends with its parent.

It and Python's resource tracker have a session of their own. What a terminal or Jupyter sends to the parent's process
group is not for them: they outlive the parent by a moment, to remove what it has left.
"""

import multiprocessing
import multiprocessing.forkserver
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.context import ForkServerContext
from types import ModuleType
from typing import Any

_SPAWN_IN_THIS_SESSION = util.spawnv_passfds
_ALWAYS = ("torch", "shardlab.launch.worker", "shardlab.launch.left_folders")
# Without preloading, each rank would import these when it builds an optimizer or a table: 0.5 to 2 s of CPU time.
# The forkserver preloads them if the parent uses them too; if not, its first start takes only the import of torch.
_IF_PARENT_HAS = {
    "torch._dynamo": ("torch._dynamo",),
    "pandas": ("pandas",),
    "shardlab.engines": ("shardlab.engines", "torch._dynamo"),  # which torch imports with the first optimizer
    "shardlab.experiment.comparison": ("shardlab.experiment.run", "torch._dynamo"),
}


def context(preload: Sequence[str] = ()) -> ForkServerContext:
    """Start the forkserver if it does not run yet, without waiting for it.

    Args:
        preload: more modules for it to import; without effect once it runs.
    """
    forkserver = multiprocessing.get_context("forkserver")
    shared = (name for known, names in _IF_PARENT_HAS.items() if known in sys.modules for name in names)
    forkserver.set_forkserver_preload(list(dict.fromkeys((*_ALWAYS, *shared, *preload))))
    # Started here, and not at the first process, which would start it in this process's group.
    with hidden_main(), _own_session():
        multiprocessing.forkserver.ensure_running()
    return forkserver


@contextmanager
def hidden_main() -> Iterator[None]:
    """Give multiprocessing an empty ``__main__``, so that no rank runs the user's script again.

    Functions travel by cloudpickle and need no ``__main__`` on the other side: a script works without a guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _own_session() -> Iterator[None]:
    # Multiprocessing has no public way to say in which session its helpers run.
    util.spawnv_passfds = _spawn
    try:
        yield
    finally:
        util.spawnv_passfds = _SPAWN_IN_THIS_SESSION


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    process = subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True)
    process.returncode = 0  # multiprocessing waits for it, and subprocess is not to
    return process.pid
