"""A command of the terminal, in a cell: the package's own commands are those of the notebook's Python."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZE = {"COLUMNS": "80", "LINES": "24", "TERM": "dumb"}  # all three, or a program asks elsewhere


def terminal(command: str, folder: str | Path = ".") -> None:
    """Print a shell command after a dollar sign, run it, and print what it prints.

    Args:
        command: one line, for example 'shardlab plan --params 7.5B --ranks 64'.
        folder: where it runs.

    Raises:
        subprocess.CalledProcessError: the command failed; the error's ``output`` is what it printed.
    """
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    plain = SIZE | {"PATH": own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, shell=True, cwd=folder, env=os.environ | plain, **output)
    lines = (line.rstrip() for line in done.stdout.splitlines())
    sys.stdout.write("\n".join([f"$ {command}", *lines, ""]))
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
