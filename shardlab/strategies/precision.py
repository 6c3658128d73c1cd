"""Dtypes of a strategy: what to compute in, what to sum in. (Moves here from ``engines.precision``.)"""

from shardlab.engines.precision import Precision, cast_floating, parse_precision

__all__ = ["Precision", "cast_floating", "parse_precision"]
