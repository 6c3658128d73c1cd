"""Tables in, figures out: ``f(table, ...) -> go.Figure`` with title, units, hover and text summary. Needs no torch."""

from shardlab.plots.bars import held_by_process, memory_by_role, memory_on_gpu, stacked_bars
from shardlab.plots.loss import loss_curves, loss_difference, training_progress
from shardlab.plots.memory_over_step import memory_over_step
from shardlab.plots.schedule import schedule_chart
from shardlab.plots.shards import shard_map
from shardlab.plots.show import report_page, show
from shardlab.plots.theme import BLUE, EXPOSED, GREY, INK, ORANGE, ROLE_COLOURS, finish, new_figure, summary_of
from shardlab.plots.time_bars import overlap_bars, step_parts, step_times
from shardlab.plots.timeline import collective_timeline
from shardlab.plots.traffic import bytes_between, context_traffic, traffic_matrix, wire_volume

__all__ = [
    "BLUE", "EXPOSED", "GREY", "INK", "ORANGE", "ROLE_COLOURS", "bytes_between", "collective_timeline",
    "context_traffic", "finish", "held_by_process", "loss_curves", "loss_difference", "memory_by_role", "memory_on_gpu",
    "memory_over_step", "new_figure", "overlap_bars", "report_page", "schedule_chart", "shard_map", "show",
    "stacked_bars", "step_parts", "step_times", "summary_of", "traffic_matrix", "training_progress", "wire_volume",
]  # fmt: skip
