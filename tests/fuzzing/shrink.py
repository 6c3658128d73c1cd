"""The last of the shrinking: one thing less at a time, for as long as the scenario fails in the same way.

Hypothesis shrinks what it drew; this takes away parts that its choices do not separate, a forward out of the middle of
a training step for example.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from tests.fuzzing.engines import ROWS, EngineSpec
from tests.fuzzing.modules import BlockSpec, ModuleSpec
from tests.fuzzing.run import Scenario


def reduced(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest that one finds by taking one thing away after another."""
    while smaller := next((simpler for simpler in _simpler(scenario) if fails(simpler)), None):
        scenario = smaller
    return scenario


FIXED = ("axes", "pool", "name")
"""Fields that decide which engine it is, and how many ranks there are."""


def _simpler(value: Any) -> Iterator[Any]:
    """The value with one thing less: an element of a tuple, a field that is not as by default, or one in these."""
    if isinstance(value, tuple):
        for place in reversed(range(len(value))):
            yield value[:place] + value[place + 1 :]
        for place, one in enumerate(value if value and is_dataclass(value[0]) else ()):
            yield from ((*value[:place], simpler, *value[place + 1 :]) for simpler in _simpler(one))
    elif isinstance(value, ModuleSpec):
        for gone in range(len(value.blocks)):
            path = tuple(index - (index > gone) for index in value.path if index != gone)
            yield replace(value, blocks=value.blocks[:gone] + value.blocks[gone + 1 :], path=path)
        yield from (replace(value, path=path) for path in _simpler(value.path))
        yield from _simpler_fields(value, *FIXED, "blocks", "path")
        for place, block in enumerate(value.blocks):
            for simpler in (*_simpler(block), *((BlockSpec(),) if block != BlockSpec() else ())):
                yield replace(value, blocks=(*value.blocks[:place], simpler, *value.blocks[place + 1 :]))
    elif is_dataclass(value):
        hybrid = isinstance(value, EngineSpec) and (("sharding", "hybrid_shard") in value.options or value.name in ROWS)
        yield from _simpler_fields(value, *FIXED, *(("options",) if hybrid else ()))


def _simpler_fields(value: Any, *fixed: str) -> Iterator[Any]:
    for field in reversed(fields(value)):  # of a scenario the operations first
        now = getattr(value, field.name)
        if field.name not in fixed:
            if field.default not in (MISSING, now):
                yield replace(value, **{field.name: field.default})
            yield from (replace(value, **{field.name: simpler}) for simpler in _simpler(now))
