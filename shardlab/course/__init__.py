"""What notebooks use, under one name: exercises that mark themselves, scores, controls, faults, instruments.

Exercises are described in ``exercises/__init__.py``, controls in ``widgets/__init__.py``; instruments are sweeps, logs,
interleaved variants, one traced step, verdicts, tables. Names of other rooms stand here too, so that a notebook's first
cell stays short. All are imported when they are first used: a rank that runs an exercise needs no plots, and starts in
0.07 s instead of 0.26.
"""

from typing import TYPE_CHECKING

from shardlab.installed import imported_when_used

if TYPE_CHECKING:
    from shardlab.analysis import with_group
    from shardlab.course.capstone import Scores, score
    from shardlab.course.divided_weights import weight_slices, weights_table
    from shardlab.course.exercises.exercise import (  # isort: skip
        Case, Exercise, Measured, Message, Traffic, VirtualClock, call, call_in_place, call_without_ranks,
    )  # fmt: skip
    from shardlab.course.exercises.in_a_cell import check, find, hint, task
    from shardlab.course.exercises.judge import Report, Verdict
    from shardlab.course.exercises.ladder import LADDER
    from shardlab.course.exercises.prediction import Prediction, predict
    from shardlab.course.faults.inject import Happened, faulty, inject

    from shardlab.course.faults.kinds import (  # isort: skip
        DeadRank, Fault, LossyLink, MismatchedCollective, NaN, OutOfMemory, SkippedCall, SkippedCollective, SlowLink,
        StoppedRank, Straggler,
    )  # fmt: skip
    from shardlab.course.figures import bucket_curve, mesh_map, message_times, throughput
    from shardlab.course.gathered_units import gathered_over_a_step, unit_bytes, watch_gathered
    from shardlab.course.notebook_verdicts import (  # isort: skip
        bucket_verdict, bus_verdict, busy_in_steps, busy_now, clock_verdict, cores_verdict, floor_verdict, gain_verdict,
        hidden_verdict, late_verdict, message_gains, message_verdicts, parts_verdict, pay_off_verdict,
        prediction_verdict,
    )  # fmt: skip
    from shardlab.course.on_a_clock import virtual_steps
    from shardlab.course.printed_runs import outcome, terminal, told
    from shardlab.course.recorded_steps import bubbles, played_of, record_pipeline, trace_step
    from shardlab.course.same_scripts import TEMPLATES, is_at_fault, judged_text, mended, numbered
    from shardlab.course.sharded_layer import sharded_linear
    from shardlab.course.small_records import (  # isort: skip
        collectives_table, link_for, log_collectives, message_sweep, run_interleaved,
    )  # fmt: skip
    from shardlab.course.widgets.explorer import memory_explorer
    from shardlab.course.widgets.history import RunHistory
    from shardlab.course.widgets.live import live, read_progress
    from shardlab.course.widgets.memory_plan import MemoryPlan
    from shardlab.course.widgets.place_actions import Board, place_actions
    from shardlab.course.widgets.step_events import events_of_step, ranks_at
    from shardlab.course.widgets.step_view import step_through
    from shardlab.course.widgets.workbench import workbench
    from shardlab.data_sets import batch
    from shardlab.experiment.comparison import PRELOAD
    from shardlab.experiment.planned.run_plan import (  # isort: skip
        RunPlan, fit_of, kept_for_backward, readable_fit, saved_for_backward,
    )  # fmt: skip
    from shardlab.forecast import Layer, activation_bytes
    from shardlab.launch import RankDied, RankError, RankHang, current
    from shardlab.partition.owned_bytes import byte_fractions
    from shardlab.partition.ring_cost import ring_wire_bytes
    from shardlab.partition.slices import slices_of
    from shardlab.planner import described, divided
    from shardlab.records.tables import COLLECTIVES, SHARDS, SPANS, STEPS
    from shardlab.trace.memory_by_role import MemoryLedger, bytes_by_role
    from shardlab.units import units_of

__all__ = [
    "COLLECTIVES", "LADDER", "PRELOAD", "SHARDS", "SPANS", "STEPS", "TEMPLATES", "Board", "Case", "DeadRank",
    "Exercise", "Fault", "Happened", "Layer", "LossyLink", "Measured", "MemoryLedger", "MemoryPlan", "Message",
    "MismatchedCollective", "NaN", "OutOfMemory", "Prediction", "RankDied", "RankError", "RankHang", "Report",
    "RunHistory", "RunPlan", "Scores", "SkippedCall", "SkippedCollective", "SlowLink", "StoppedRank", "Straggler",
    "Traffic", "Verdict", "VirtualClock", "activation_bytes", "batch", "bubbles", "bucket_curve", "bucket_verdict",
    "bus_verdict", "busy_in_steps", "busy_now", "byte_fractions", "bytes_by_role", "call", "call_in_place",
    "call_without_ranks", "check", "clock_verdict", "collectives_table", "cores_verdict", "current", "described",
    "divided", "events_of_step", "faulty", "find", "fit_of", "floor_verdict", "gain_verdict", "gathered_over_a_step",
    "hidden_verdict", "hint", "inject", "is_at_fault", "judged_text", "kept_for_backward", "late_verdict", "link_for",
    "live", "log_collectives", "memory_explorer", "mended", "mesh_map", "message_gains", "message_sweep",
    "message_times", "message_verdicts", "numbered", "outcome", "parts_verdict", "pay_off_verdict", "place_actions",
    "played_of", "predict", "prediction_verdict", "ranks_at", "read_progress", "readable_fit", "record_pipeline",
    "ring_wire_bytes", "run_interleaved", "saved_for_backward", "score", "sharded_linear", "slices_of", "step_through",
    "task", "terminal", "throughput", "told", "trace_step", "unit_bytes", "units_of", "virtual_steps", "watch_gathered",
    "weight_slices", "weights_table", "with_group", "workbench",
]  # fmt: skip

__getattr__ = imported_when_used(__name__, __file__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
