"""The exercises in their order: what is built in one is the ground of a later one."""

from shardlab.exercises.ladder.buckets import BUCKETS
from shardlab.exercises.ladder.ring import RING

LADDER = (RING, BUCKETS)
