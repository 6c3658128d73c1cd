"""Our engines against torch's own, in the same ranks, a step of each in turn. Read config, rounds, run."""

from shardlab.bench.config import PAIRS, WORKLOADS, BenchConfig, Contender, Pair, Workload
from shardlab.bench.run import BenchRow, bench

__all__ = ["PAIRS", "WORKLOADS", "BenchConfig", "BenchRow", "Contender", "Pair", "Workload", "bench"]
