"""Notebooks that are tested leave no trace in the progress of whoever tests them: their kernels inherit this."""

import atexit
import os
import tempfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)
os.environ["SHARDLAB_PROGRESS"] = str(Path(_FOLDER.name) / "exercises.json")

collect_ignore = ["kaggle.ipynb"]  # for a machine with two GPUs
