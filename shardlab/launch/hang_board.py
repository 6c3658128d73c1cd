"""The hang board: a slot of shared memory per rank that says which collective the rank is in, and the table of them.

A rank writes its slot when a collective is issued and when it is completed; the parent can read all slots at any time,
also when a rank hangs or is dead. Of several collectives in flight the slot shows the oldest, since all others wait
for it; with none in flight it shows the last.

A slot is 512 bytes: version (odd while it is being written), seq, since_ns, numel, state, then op, axis, dtype, tag,
ranks of the group and source line as UTF-8 padded with zeros. No lock is shared between processes: a reader reads again
if the version was odd or has changed meanwhile.
"""

import contextlib
import linecache
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isnan
from pathlib import Path
from threading import Lock
from time import perf_counter_ns

from shardlab.comm.callers import locate
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.launch.stack import SeenCall
from shardlab.vocabulary import Collective

_VERSION = struct.Struct("=Q")
_GROUP_BYTES = 24
_BODY = struct.Struct(f"=qqqB32s24s16s120s{_GROUP_BYTES}s256s")
SLOT_BYTES = 512
_LINE_BYTES = 256
_WAITS = ("wait", "wait_all")  # of ``shardlab.comm.events``, as ``stack.py`` names them
# These may differ between ranks: a send pairs with a recv, and all-to-all may have other split sizes on each rank.
_MAY_DIFFER = frozenset({Collective.SEND, Collective.RECV, Collective.ALL_TO_ALL})


class CallState(IntEnum):
    """State of the collective in a slot."""

    NONE = 0
    ISSUED = 1
    COMPLETED = 2
    FAILED = 3


@dataclass(frozen=True)
class BoardRow:
    """One slot as read. ``since_ns`` is when the collective was issued, or a letter waited for (``perf_counter_ns``).

    ``numel`` and ``dtype`` are those of the whole buffer; 0 and empty where the collective has none, or where it was
    called past the communicator. ``group`` begins with the ranks of the group, which is enough to tell it from the
    other groups of its axis: no rank is in two of them.
    """

    rank: int
    seq: int
    since_ns: int
    numel: int
    state: CallState
    op: str
    axis: str
    dtype: str
    tag: str
    group: str
    source_line: str

    @property
    def elements(self) -> str:
        """What the collective moves: ``100 float32``; empty where that is not known."""
        return f"{self.numel} {self.dtype}" if self.dtype else ""

    @property
    def call(self) -> str:
        """The collective in words: ``all_reduce 'gradients of bucket 2' of 100 float32``."""
        tag = f" '{self.tag}'" if self.tag else ""
        return f"{self.op}{tag}" + (f" of {self.elements}" if self.elements else "")

    def may_meet(self, rank: int) -> bool:
        """Whether a rank is of the group, as far as the slot has room to tell."""
        return len(self.group) in (0, _GROUP_BYTES) or str(rank) in self.group.split(",")

    def waited_s(self, now_ns: int) -> float:
        """Seconds since the collective was issued; 0 unless it is still under way."""
        return (now_ns - self.since_ns) / 1e9 if self.state is CallState.ISSUED else 0.0


