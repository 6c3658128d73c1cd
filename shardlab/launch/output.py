"""What a rank prints: it comes through a pipe, and this process prints it line by line, with the number of the rank."""

import os
import sys
from multiprocessing.connection import Connection

# A pipe holds 64 KiB unless told otherwise: so much is certain to take all that was written before the call.
_MAX_BYTES_PER_CALL = 1 << 20
_CHUNK_BYTES = 1 << 16


class RankOutput:
    """Reads one rank's output pipe without waiting and prints its lines as ``[rank 2] ...``."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self._prefix = f"[rank {rank}] "
        self._pipe = pipe
        self._unended: list[bytes] = []  # of the last line, whose end has not come
        self.num_bytes = 0  # that have come
        self.is_open = True
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """What ``multiprocessing.connection.wait`` waits on."""
        return self._pipe.fileno()

    def pump(self) -> None:
        """Print every whole line that has come; returns at once."""
        if not self.is_open:
            return
        *lines, rest = self._read().split(b"\n")
        if lines:
            lines[0] = self._take_unended() + lines[0]
            self._print(lines)
        if rest:
            # Joined only when its end has come: at every read it would be copied whole.
            self._unended.append(rest)

    def finish(self) -> None:
        """Print all that has come, also a last line without a newline."""
        self.pump()
        if self._unended:
            self._print([self._take_unended()])

    def close(self) -> None:
        """Close the pipe."""
        self.is_open = False
        self._pipe.close()

    def _take_unended(self) -> bytes:
        parts, self._unended = self._unended, []
        return b"".join(parts)

    def _read(self) -> bytes:
        chunks: list[bytes] = []
        while sum(map(len, chunks)) < _MAX_BYTES_PER_CALL:
            try:
                chunk = os.read(self._pipe.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                self.is_open = False  # the rank and all that wrote for it are gone
                break
            chunks.append(chunk)
        self.num_bytes += sum(map(len, chunks))
        return b"".join(chunks)

    def _print(self, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        # A progress bar redraws its line after a carriage return: its last state is the line.
        shown = [f"{self._prefix}{text.rpartition(chr(13))[2]}\n" for text in texts]
        sys.stdout.write("".join(shown))
        sys.stdout.flush()
