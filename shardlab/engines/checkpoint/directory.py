"""A checkpoint's folder: the old version stays until the new one is complete, and nobody removes what another wrote.

    directory/
      latest                       one line, the name of the current version
      version-000002/              manifest.json, rank-00000.safetensors, rank-00001.safetensors, ..., replaces
      version-000003.partial/      being written, or left by a run that was killed

A rename is atomic, writing a folder of files is not. So a version is written under another name, synced to disk and
renamed; only then is ``latest``, one small file that is replaced atomically, set to its name. Wherever a run is killed,
``latest`` names a complete version; the next save removes what was left. A version also says which ones it replaces:
if its run is killed before it removes them, the run that goes on from it does.

Several runs may write into one directory, by mistake or not. Each then has its own versions, and ``latest`` names the
one that was completed last. A run replaces only versions that it wrote or loaded. Whoever uses a version holds a lock
on its folder: exclusive to write it, shared to read it. It is the kernel's lock, gone with its process; so a partial
folder that can be locked is one that nobody writes any more, and a version that cannot be locked is left in place.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

LATEST = "latest"
MANIFEST = "manifest.json"
_REPLACES = "replaces"
_PARTIAL = ".partial"
_SEAL = ',\n"checksum": '  # of all that stands before it in a JSON file
_CHUNK_BYTES = 1 << 20
_VERSION = re.compile(r"version-(\d+)(\.partial)?")


@contextlib.contextmanager
def begun(directory: Path) -> Iterator[str]:
    """Make the folder of a new version, and remove versions that were never finished; inside, the version is locked.

    After an error inside, nothing of it stays.

    Yields:
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
            if _is_left(entry):
                _remove_unless_used(entry, only_left=True)
    with contextlib.ExitStack() as stack:
        version = ""
        # Two runs may count to the same number: the one whose ``mkdir`` comes first has it, the other counts on.
        while not version:
            numbers.append(max(numbers) + 1)
            version = _claimed(directory, f"version-{numbers[-1]:06d}", stack)
        try:
            yield version
        except BaseException:
            shutil.rmtree(partial_folder(directory, version), ignore_errors=True)
            raise


def partial_folder(directory: Path, version: str) -> Path:
    """The folder in which a version is written."""
    return directory / (version + _PARTIAL)


def publish(directory: Path, version: str, replaced: Iterable[Path] = ()) -> None:
    """Make a completely written version the current one, then remove those that it replaces.

    Args:
        directory: of the checkpoint.
        version: what ``begun`` gave.
        replaced: folders of versions; one that is read at this moment, or is in another directory, stays.
    """
    partial, replaced = partial_folder(directory, version), list(replaced)
    _write_text(partial / _REPLACES, "".join(f"{_line(folder)}\n" for folder in replaced))
    note = partial / LATEST  # in a folder of its own until it is renamed: another run may publish at the same time
    _write_text(note, version + "\n")
    # A rename may reach the disk before the data it names, so each rename comes after a sync of that data.
    sync(partial)
    partial.rename(directory / version)
    sync(directory)
    (directory / version / LATEST).replace(directory / LATEST)
    sync(directory)
    # Only now, when ``latest`` on the disk no longer names an older version.
    for folder in replaced:
        if folder.parent == directory.resolve() and folder.name != version and folder.is_dir():
            _remove_unless_used(folder, only_left=False)


def latest(directory: Path) -> Path:
    """The folder of the current version, or ``directory`` itself if that is the folder of a version.

    Raises:
        ValueError: the directory does not exist, or holds no complete checkpoint.
    """
    if not directory.is_dir():
        raise ValueError(f"directory: {directory} does not exist")
    if (directory / MANIFEST).is_file():
        return directory
    if not (directory / LATEST).is_file():
        raise ValueError(f"directory: {directory} holds no complete checkpoint (it has no file '{LATEST}')")
    name = (directory / LATEST).read_bytes().decode(errors="replace").strip()
    found = _VERSION.fullmatch(name)
    if not found or found[2]:
        raise ValueError(f"directory: {directory / LATEST} is damaged: it holds {name[:80]!r}, which names no version")
    if not (directory / name).is_dir():
        raise ValueError(f"directory: {directory / name}, which '{LATEST}' names, does not exist")
    return directory / name


