"""The exercises in their order: what is built in one is the ground of a later one."""

from shardlab.course.exercises.exercise import Exercise, said_under
from shardlab.course.exercises.ladder.hidden_time import BREAK_EVEN, LINK, OVERLAP
from shardlab.course.exercises.ladder.mesh import COLUMN_ROW, TWO_AXES
from shardlab.course.exercises.ladder.messages import BUCKETS, HOOKS, RING
from shardlab.course.exercises.ladder.sharded import NORM, UNITS, UNSCALE
from shardlab.course.exercises.ladder.stages_and_sequences import FINISH, MERGE, PARTS, SCHEDULE
from shardlab.course.exercises.ladder.whole import WHOLE
from shardlab.course.exercises.ladder.zero import OWNERS, RESHARD, ZERO3

LADDER = (
    RING, BUCKETS, HOOKS, OVERLAP, LINK, BREAK_EVEN, OWNERS, NORM, ZERO3, UNITS, UNSCALE, COLUMN_ROW, TWO_AXES, RESHARD,
    SCHEDULE, FINISH, PARTS, MERGE, *WHOLE,
)  # fmt: skip


def solution_of(exercise: Exercise) -> str:
    """A right answer and why it is one, as Markdown; '' for an exercise that is none of these."""
    return said_under(exercise.name, "solutions.md")
