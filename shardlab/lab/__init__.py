"""Instruments for notebooks: sweeps, logs, interleaved variants, one traced step, tables for figures."""

from shardlab.lab.event_log import EventLog, collectives_table, log_collectives
from shardlab.lab.interleaved import run_interleaved
from shardlab.lab.memory import gathered_table, saved_for_backward, unit_bytes, watch_gathered
from shardlab.lab.sweeps import bucket_sweep, message_sweep
from shardlab.lab.traced_step import trace_step
from shardlab.lab.weights import weights_table

__all__ = [
    "EventLog",
    "bucket_sweep",
    "collectives_table",
    "gathered_table",
    "log_collectives",
    "message_sweep",
    "run_interleaved",
    "saved_for_backward",
    "trace_step",
    "unit_bytes",
    "watch_gathered",
    "weights_table",
]
