"""Bytes and time of a collective on a ring: what one rank sends, and how long that takes on a given link.

===============  ============================  ============================================
collective       bytes one rank sends          time on a link
===============  ============================  ============================================
all-reduce       2 (N - 1) / N * S             2 (N - 1) latency + bytes / bandwidth
reduce-scatter   (N - 1) / N * S               (N - 1) latency + bytes / bandwidth
all-gather       (N - 1) / N * S               (N - 1) latency + bytes / bandwidth
all-to-all       (N - 1) / N * S               (N - 1) latency + bytes / bandwidth
broadcast        (N - 1) / N * S on average    (N - 1) latency + S / bandwidth
reduce           (N - 1) / N * S on average    (N - 1) latency + S / bandwidth
gather, scatter  (N - 1) / N * S / N, average  (N - 1) latency + (N - 1) / N * S / bandwidth
send, recv       S, 0                          latency + S / bandwidth
barrier          0                             2 ceil(log2 N) latency
===============  ============================  ============================================

Legend: N ranks in the group, S bytes of the whole (unsharded) buffer. The root of a broadcast sends all of S down a
pipelined ring and the last rank sends nothing: the average over ranks is (N - 1) / N * S, yet the time is that of S.
A reduce runs the same way backwards. In a gather every rank but the root sends its chunk of S / N, in a scatter the
root sends all of them, over its own link. A group of one moves nothing and takes no time. Source: Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; the factors are those of nccl-tests' bus
bandwidth.

What torch's gloo groups move (``moved_bytes``), by the algorithms of gloo and of torch around it:

==============  =========================  ===================================================
collective      bytes one rank sends       how
==============  =========================  ===================================================
all-reduce      2 (N - 1) / N * S          ring
reduce-scatter  2 (N - 1) / N * S          an all-reduce of the whole buffer, of which each rank keeps its chunk
all-gather      (N - 1) / N * S            ring
all-to-all      (N - 1) / N * S            every rank to every other; of uneven parts, all but its own
broadcast       S for each child           binomial tree: rank r, counted from the root, sends to r + 2^i for 2^i > r
reduce          S; root (N - 1) / N * S    ring reduce-scatter, then every rank sends its chunk to the root
gather          S / N; root 0              every rank to the root
scatter         0; root (N - 1) / N * S    the root to every rank
send, recv      S, 0
barrier         0                          empty messages
==============  =========================  ===================================================

Headers of messages are left out. Source: gloo's
``allreduce.cc``, ``broadcast.cc``, ``reduce.cc`` and torch's ``ProcessGroupGloo.cpp`` (2.11 to 2.13). A test counts
what the sockets send at 2, 3 and 4 ranks. On average over ranks only reduce-scatter and reduce move more than the ring
formula says.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from shardlab.partition.chunks import require_count
from shardlab.vocabulary import Collective

_SHARED = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
_ONE_CHUNK = (Collective.GATHER, Collective.SCATTER)
# Decimal, since a product of floats may end in the wrong digit: 100 kB/s would be 0.0007999999999999999 Gbps.
_GBPS = {
    prefix + unit: Decimal(bits) * scale
    for prefix, scale in {"k": Decimal("1e-6"), "m": Decimal("1e-3"), "g": Decimal(1), "t": Decimal(1000)}.items()
    for unit, bits in {"bps": 1, "b/s": 1, "bit/s": 1, "B/s": 8}.items()
}
_US = {"ns": Decimal("1e-3"), "us": Decimal(1), "µs": Decimal(1), "ms": Decimal(1000), "s": Decimal(10**6)}
GLOO = "gloo"
_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)\s*([a-zA-Zµ/]+)")


def ring_wire_bytes(op: Collective, num_bytes: int, group_size: int, own_chunk_bytes: int | None = None) -> float:
    """Bytes that one rank sends for a collective on a ring of ``group_size`` ranks.

    Args:
        op: the collective.
        num_bytes: bytes of the whole (unsharded) buffer.
        group_size: ranks that take part.
        own_chunk_bytes: bytes of this rank's chunk, where chunks are uneven: then a reduce-scatter sends all of the
            buffer but the own chunk, an all-gather the own chunk to every other rank, an all-to-all all but the own.

    Raises:
        ValueError: ``num_bytes`` is negative, ``group_size`` below 1, or ``own_chunk_bytes`` not within ``num_bytes``.
    """
    require_count("num_bytes", num_bytes, 0)
    require_count("group_size", group_size, 1)
    if own_chunk_bytes is not None and not 0 <= own_chunk_bytes <= num_bytes:
        raise ValueError(f"own_chunk_bytes: {own_chunk_bytes} is not within the buffer; it must be 0 to {num_bytes}")
    if group_size == 1 or op in (Collective.RECV, Collective.BARRIER):
        return 0.0
    if op == Collective.SEND:
        return float(num_bytes)
    if own_chunk_bytes is not None and op in _SHARED:
        return float(own_chunk_bytes * (group_size - 1) if op == Collective.ALL_GATHER else num_bytes - own_chunk_bytes)
    if op in _ONE_CHUNK:
        return num_bytes * (group_size - 1) / group_size**2
    rounds = 2 if op == Collective.ALL_REDUCE else 1
    return rounds * num_bytes * (group_size - 1) / group_size


def moved_bytes(
    backend: str, op: Collective, num_bytes: int, group_size: int, rank: int = 0, root: int | None = None, *,
    own_chunk_bytes: int | None = None,
) -> float:  # fmt: skip
    """Bytes that one rank sends when a group of torch runs the collective.

    Args:
        backend: what the group sends with; NaN for any but gloo, since NCCL does not say which algorithm it takes.
        op: the collective.
        num_bytes: bytes of the whole (unsharded) buffer.
        group_size: ranks that take part.
        rank: position in the group.
        root: position of the rank that sends to all or receives from all; None if not known: then the average.
        own_chunk_bytes: of an uneven all-to-all, what the rank keeps.

    Raises:
        ValueError: see ``ring_wire_bytes``.
    """
    if backend != GLOO:
        return math.nan
    ring_bytes = ring_wire_bytes(op, num_bytes, group_size, own_chunk_bytes)
    chunk_bytes = num_bytes / group_size if group_size > 1 else 0.0
    if op == Collective.REDUCE_SCATTER:
        return 2 * ring_bytes
    if op == Collective.REDUCE:
        share = (group_size - 1) / group_size if root is None else float(rank != root)
        return ring_bytes + share * chunk_bytes
    if root is None:
        return ring_bytes
    if op == Collective.BROADCAST:
        return float(_num_children((rank - root) % group_size, group_size) * num_bytes)
    if op == Collective.GATHER:
        return 0.0 if rank == root else chunk_bytes
    if op == Collective.SCATTER:
        return (group_size - 1) * chunk_bytes if rank == root else 0.0
    return ring_bytes


def _num_children(place: int, group_size: int) -> int:
    """To how many ranks the one at ``place``, counted from the root, sends in a binomial tree."""
    steps = (1 << level for level in range(group_size.bit_length()))
    return sum(step > place and place + step < group_size for step in steps)


@dataclass(frozen=True)
class Link:
    """A link between two ranks: ``latency_us`` microseconds per message, ``bandwidth_gbps`` 10^9 bits per second."""

    latency_us: float
    bandwidth_gbps: float

    def __post_init__(self) -> None:
        """Both must be finite and above 0."""
        for field, value in (("latency_us", self.latency_us), ("bandwidth_gbps", self.bandwidth_gbps)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"link: {value} is given as {field}; it must be a finite number above 0")

    @classmethod
    def parse(cls, text: str) -> "Link":
        """A link from text such as ``10Gbps,50us``: bandwidth, then latency; ``Mbit/s``, ``GB/s``, ``ms`` work too.

        ``b`` is bits and ``B`` bytes: ``10Gb/s`` is 10Gbps and ``10GB/s`` is 80Gbps. Prefixes are decimal. Case
        does not matter otherwise, but ``gb/s`` is refused, because people mean both by it, and so is ``GBps``.

        Raises:
            ValueError: the text is not of this form, or a number is not above 0; the message names the field ``link``.
        """
        form = (
            "bandwidth,latency such as 10Gbps,50us (bits: kbps Mbps Gbps Tbps, or Gb/s, Gbit/s; bytes: kB/s MB/s GB/s; "
            "latency: ns us ms s)"
        )
        parts = [_QUANTITY.fullmatch(part.strip()) for part in text.split(",")]
        if len(parts) != 2 or parts[0] is None or parts[1] is None:
            raise ValueError(f"link: {text!r} is not understood; write {form}")
        (bandwidth, bandwidth_unit), (latency, latency_unit) = parts[0].groups(), parts[1].groups()
        unit = _in_usual_case(bandwidth_unit)
        if unit not in _GBPS or latency_unit.lower() not in _US:
            raise ValueError(f"link: {text!r} is not understood; write {form}")
        if unit.endswith("b/s") and bandwidth_unit[0].islower():
            raise ValueError(f"link: {text!r} may be bits or bytes; write Gbps or Gb/s for bits, GB/s for bytes")
        latency_us, bandwidth_gbps = Decimal(latency) * _US[latency_unit.lower()], Decimal(bandwidth) * _GBPS[unit]
        return cls(float(latency_us), float(bandwidth_gbps))

    def __str__(self) -> str:
        """The form that :meth:`parse` reads, exactly: ``10Gbps,50us``."""
        return f"{_plain(self.bandwidth_gbps)}Gbps,{_plain(self.latency_us)}us"

    def transfer_us(self, num_bytes: float) -> float:
        """Microseconds that ``num_bytes`` take at full bandwidth, without latency."""
        return num_bytes * 8 / (self.bandwidth_gbps * 1e3)

    def ring_time_us(self, op: Collective, num_bytes: int, group_size: int) -> float:
        """Microseconds of a collective of ``num_bytes`` (whole buffer) on a ring of ``group_size`` such links.

        Raises:
            ValueError: ``num_bytes`` is negative or ``group_size`` below 1.
        """
        wire_bytes = ring_wire_bytes(op, num_bytes, group_size)
        if group_size == 1:
            return 0.0
        if op in (Collective.BROADCAST, Collective.REDUCE, Collective.RECV):
            wire_bytes = num_bytes
        elif op in _ONE_CHUNK:  # the root's link carries all of them
            wire_bytes *= group_size
        return _num_messages(op, group_size) * self.latency_us + self.transfer_us(wire_bytes)


def _num_messages(op: Collective, group_size: int) -> int:
    if op == Collective.ALL_REDUCE:
        return 2 * (group_size - 1)
    if op == Collective.BARRIER:
        return 2 * math.ceil(math.log2(group_size))
    return 1 if op in (Collective.SEND, Collective.RECV) else group_size - 1


def _in_usual_case(unit: str) -> str:
    # The case of the letter behind the prefix tells bits from bytes, unless the word is written out.
    return unit[0].lower() + ("bit/s" if unit[1:].lower() == "bit/s" else unit[1:2] + unit[2:].lower())


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
