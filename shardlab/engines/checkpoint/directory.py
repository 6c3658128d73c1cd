"""A checkpoint's folder: the old version stays whole until the new one is.

    directory/
      latest                       one line, the name of the version that counts
      version-000002/              manifest.json, rank-00000.safetensors, rank-00001.safetensors, ...
      version-000003.partial/      being written, or left by a run that was killed

A rename is atomic, a folder full of files is not. So a version is written under another name, brought to the disk,
renamed, and only then does ``latest``, one small file that is replaced in one go, name it. Wherever a run is killed,
``latest`` names a complete version; the next save clears away what was left.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

LATEST = "latest"
_PARTIAL = ".partial"
_VERSION = re.compile(r"version-(\d+)(\.partial)?")


def begin(directory: Path) -> str:
    """Make the folder of a new version, and clear away versions that were never finished.

    Returns:
        The new version's name.

    Raises:
        ValueError: ``directory`` is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory: {directory} is not a directory")
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [0]
    for entry in directory.iterdir():
        if found := _VERSION.fullmatch(entry.name):
            numbers.append(int(found[1]))
            if found[2]:  # of a run that was killed: all ranks of this one have just agreed, so none writes here
                shutil.rmtree(entry)
    version = f"version-{max(numbers) + 1:06d}"
    partial_folder(directory, version).mkdir()
    return version


def partial_folder(directory: Path, version: str) -> Path:
    """Where a version is written."""
    return directory / (version + _PARTIAL)


def publish(directory: Path, version: str) -> None:
    """Make a version that is completely written the one that counts, then remove the others."""
    partial = partial_folder(directory, version)
    # A rename may reach the disk before what it names, so each is preceded by a sync of what it names.
    sync(partial)
    partial.rename(directory / version)
    sync(directory)
    note = directory / (LATEST + _PARTIAL)
    _write_text(note, version + "\n")
    note.replace(directory / LATEST)
    sync(directory)
    # Only now does no name lead to the older versions.
    for entry in directory.iterdir():
        if _VERSION.fullmatch(entry.name) and entry.name != version:
            shutil.rmtree(entry)


def latest(directory: Path) -> Path:
    """The folder of the version that counts.

    Raises:
        ValueError: there is no such directory, or no complete checkpoint in it.
    """
    if not directory.is_dir():
        raise ValueError(f"directory: {directory} does not exist")
    if not (directory / LATEST).is_file():
        raise ValueError(f"directory: {directory} holds no complete checkpoint (it has no file '{LATEST}')")
    folder = directory / (directory / LATEST).read_text().strip()
    if not folder.is_dir():
        raise ValueError(f"directory: {folder}, which '{LATEST}' names, does not exist")
    return folder


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, one line for an entry of a list, and bring it to the disk."""
    lines = [f"{json.dumps(key)}: {_on_lines(entry)}" for key, entry in value.items()]
    _write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and bring it to the disk."""
    save_file(dict(tensors), path)
    sync(path)


def sync(path: Path) -> None:
    """Bring a file's contents, or a folder's entries, to the disk."""
    # A folder has entries of its own to sync, and can be opened only by descriptor.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def _on_lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value, allow_nan=False)
    return "[\n " + ",\n ".join(json.dumps(entry, allow_nan=False) for entry in value) + "\n]"