class BoardWriter(Observer):
    """A rank's slot, written as an observer of its communicators: a hang shows as issued and not completed."""

    def __init__(self, path: Path, rank: int) -> None:
        self._map = _map_file(path)
        self._offset = rank * SLOT_BYTES
        self._lock = Lock()  # issued() comes from the caller's thread, completed() from the communication thread
        self._version = 0
        self._in_flight: dict[int, CollectiveEvent] = {}
        self._ended: CollectiveEvent | None = None
        self._seen: SeenCall | None = None  # in the last look
        self._shown: CollectiveEvent | SeenCall | None = None

    @property
    def has_in_flight(self) -> bool:
        """Whether a collective of a communicator is under way."""
        return bool(self._in_flight)

    def issued(self, event: CollectiveEvent) -> None:
        """Show the collective unless an older one is still in flight."""
        locate(event)
        if event.is_letter and isnan(event.wait_start_ns):
            return  # it may come and go unseen
        with self._lock:
            # The event itself is held, so that no other can get its id meanwhile.
            self._in_flight[id(event)] = event
            if len(self._in_flight) == 1:
                self._write(event, CallState.ISSUED)

    def started(self, event: CollectiveEvent) -> None:
        """A letter is shown from here on, where this rank waits for one that has not come."""
        if event.is_letter:
            self.issued(event)

    def completed(self, event: CollectiveEvent) -> None:
        """Show the next oldest in flight, or this one as completed."""
        with self._lock:
            # By identity: it may be gone already, if ``clear`` or ``look_at_streams`` came first.
            if self._in_flight.pop(id(event), None) is None:
                return
            self._ended = event
            oldest = next(iter(self._in_flight.values()), None)
            if oldest is None:
                self._write(event, CallState.COMPLETED)
            else:
                self._write(oldest, CallState.ISSUED)

    def look_at_streams(self) -> None:
        """Mark collectives that have ended on their stream: the host runs on, and may never query or wait for them."""
        with self._lock:
            in_flight = list(self._in_flight.values())
        # Query without the lock, which the caller's thread takes at each collective: a query to a hung device blocks.
        # It raises once the device has failed; the caller gets that error anyway.
        with contextlib.suppress(RuntimeError):
            for event in in_flight:
                if event.has_ended_on_stream:
                    self.completed(event)

    def seen(self, call: SeenCall | None) -> None:
        """Take one look at the rank's stack: a collective called without a communicator (``stack.py``), or None.

        It is shown from the second look on that finds it while no communicator has anything in flight. A call that is
        over between two looks blocks nobody, and inside a communicator the events say the same with more detail.
        """
        with self._lock:
            before, self._seen = self._seen, None if self._in_flight else call
            if self._in_flight:
                return
            if call is not None and call is before and call is not self._shown:
                self._write(call, CallState.ISSUED)
            elif before is not None and call is not before and before is self._shown:
                self._write(before, CallState.COMPLETED)

    def failed(self, call: SeenCall | None) -> None:
        """The rank's function raised inside ``call``, or inside the collective the slot shows."""
        with self._lock:
            # A collective fails on the communication thread, so it has already ended when ``wait`` raises.
            waited_for = self._ended if call is not None and call.op in _WAITS else None
            shown = next(iter(self._in_flight.values()), None) or waited_for or call
            if shown is not None:
                self._write(shown, CallState.FAILED)

    def clear(self) -> None:
        """Forget everything: a new function starts, and it must not be blamed for what the last one left unfinished."""
        with self._lock:
            self._in_flight.clear()
            self._seen = self._ended = self._shown = None
            self._put(bytes(_BODY.size))

    def _write(self, call: CollectiveEvent | SeenCall, state: CallState) -> None:
        self._shown = call
        group = ",".join(map(str, call.ranks))
        texts = (call.op, call.axis, call.dtype, call.tag, group, call.source_line[-_LINE_BYTES:])
        # Cut to size by the struct.
        since_ns = call.wait_start_ns if isinstance(call, CollectiveEvent) and call.is_letter else call.issue_ns
        self._put(_BODY.pack(call.seq, int(since_ns), call.numel, state, *map(str.encode, texts)))

    def _put(self, body: bytes) -> None:
        start = self._offset + _VERSION.size
        # Odd while the body changes, so that a reader in the parent knows to read again.
        _VERSION.pack_into(self._map, self._offset, self._version + 1)
        self._map[start : start + _BODY.size] = body
        self._version += 2
        _VERSION.pack_into(self._map, self._offset, self._version)


