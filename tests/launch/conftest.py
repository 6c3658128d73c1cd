"""Scripts as a user would start them, ended with the test in every case."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.helpers import start_python

StartScript = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[StartScript]:
    """``start_script(text)`` runs ``text`` as a script in a session of its own, with the checkout importable."""
    started = []

    def start(text: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(text)
        started.append(start_python(path, stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        with process:  # closes its pipe and reaps it
            pass
