"""The exercises in their order: what is built in one is the ground of a later one."""

from shardlab.course.exercises.ladder.hidden_time import BREAK_EVEN, LINK, OVERLAP
from shardlab.course.exercises.ladder.mesh import COLUMN_ROW, TWO_AXES
from shardlab.course.exercises.ladder.messages import BUCKETS, HOOKS, RING
from shardlab.course.exercises.ladder.sharded import NORM, UNITS, UNSCALE
from shardlab.course.exercises.ladder.zero import OWNERS, RESHARD, ZERO3

LADDER = (
    RING, BUCKETS, HOOKS, OVERLAP, LINK, BREAK_EVEN, OWNERS, NORM, ZERO3, UNITS, UNSCALE, COLUMN_ROW, TWO_AXES, RESHARD,
)  # fmt: skip
