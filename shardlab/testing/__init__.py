"""Is a strategy of your own right? ``check_strategy`` trains nasty models with it and compares with one process."""

from shardlab.testing.check import check_strategy

__all__ = ["check_strategy"]