class Board:
    """All slots, as the parent reads them."""

    def __init__(self, path: Path, world_size: int) -> None:
        # In its full size before a rank starts: each maps the file as it finds it.
        path.write_bytes(bytes(SLOT_BYTES * world_size))
        self.path = path
        self._world_size = world_size
        self._map = _map_file(path)

    def read(self) -> list[BoardRow]:
        """One row per rank, in rank order."""
        return [self._read_slot(rank) for rank in range(self._world_size)]

    def close(self) -> None:
        """Unmap the file; its owner removes it."""
        self._map.close()

    def _read_slot(self, rank: int) -> BoardRow:
        start = rank * SLOT_BYTES
        for _ in range(100):  # bounded: a rank killed in the middle of a write leaves an odd version for good
            (version,) = _VERSION.unpack_from(self._map, start)
            body = _BODY.unpack_from(self._map, start + _VERSION.size)
            if version % 2 == 0 and _VERSION.unpack_from(self._map, start) == (version,):
                break
        seq, since_ns, numel, state, *texts = body
        op, axis, dtype, tag, group, source = (text.rstrip(b"\0").decode(errors="ignore") for text in texts)
        return BoardRow(rank, seq, since_ns, numel, CallState(state), op, axis, dtype, tag, group, source)


def describe(rows: Sequence[BoardRow], processes: Sequence[str]) -> str:
    """The board as a text table: rank, process, seq, collective, tag, state, since (seconds), elements, source line.

    Args:
        rows: what ``Board.read`` gave.
        processes: what each rank's process is doing, in the same order: running, stopped, returned, raised, dead.
    """
    now_ns = perf_counter_ns()
    lines = [("rank", "process", "seq", "collective", "tag", "state", "since (s)", "elements", "source line")]
    for row, process in zip(rows, processes, strict=True):
        if row.state is CallState.NONE:
            lines.append((str(row.rank), process, "-", "-", "-", "no collective yet", "-", "-", "-"))
            continue
        collective = f"{row.op} ({row.axis})" if row.axis else row.op
        since = f"{(now_ns - row.since_ns) / 1e9:.1f}"
        state = "waiting" if row.state is CallState.ISSUED else row.state.name.lower()
        source = _with_text(row.source_line)
        seq = str(row.seq) if row.seq >= 0 else "-"
        lines.append(
            (str(row.rank), process, seq, collective, row.tag or "-", state, since, row.elements or "-", source)
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def mismatch(rows: Sequence[BoardRow]) -> str:
    """A sentence that says which ranks are in what, where they differ; empty where they do not.

    The collectives of a communicator are numbered alike on all its ranks, so two ranks at the same number on the same
    axis should be in the same collective. Where operation, elements or dtype differ, they wait for each other for ever.
    Otherwise, a rank whose last collective has a lower number than the one its group waits in has not reached that one:
    it skipped a collective, or is late.

    Args:
        rows: what ``Board.read`` gave.
    """
    known = [row for row in rows if row.state is not CallState.NONE and row.seq >= 0 and row.op not in _MAY_DIFFER]
    # A rank that sends too much may be done before the receiver crashes, so one unfinished rank is enough.
    for stuck in (row for row in known if row.state is not CallState.COMPLETED):
        same = [row for row in known if (row.axis, row.group, row.seq) == (stuck.axis, stuck.group, stuck.seq)]
        if len({(row.op, row.numel, row.dtype) for row in same}) > 1:
            places = ", ".join(f"rank {row.rank} in {row.call}" for row in same)
            return f"Collective {stuck.seq} of axis {stuck.axis!r} differs between ranks: {places}"
    return _behind(known)


def _behind(known: Sequence[BoardRow]) -> str:
    for stuck in sorted(known, key=lambda row: -row.seq):
        group = [row for row in known if (row.axis, row.group) == (stuck.axis, stuck.group)]
        if stuck.state is CallState.ISSUED and (late := [row for row in group if row.seq < stuck.seq]):
            ahead = [row.rank for row in group if row.seq == stuck.seq]
            places = ", ".join(f"rank {row.rank} has come to {row.seq}, {row.call}" for row in late)
            return (
                f"Not all are in the same collective of axis {stuck.axis!r}: {_ranks(ahead)} in {stuck.seq}, {places}"
            )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _with_text(source_line: str) -> str:
    """``file:line`` and the code of that line, if this process can read it: a file, or one of its notebook's cells."""
    file, _, line = source_line.rpartition(":")
    text = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    return f"{source_line}: {text[:80]}" if text else source_line or "-"


def _map_file(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
