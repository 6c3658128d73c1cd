"""Kernels for nbval that are forks of the server that forks ranks, with all imports done, and so are their ranks.

A kernel of its own, with a server of its own for its ranks, would import torch twice for each notebook. The saved
outputs, with which nbval compares, come from such kernels; the test of JupyterLab starts one, too.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from shardlab.launch import processes
from tests.conftest import PRELOAD
from tests.launch.helpers import become_program

# Beside what tests have imported; the server is theirs, too.
OF_NOTEBOOKS = ["shardlab.course", "shardlab.plots", "plotly.graph_objects", "ipykernel.kernelapp"]


class ForkedKernel:
    """Stands for the ``subprocess.Popen`` that ``jupyter_client.launcher.launch_kernel`` returns."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, cwd: str, env: dict[str, str], **_: Any) -> None:
        context = processes._forkserver([*PRELOAD, *OF_NOTEBOOKS])
        ready, other = context.Pipe(duplex=False)
        options = command[command.index("ipykernel_launcher") + 1 :]
        self._process = context.Process(target=_kernel, args=(options, cwd, env, other))
        with processes.hidden_main():
            self._process.start()
        other.close()
        ready.recv()  # before that a signal to its group would be one to the server's
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        for folder in Path(tempfile.gettempdir()).glob(f"shardlab-{self.pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)  # of pools: a server of its own would do that
        return self.poll()

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _kernel(options: list[str], cwd: str, env: dict[str, str], ready: Connection) -> None:
    """As ``python -m ipykernel_launcher`` in a session of its own; ends with the tests."""
    import pandas
    from ipykernel.kernelapp import IPKernelApp

    pandas.set_option("display.max_columns", 20)  # as it is where pandas is imported in a kernel
    become_program(cwd, env, os.devnull)
    Thread(target=_end_with_parent, daemon=True).start()
    ready.send(None)
    IPKernelApp.launch_instance(options)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)
