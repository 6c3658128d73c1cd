"""A file to which one appends without a system call: its pages are allocated ahead and mapped.

The first 8 bytes say where the last append ends, and are written after it. So a reader sees whole appends only, while
the file grows and after a kill; behind them are zeros. After a kill the data is in the system's page cache, as after a
``write``; but a ``write`` costs more: in a training step, with all caches cold, 0.15 to 0.6 ms against 0.01.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

END = struct.Struct("<Q")
AHEAD_BYTES = 2**18
_PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class Journal:
    """Appends to a new file.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be made, or its file system cannot map files.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._made = 0  # bytes of the file
        self._end = END.size
        self._make(AHEAD_BYTES)
        # A mapping of its own, which stays while the other moves on: each append ends with a write to it.
        self._first_page = self._first(path)
        END.pack_into(self._first_page, 0, self._end)
        self._map()

    def append(self, data: bytes) -> None:
        """Add ``data``, of any length.

        Raises:
            OSError: there is no room on the disk.
        """
        end = self._end + len(data)
        # Room before data: a full disk raises here, and readers still see every earlier append.
        if end > self._made:
            self._make(end + AHEAD_BYTES)
            self._map()
        place = self._end - self._mapped_from
        # The data first, then its end: a reader, or a kill in between, never sees half of an append.
        self._pages[place : place + len(data)] = data
        self._end = end
        END.pack_into(self._first_page, 0, end)

    def close(self) -> None:
        """Close the file."""
        self._pages.close()
        self._first_page.close()
        self._file.close()

    def _first(self, path: Path) -> mmap.mmap:
        try:
            return mmap.mmap(self._file.fileno(), _PAGE_BYTES)
        except OSError as error:  # some network mounts
            self._file.close()
            why = "the file system cannot map files; record into a directory on a local disk"
            raise OSError(error.errno, why, str(path)) from error

    def _make(self, size: int) -> None:
        size += -size % _PAGE_BYTES
        # Zeros are really written: on a full disk that is an error here, where a sparse file would kill the process
        # with a signal when the mapped page is first touched.
        while self._made < size:
            self._made += os.pwrite(self._file.fileno(), bytes(size - self._made), self._made)

    def _map(self) -> None:
        """Map from the page of the next append on; what lies before it no longer counts as this process' memory."""
        self._mapped_from = self._end - self._end % _PAGE_BYTES
        self._pages = mmap.mmap(self._file.fileno(), self._made - self._mapped_from, offset=self._mapped_from)


def read(path: Path, at_most: int) -> Iterator[bytes]:
    """All that has been appended by now, in pieces of at most ``at_most`` bytes.

    Raises:
        FileNotFoundError: it is not there.
    """
    with path.open("rb", buffering=0) as file:
        head = file.read(END.size)
        left = END.unpack(head)[0] - END.size if len(head) == END.size else 0  # killed before the first page was made
        while left > 0 and (data := file.read(min(left, at_most))):
            left -= len(data)
            yield data
