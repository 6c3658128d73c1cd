"""Instruments for notebooks: sweeps, logs, interleaved variants, one traced step, tables for figures."""

from shardlab.lab.event_log import EventLog, collectives_table, log_collectives
from shardlab.lab.fit import RunPlan, fit_of, kept_for_backward, readable_fit
from shardlab.lab.interleaved import run_interleaved
from shardlab.lab.memory import gathered_table, saved_for_backward, unit_bytes, watch_gathered
from shardlab.lab.sweeps import bucket_sweep, message_sweep
from shardlab.lab.terminal import terminal
from shardlab.lab.traced_step import trace_step
from shardlab.lab.weights import weights_table

__all__ = [
    "EventLog",
    "RunPlan",
    "bucket_sweep",
    "collectives_table",
    "fit_of",
    "gathered_table",
    "kept_for_backward",
    "log_collectives",
    "message_sweep",
    "readable_fit",
    "run_interleaved",
    "saved_for_backward",
    "terminal",
    "trace_step",
    "unit_bytes",
    "watch_gathered",
    "weights_table",
]
