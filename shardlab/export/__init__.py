"""Records as traces of Perfetto, and traces of torch.profiler as records."""

from shardlab.export.perfetto import perfetto_trace, write_perfetto
from shardlab.export.profiler import import_profiler_trace

__all__ = ["import_profiler_trace", "perfetto_trace", "write_perfetto"]
