"""Table in, table out: overlap, volume, memory and the latency-bandwidth fit of a recorded run. Needs no torch."""

from shardlab.analysis.fit import LatencyBandwidth, fit_latency_bandwidth, with_fit
from shardlab.analysis.intervals import intersect, merge, subtract, total
from shardlab.analysis.memory import at_rest, peak
from shardlab.analysis.overlap import overlap
from shardlab.analysis.volume import bandwidth, wire_bytes

__all__ = [
    "LatencyBandwidth",
    "at_rest",
    "bandwidth",
    "fit_latency_bandwidth",
    "intersect",
    "merge",
    "overlap",
    "peak",
    "subtract",
    "total",
    "wire_bytes",
    "with_fit",
]
