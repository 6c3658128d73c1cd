"""shardlab: sharded training, hand-written and measured. What does each strategy cost in memory, communication, time?"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("shardlab")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"
