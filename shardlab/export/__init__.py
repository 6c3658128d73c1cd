"""Records in the formats of other tools, and theirs as records: Perfetto, Holistic Trace Analysis, torch.profiler."""

from shardlab.export.hta import export_hta
from shardlab.export.perfetto import perfetto_trace, write_perfetto
from shardlab.export.profiler import import_profiler_trace

__all__ = ["export_hta", "import_profiler_trace", "perfetto_trace", "write_perfetto"]
