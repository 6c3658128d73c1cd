"""The exercises in their order: what is built in one is the ground of a later one."""

from shardlab.exercises.ladder.buckets import BUCKETS
from shardlab.exercises.ladder.hooks import HOOKS
from shardlab.exercises.ladder.norm import NORM
from shardlab.exercises.ladder.owners import OWNERS
from shardlab.exercises.ladder.reshard import RESHARD
from shardlab.exercises.ladder.ring import RING
from shardlab.exercises.ladder.zero3 import ZERO3

LADDER = (RING, BUCKETS, HOOKS, OWNERS, NORM, ZERO3, RESHARD)
