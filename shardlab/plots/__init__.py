"""Table in, figure out: ``f(table, ...) -> go.Figure`` with title, units, hover and a text summary. Needs no torch."""

from shardlab.plots.buckets import bucket_curve
from shardlab.plots.loss import loss_curves, loss_difference
from shardlab.plots.memory import memory_by_role
from shardlab.plots.messages import message_times
from shardlab.plots.overlap import overlap_bars
from shardlab.plots.page import report_page
from shardlab.plots.shards import shard_map
from shardlab.plots.show import show
from shardlab.plots.steps import step_times
from shardlab.plots.theme import summary_of
from shardlab.plots.timeline import collective_timeline
from shardlab.plots.volume import wire_volume

__all__ = [
    "bucket_curve",
    "collective_timeline",
    "loss_curves",
    "loss_difference",
    "memory_by_role",
    "message_times",
    "overlap_bars",
    "report_page",
    "shard_map",
    "show",
    "step_times",
    "summary_of",
    "wire_volume",
]
