"""The last of the shrinking: one thing less at a time, for as long as the scenario fails in the same way.

Hypothesis shrinks what it drew; this takes away parts that its choices do not separate, a forward out of the middle of
a training step for example.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tests.fuzzing.checkpoints import Load
from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.modules import BlockSpec, ModuleSpec
from tests.fuzzing.run import Scenario


def reduced(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest that one finds by taking one thing away after another."""
    while smaller := next((simpler for simpler in _simpler(scenario) if fails(simpler)), None):
        scenario = smaller
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    operations = scenario.operations
    for place in reversed(range(len(operations))):
        yield replace(scenario, operations=operations[:place] + operations[place + 1 :])
    if scenario.deep:
        yield replace(scenario, deep=False)
    yield from (replace(scenario, module=module) for module in _simpler_modules(scenario.module))
    yield from (replace(scenario, optimizer=simpler) for simpler in _by_default(scenario.optimizer))
    for place, operation in enumerate(operations):
        for simpler in _by_default(operation):
            yield replace(scenario, operations=(*operations[:place], simpler, *operations[place + 1 :]))
    yield from (replace(scenario, engine=engine) for engine in _simpler_engines(scenario.engine))
    for place, operation in enumerate(operations):
        if isinstance(operation, Load) and operation.into is not None:
            for engine in _simpler_engines(operation.into):
                simpler = replace(operation, into=engine)
                yield replace(scenario, operations=(*operations[:place], simpler, *operations[place + 1 :]))


def _simpler_engines(engine: EngineSpec) -> Iterator[EngineSpec]:
    for place, (name, value) in enumerate(engine.options):
        if not (name == "sharding" and value == "hybrid_shard"):  # its axes have other names
            yield replace(engine, options=engine.options[:place] + engine.options[place + 1 :])
    if engine.transport != "shared_memory" and not engine.name.startswith("torch"):
        yield replace(engine, transport="shared_memory")


def _simpler_modules(module: ModuleSpec) -> Iterator[ModuleSpec]:
    for gone in range(len(module.blocks)):
        path = tuple(index - (index > gone) for index in module.path if index != gone)
        yield replace(module, blocks=module.blocks[:gone] + module.blocks[gone + 1 :], path=path)
    for place in range(len(module.path)):
        yield replace(module, path=module.path[:place] + module.path[place + 1 :])
    for place, block in enumerate(module.blocks):
        for simpler in (*_by_default(block), *((BlockSpec(),) if block != BlockSpec() else ())):
            yield replace(module, blocks=(*module.blocks[:place], simpler, *module.blocks[place + 1 :]))
    for simpler in _by_default(module):
        if simpler.blocks == module.blocks and simpler.path == module.path:
            yield simpler


def _by_default(value: Any) -> Iterator[Any]:
    assert is_dataclass(value)
    assert not isinstance(value, type)
    for field in fields(value):
        if getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})
