"""Tables in, tables out: time, communication and memory of a recorded run. Needs no torch."""

from shardlab.analysis.attribution import attribution, hidden_by, stragglers, waits
from shardlab.analysis.bandwidth import LatencyBandwidth, bandwidth, fit_latency_bandwidth, wire_bytes, with_fit
from shardlab.analysis.held_bytes import allocator_items, at_rest, memory_over_step, peak, process_items
from shardlab.analysis.intervals import intersect, merge, subtract, total
from shardlab.analysis.matching import with_group
from shardlab.analysis.overlap import overlap, step_split

__all__ = [
    "LatencyBandwidth", "allocator_items", "at_rest", "attribution", "bandwidth", "fit_latency_bandwidth", "hidden_by",
    "intersect", "memory_over_step", "merge", "overlap", "peak", "process_items", "step_split", "stragglers",
    "subtract", "total", "waits", "wire_bytes", "with_fit", "with_group",
]  # fmt: skip
