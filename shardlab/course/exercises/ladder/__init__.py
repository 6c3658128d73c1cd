"""The exercises in their order: what is built in one is the ground of a later one."""

from shardlab.course.exercises.ladder.break_even import BREAK_EVEN
from shardlab.course.exercises.ladder.buckets import BUCKETS
from shardlab.course.exercises.ladder.column_row import COLUMN_ROW
from shardlab.course.exercises.ladder.hooks import HOOKS
from shardlab.course.exercises.ladder.link import LINK
from shardlab.course.exercises.ladder.norm import NORM
from shardlab.course.exercises.ladder.overlap import OVERLAP
from shardlab.course.exercises.ladder.owners import OWNERS
from shardlab.course.exercises.ladder.reshard import RESHARD
from shardlab.course.exercises.ladder.ring import RING
from shardlab.course.exercises.ladder.two_axes import TWO_AXES
from shardlab.course.exercises.ladder.units import UNITS
from shardlab.course.exercises.ladder.unscale import UNSCALE
from shardlab.course.exercises.ladder.zero3 import ZERO3

LADDER = (
    RING, BUCKETS, HOOKS, OVERLAP, LINK, BREAK_EVEN, OWNERS, NORM, ZERO3, UNITS, UNSCALE, COLUMN_ROW, TWO_AXES, RESHARD,
)  # fmt: skip
