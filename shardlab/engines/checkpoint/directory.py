"""A checkpoint's folder: the old version stays until the new one is complete.

    directory/
      latest                       one line, the name of the current version
      version-000002/              manifest.json, rank-00000.safetensors, rank-00001.safetensors, ...
      version-000003.partial/      being written, or left by a run that was killed

A rename is atomic, writing a folder of files is not. So a version is written under another name, synced to disk and
renamed; only then is ``latest``, one small file that is replaced atomically, set to its name. Wherever a run is killed,
``latest`` names a complete version; the next save removes what was left.
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
    """Make the folder of a new version, and remove versions that were never finished.

    Returns:
        The new version's name.

    Raises:
        ValueError: ``directory`` is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory: {directory} is a file; give a directory")
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [0]
    for entry in directory.iterdir():
        if found := _VERSION.fullmatch(entry.name):
            numbers.append(int(found[1]))
            if found[2]:  # left by a run that was killed; all ranks of this one are here, so none writes
                shutil.rmtree(entry)
    version = f"version-{max(numbers) + 1:06d}"
    partial_folder(directory, version).mkdir()
    return version


def partial_folder(directory: Path, version: str) -> Path:
    """The folder in which a version is written."""
    return directory / (version + _PARTIAL)


def publish(directory: Path, version: str) -> None:
    """Make a completely written version the current one, then remove the others."""
    partial = partial_folder(directory, version)
    # A rename may reach the disk before the data it names, so each rename comes after a sync of that data.
    sync(partial)
    partial.rename(directory / version)
    sync(directory)
    note = directory / (LATEST + _PARTIAL)
    _write_text(note, version + "\n")
    note.replace(directory / LATEST)
    sync(directory)
    # Only now, when ``latest`` on the disk no longer names an older version.
    for entry in directory.iterdir():
        if _VERSION.fullmatch(entry.name) and entry.name != version:
            shutil.rmtree(entry)


def latest(directory: Path) -> Path:
    """The folder of the current version.

    Raises:
        ValueError: the directory does not exist, or holds no complete checkpoint.
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
    """Write a JSON file, with one line per list entry, and sync it to disk."""
    lines = [f"{json.dumps(key)}: {_on_lines(entry)}" for key, entry in value.items()]
    _write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and sync it to disk."""
    save_file(dict(tensors), path)
    sync(path)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk."""
    # By descriptor, since a folder cannot be opened as a file and its entries need a sync of their own.
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
