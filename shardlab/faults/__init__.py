"""Faults on purpose: a straggler, a dead or stopped rank, a skipped or another collective, NaN, no memory, a bad link.

``inject`` and ``faulty`` make them happen at a chosen rank, step and phase.
"""

from shardlab.faults.inject import Happened, faulty, inject

from shardlab.faults.kinds import (  # isort: skip
    DeadRank, Fault, LossyLink, MismatchedCollective, NaN, OutOfMemory, SkippedCall, SkippedCollective, SlowLink,
    StoppedRank, Straggler,
)  # fmt: skip

__all__ = [
    "DeadRank", "Fault", "Happened", "LossyLink", "MismatchedCollective", "NaN", "OutOfMemory", "SkippedCall",
    "SkippedCollective", "SlowLink", "StoppedRank", "Straggler", "faulty", "inject",
]  # fmt: skip
