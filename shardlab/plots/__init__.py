"""Tables in, figures out: ``f(table, ...) -> go.Figure`` with title, units, hover and text summary. Needs no torch."""

from shardlab.plots.bars import held_by_process, held_by_rank, memory_by_role, memory_on_gpu, stacked_bars
from shardlab.plots.difference import run_difference
from shardlab.plots.loss import loss_curves, loss_difference, training_progress
from shardlab.plots.maps import mesh_map, shard_map, weight_slices
from shardlab.plots.memory_over_step import gathered_over_a_step, memory_over_step
from shardlab.plots.show import report_page, show
from shardlab.plots.sweeps import bucket_curve, message_times, throughput
from shardlab.plots.theme import BLUE, EXPOSED, GREY, INK, ORANGE, ROLE_COLOURS, finish, new_figure, summary_of
from shardlab.plots.time_bars import overlap_bars, step_parts, step_times
from shardlab.plots.timeline import collective_timeline
from shardlab.plots.traffic import bytes_between, traffic_matrix, wire_volume

__all__ = [
    "BLUE", "EXPOSED", "GREY", "INK", "ORANGE", "ROLE_COLOURS", "bucket_curve", "bytes_between",
    "collective_timeline", "finish", "gathered_over_a_step", "held_by_process", "held_by_rank", "loss_curves",
    "loss_difference", "memory_by_role", "memory_on_gpu", "memory_over_step", "mesh_map", "message_times",
    "new_figure", "overlap_bars", "report_page", "run_difference", "shard_map", "show", "stacked_bars",
    "step_parts", "step_times", "summary_of", "throughput", "traffic_matrix", "training_progress", "weight_slices",
    "wire_volume",
]  # fmt: skip
