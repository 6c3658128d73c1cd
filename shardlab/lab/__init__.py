"""Instruments for notebooks: sweeps, logs, interleaved variants, one traced step, plans, verdicts, tables.

It also re-exports what notebooks need from other packages, so that their first cell stays short.
"""

from shardlab.analysis import with_group
from shardlab.data_sets import batch
from shardlab.experiment.comparison import PRELOAD
from shardlab.lab.fit import RunPlan, fit_of, kept_for_backward, readable_fit, saved_for_backward
from shardlab.lab.model_tables import gathered_table, modules_table, unit_bytes, watch_gathered, weights_table

from shardlab.lab.notebook_verdicts import (  # isort: skip
    bucket_verdict, bus_verdict, busy_in_steps, busy_now, floor_verdict, gain_verdict, hidden_verdict, late_verdict,
    message_gains, message_verdicts, parts_verdict, pay_off_verdict, prediction_verdict,
)  # fmt: skip
from shardlab.lab.small_records import EventLog, collectives_table, log_collectives, trace_step
from shardlab.lab.sweeps import bucket_sweep, link_for, message_sweep, run_interleaved
from shardlab.lab.terminal import terminal
from shardlab.launch import RankDied, RankError, RankHang, current
from shardlab.partition.owners import Ownership
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.partition.slices import slices_of
from shardlab.tables import COLLECTIVES, SHARDS, SPANS, STEPS
from shardlab.trace.memory_by_role import MemoryLedger, bytes_by_role
from shardlab.units import units_of

__all__ = [
    "COLLECTIVES", "PRELOAD", "SHARDS", "SPANS", "STEPS", "EventLog", "MemoryLedger", "Ownership", "RankDied",
    "RankError", "RankHang", "RunPlan", "batch", "bucket_sweep", "bucket_verdict", "bus_verdict",
    "busy_in_steps", "busy_now", "bytes_by_role", "collectives_table", "current", "fit_of",
    "floor_verdict", "gain_verdict", "gathered_table", "hidden_verdict", "kept_for_backward",
    "late_verdict", "link_for", "log_collectives", "message_gains", "message_sweep", "message_verdicts",
    "modules_table", "parts_verdict", "pay_off_verdict", "prediction_verdict", "readable_fit", "ring_wire_bytes",
    "run_interleaved", "saved_for_backward", "slices_of", "terminal", "trace_step", "unit_bytes", "units_of",
    "watch_gathered", "weights_table", "with_group",
]  # fmt: skip
