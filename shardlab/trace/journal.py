"""A file that is appended to without a system call: pages are made ahead of it and mapped.

The first 8 bytes say where the last append ends, and are written after it. So whoever reads, while it goes on or after
a kill, sees whole appends only; behind them are zeros. What a kill leaves is in the system's page cache, as after a
``write``. That would cost more: in a training step, with all caches cold, 0.15 to 0.6 ms against 0.01.
"""

import mmap
import os
import struct
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
        self._first_page = self._first(path)
        END.pack_into(self._first_page, 0, self._end)
        self._map()

    def append(self, data: bytes) -> None:
        """Add ``data``, of any length.

        Raises:
            OSError: there is no room on the disk.
        """
        end = self._end + len(data)
        if end > self._made:
            self._make(end + AHEAD_BYTES)
            self._map()
        place = self._end - self._mapped_from
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
        # Zeros are written and not just promised: so a full disk is an error here and not a signal in a copy.
        while self._made < size:
            self._made += os.pwrite(self._file.fileno(), bytes(size - self._made), self._made)

    def _map(self) -> None:
        """From the page of the next append on: what lies before it is not this process' memory."""
        self._mapped_from = self._end - self._end % _PAGE_BYTES
        self._pages = mmap.mmap(self._file.fileno(), self._made - self._mapped_from, offset=self._mapped_from)


class JournalReader:
    """Reads what has been appended, also while it goes on.

    Args:
        path: of the file; it stays open, and so readable when its writer has removed it.

    Raises:
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._place = END.size

    def new(self, at_most: int) -> bytes:
        """The next bytes, at most so many; none where there is nothing new."""
        head = os.pread(self._file.fileno(), END.size, 0)
        end = END.unpack(head)[0] if len(head) == END.size else 0  # killed before the first page was made
        data = os.pread(self._file.fileno(), min(max(end - self._place, 0), at_most), self._place)
        self._place += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()
