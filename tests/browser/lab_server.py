"""A real JupyterLab as a process of its own: free port, own settings, and all its processes can be found again."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

HOST = "127.0.0.1"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60.0
MARK = "SHARDLAB_TEST_SERVER"  # in the environment of the server, so of kernels and ranks too, orphans included

SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Every cell is in the page, also those out of sight.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
ORPHAN_S = 600  # a server whose tests were killed ends by itself, about this long after their last request
OPTIONS = [
    "--no-browser", "--allow-root", f"--ip={HOST}", "--port=0", "--LabApp.extension_manager=readonly",
    "--LabApp.expose_app_in_browser=True", f"--ServerApp.shutdown_no_activity_timeout={ORPHAN_S}",
    f"--MappingKernelManager.cull_idle_timeout={ORPHAN_S}", "--MappingKernelManager.cull_connected=True",
]  # fmt: skip


class JupyterLab:
    """Serves ``root``; starts when ``url`` is first asked for, and again after ``stop``.

    Args:
        root: folder of notebooks; they are changed when somebody saves them, so give a copy.
        home: empty folder for settings, kernels' connection files and the log.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self.root = root
        self.home = home
        self.mark = uuid.uuid4().hex
        self._server: subprocess.Popen[bytes] | None = None
        self._base = ""

    def url(self, notebook: str) -> str:
        """Where ``notebook`` (a path below ``root``) opens by itself, as one document."""
        if self._server is None:
            self._start()
        return f"{self._base}doc/tree/{notebook}?token={self.mark}&reset"

    def processes(self) -> list[psutil.Process]:
        """The server, its kernels, their ranks, and whatever these started: found by their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def stop(self) -> list[psutil.Process]:
        """Shut the server down as a terminal does; the processes that outlive it, which are then killed."""
        if self._server is None:
            return []
        processes = self.processes()
        self._server.terminate()
        _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        left = list({*left, *self.processes()})  # a process may also have been born meanwhile
        for process in left:
            process.kill()
        self._server.wait()
        self._server = None
        return left

    def log(self) -> str:
        """The end of what the server wrote."""
        return (self.home / "server.log").read_text(errors="replace")[-4000:]

    def _start(self) -> None:
        for plugin, values in SETTINGS.items():
            path = self.home / "settings" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={self.root}"]
        with (self.home / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                command, cwd=self.home, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._base = self._wait_for_url()
        except BaseException:
            self.stop()
            raise

    def _environment(self) -> dict[str, str]:
        """This process's, without what would bring in the user's own Jupyter."""
        kept = {name: value for name, value in os.environ.items() if not re.match("JUPYTER|IPYTHON|SHARDLAB", name)}
        folders = {
            "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
        }  # fmt: skip
        own = {name: str(self.home / folder) for name, folder in folders.items()}
        return {**kept, **own, "JUPYTER_TOKEN": self.mark, MARK: self.mark}

    def _wait_for_url(self) -> str:
        """The server writes this file, then listens; what is asked of it from then on waits until it can answer."""
        info = self.home / "runtime" / f"jpserver-{self._server.pid}.json"
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._server.poll() is None:
            if info.exists() and (text := info.read_text()).endswith("}"):
                found = json.loads(text)
                with socket.socket() as attempt:
                    if attempt.connect_ex((HOST, found["port"])) == 0:
                        return found["url"]
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start (exit code {self._server.poll()}):\n{self.log()}")

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except psutil.Error:  # gone meanwhile, or somebody else's
            return False
