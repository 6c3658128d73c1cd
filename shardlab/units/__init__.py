"""Which modules of a model are units: for FSDP's gathers, for spans and for memory marks alike.

``policy`` reads the argument ``wrap``, ``wrap_text`` what is typed of it; ``structure`` finds the modules that repeat,
``table`` shows the units of a module with their bytes. No pandas here: engines import this.
"""

from shardlab.units.policy import AUTO, WrapPolicy, units_of, wrapped_modules
from shardlab.units.wrap_text import parse_wrap, wrap_text

__all__ = ["AUTO", "WrapPolicy", "parse_wrap", "units_of", "wrap_text", "wrapped_modules"]
