"""Notebooks run unchanged on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("name", ["00_ranks_in_a_cell", "08_fsdp_units"])
def test_a_notebook_runs_unchanged(name):
    pytest.importorskip("nbval", reason="needs nbval and jupyter")
    pytest.importorskip("plotly", reason="figures need plotly")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--nbval-lax"]
    done = subprocess.run(
        [*command, "--nbval-current-env", str(NOTEBOOKS / f"{name}.ipynb")],
        capture_output=True, text=True, timeout=600, cwd=NOTEBOOKS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
