"""A journal: what was appended is read, whole, at any time, whatever became of the writer."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardlab.records import journal
from shardlab.records.journal import END, Journal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank0.journal"


def read(path, at_most=10**9):
    return b"".join(journal.read(path, at_most))


@pytest.mark.parametrize(("ahead", "at_most"), [(1, 10**9), (5000, 7), (2**18, 4096)])
def test_what_is_appended_is_read(path, monkeypatch, ahead, at_most):
    monkeypatch.setattr(journal, "AHEAD_BYTES", ahead)
    writer, whole = Journal(path), b""
    for size in (0, 1, 3000, 4096, 5, 20_000, 1, 300_000):
        data = os.urandom(size)
        writer.append(data)
        whole += data
        assert read(path, at_most) == whole
    writer.close()
    assert read(path, at_most) == whole


def test_what_is_half_written_is_not_there(path):
    writer = Journal(path)
    writer.append(b"whole")
    with path.open("r+b") as file:  # a kill between the copy and the end that is written after it
        os.pwrite(file.fileno(), b"half", END.size + 5)
    assert read(path) == b"whole"
    writer.close()


def test_a_file_that_is_too_short_gives_what_it_has(path):
    writer = Journal(path)
    writer.append(b"whole")
    writer.close()
    for size in (10, 8, 3, 0):
        os.truncate(path, size)
        assert read(path) == b"whole"[: max(size - END.size, 0)]


def test_a_killed_writer_loses_nothing(path):
    """Nothing is flushed, nothing is closed."""
    code = "import os, sys, signal; from pathlib import Path; from shardlab.records.journal import Journal\n"
    code += "journal = Journal(Path(sys.argv[1]))\nfor n in range(3000): journal.append(b'%06d' % n)\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read(path) == b"".join(b"%06d" % number for number in range(3000))


def test_only_what_is_being_written_is_mapped(path, monkeypatch):
    monkeypatch.setattr(journal, "AHEAD_BYTES", 2**14)
    writer = Journal(path)
    for _ in range(1000):
        writer.append(bytes(1000))
    mapped = [area.size for area in psutil.Process().memory_maps(grouped=False) if area.path == str(path)]
    assert mapped
    assert sum(mapped) < 2**16
    writer.close()
    assert len(read(path)) == 10**6


def test_a_full_disk_is_an_error_and_keeps_what_was_written(path, monkeypatch):
    monkeypatch.setattr(journal, "AHEAD_BYTES", 1)
    writer = Journal(path)
    writer.append(b"whole")

    room = iter([100])  # a disk that has some takes what it can
    plain = os.pwrite

    def full(file, data, place):
        if (left := next(room, 0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(file, data[:left], place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(bytes(10_000))
    assert read(path) == b"whole"
    writer.close()


def test_a_file_system_that_cannot_map_says_so(path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(journal.mmap, "mmap", refused)
    with pytest.raises(OSError, match=r"cannot map files; record into a directory on a local disk: .*rank0\.journal"):
        Journal(path)