def replaced_by(folder: Path) -> dict[Path, tuple[int, int]]:
    """Versions that this one replaces and that its run has not removed, with what identifies them."""
    note = folder / _REPLACES
    lines = note.read_text(errors="replace").splitlines() if note.is_file() else []
    older = {path: identity(path) for path in folder.resolve().parent.iterdir() if _VERSION.fullmatch(path.name)}
    return {path: known for path, known in older.items() if known is not None and _line(path) in lines}


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[Path]:
    """The folder of the current version; inside, no other run removes it.

    Raises:
        ValueError: as of ``latest``.
    """
    while True:
        folder = latest(directory)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            # Not locked means that its run removes it just now; then ``latest`` names a newer one.
            if _locked(folder, fcntl.LOCK_SH, stack) is not False:
                # Moved out of this block, which would give the lock back at its end.
                stack = stack.pop_all()
                break
    with stack:
        yield folder


def identity(folder: Path) -> tuple[int, int] | None:
    """What tells a version from a later one under its name, in a directory that was emptied in between.

    None if it is gone: another run that has loaded it too may remove it at any moment.
    """
    try:
        status = (folder / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns


def _line(folder: Path) -> str:
    """A version as those say it that replace it; it tells another version of this name."""
    return f"{folder.name} {identity(folder)}"


def _claimed(directory: Path, version: str, stack: contextlib.ExitStack) -> str:
    """Make the version's partial folder and lock it; empty if another run has it."""
    folder = partial_folder(directory, version)
    try:
        folder.mkdir()
    except FileExistsError:
        return ""
    try:
        if _locked(folder, fcntl.LOCK_EX, stack) is False:
            return ""
    except FileNotFoundError:
        return ""  # before it was locked, another run has taken it for a left one
    if (directory / version).exists():  # completed by another run since ``begun`` looked
        folder.rmdir()
        return ""
    return version


def _is_left(folder: Path) -> bool:
    """Whether a version was not finished, or finished and not published: then it has the note that makes it current."""
    return folder.name.endswith(_PARTIAL) or (folder / LATEST).is_file()


def _remove_unless_used(folder: Path, *, only_left: bool) -> None:
    """Remove the folder of a version unless somebody writes or reads it.

    Args:
        folder: of the version.
        only_left: keep one that is published by now, and all where the file system has no locks: another run may be
            writing it at this moment.
    """
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        is_free = _locked(folder, fcntl.LOCK_EX, stack)
        if (is_free and _is_left(folder)) if only_left else is_free is not False:
            # Under the lock, so that nobody begins to read it while it goes.
            shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path, kind: int, stack: contextlib.ExitStack) -> bool | None:
    """Lock a folder without waiting, until ``stack`` ends.

    Returns:
        False if another process holds it; None if the file system cannot tell (NFS locks no folders).

    Raises:
        FileNotFoundError: it is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    # Closing it also gives the lock back.
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno == errno.EWOULDBLOCK else None
    # It may have been removed, and made anew by another run, between the two calls.
    return os.path.samestat(os.fstat(descriptor), folder.stat())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, with one line per list entry and a checksum at its end, and sync it to disk."""
    lines = [f"{json.dumps(key)}: {_on_lines(entry)}" for key, entry in value.items()]
    body = "{\n" + ",\n".join(lines)
    _write_text(path, f'{body}{_SEAL}"{zlib.crc32(body.encode()):08x}"\n}}\n')


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote, with its checksum under ``checksum``; without that key if the file has none.

    Raises:
        ValueError: it is not JSON, or not what was written.
    """
    raw = path.read_bytes()
    written = json.loads(raw)
    if not isinstance(written, dict):
        raise ValueError(f"it holds {type(written).__name__}, not an object")
    body = raw.rpartition(_SEAL.encode())[0]
    if "checksum" in written and written["checksum"] != f"{zlib.crc32(body):08x}":
        raise ValueError("its checksum says that it was changed after it was written")
    return written


def checksum(path: Path) -> str:
    """The CRC-32 of a file, as eight hexadecimal digits. (It finds damage, not forgery.)"""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return f"{found:08x}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and sync it to disk."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)  # flat, but perhaps with gaps
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
