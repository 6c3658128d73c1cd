"""Step time against the size of a bucket: every size trains the same model, in turns, on the same ranks.

Small buckets pay the latency of many messages; one bucket as large as the model leaves only when backward is over, so
nothing hides it. In between a part of the communication travels behind the compute.
"""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from shardlab.experiment.config import CompareConfig
from shardlab.experiment.in_turns import run_in_turns
from shardlab.launch import RankPool
from shardlab.vocabulary import Phase

BUCKETED = "bucketed"
MIB = 1024**2
COLUMNS = (
    "run", "source", "rank", "step", "bucket_bytes", "step_us", "exposed_comm_us", "overlap", "wire_bytes",
    "num_messages",
)  # fmt: skip


def bucket_sweep(bucket_bytes: Sequence[int], config: CompareConfig, pool: RankPool) -> pd.DataFrame:
    """Train with each bucket size and collect time and exposed communication.

    Args:
        bucket_bytes: capacities, all different and at least 1.
        config: model, data and link; its strategies and bucket size are not used. The first of at least 2 steps is
            left out.
        pool: ``config.ranks`` ranks.

    Returns:
        One row per size, step and rank, as ``plots.bucket_curve`` takes them: ``run``, ``source``, ``rank``, ``step``,
        ``bucket_bytes``, ``step_us``, ``exposed_comm_us``, ``overlap``, ``wire_bytes``, ``num_messages`` (gradient
        buckets sent in that step).

    Raises:
        ValueError: fewer than 2 steps, or sizes that repeat or are below 1.
    """
    if config.steps < 2:
        raise ValueError(f"steps: at least 2 are needed, since the first is not timed, got {config.steps}")
    if not bucket_bytes or len(set(bucket_bytes)) != len(bucket_bytes) or min(bucket_bytes) < 1:
        raise ValueError(f"bucket_bytes: different sizes of at least 1 byte are needed, got {list(bucket_bytes)}")
    sizes = {str(size): size for size in bucket_bytes}
    records = run_in_turns(
        {name: replace(config, strategies=(BUCKETED,), bucket_mib=size / MIB) for name, size in sizes.items()}, pool
    )
    gradients = records.collectives[records.collectives["phase"] == Phase.BACKWARD]
    keys = ["run", "rank", "step"]
    messages = gradients.groupby(keys).size().rename("num_messages").reset_index()
    rows = records.steps[records.steps["step"] > 0].merge(messages, on=keys)
    rows = rows.assign(bucket_bytes=rows["run"].map(sizes).astype("int64"), run=BUCKETED)
    return rows[list(COLUMNS)]
