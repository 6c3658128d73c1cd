"""The exercises in their order: what is built in one is the ground of a later one."""

from shardlab.exercises.ladder.break_even import BREAK_EVEN
from shardlab.exercises.ladder.buckets import BUCKETS
from shardlab.exercises.ladder.column_row import COLUMN_ROW
from shardlab.exercises.ladder.hooks import HOOKS
from shardlab.exercises.ladder.link import LINK
from shardlab.exercises.ladder.norm import NORM
from shardlab.exercises.ladder.overlap import OVERLAP
from shardlab.exercises.ladder.owners import OWNERS
from shardlab.exercises.ladder.reshard import RESHARD
from shardlab.exercises.ladder.ring import RING
from shardlab.exercises.ladder.two_axes import TWO_AXES
from shardlab.exercises.ladder.units import UNITS
from shardlab.exercises.ladder.unscale import UNSCALE
from shardlab.exercises.ladder.zero3 import ZERO3

LADDER = (
    RING, BUCKETS, HOOKS, OVERLAP, LINK, BREAK_EVEN, OWNERS, NORM, ZERO3, UNITS, UNSCALE, COLUMN_ROW, TWO_AXES, RESHARD,
)  # fmt: skip
