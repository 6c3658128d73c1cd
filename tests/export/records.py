"""Two ranks recorded by hand, and a real run."""

from dataclasses import asdict

from shardlab.records.store import Records
from shardlab.records.tables import MEMORY, SHARDS, STEPS
from shardlab.trace.process_memory import Allocator
from tests.analysis.hand_made import KEYS, STEP, two_ranks


def moment(rank, time_us, where, **held):
    base = KEYS | {"rank": rank, "time_us": time_us, "phase": "backward", "where": where}
    base |= asdict(Allocator()) | {"resident_bytes": 5000 if where == "rest" else None}
    return [base | {"role": role, "bytes": size} for role, size in held.items()]


def hand_made():
    moved, worked = two_ranks()
    step = STEP | {"loss": 1.5, "step_us": 130.0, "peak_bytes": 90, "wire_bytes": 2000.0, "traced_memory": True}
    memory = [
        row
        for rank in (0, 1)
        for row in (
            *moment(rank, 10.0, "half 1", parameter=40, activation=20, offloaded=0),
            *moment(rank, 50.0, "half 2", parameter=40, activation=50, offloaded=0),
            *moment(rank, 50.0, "peak", parameter=40, activation=50, offloaded=0),
            *moment(rank, 130.0, "rest", parameter=40, activation=0, offloaded=0),
        )
    ]
    return Records(
        collectives=moved,
        spans=worked,
        memory=MEMORY.frame(memory),
        shards=SHARDS.frame([]),
        steps=STEPS.frame([KEYS | step | {"rank": rank} for rank in (0, 1)]),
        manifests={"a": {"run": "a", "mesh": {"data": 2}}},
    )
