"""What is left out of the scenarios for now, and why; one line switches each on.

A scenario is made of anything; ``sift`` takes out what belongs to a feature that is off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fuzzing.modules import BlockSpec

if TYPE_CHECKING:
    from tests.fuzzing.run import Scenario

OFF: dict[str, str] = {}
"""Features that are off, with the reason. Delete a line to switch it on."""

FEATURES = frozenset({
    "overwrite",  # a module overwrites in place what autograd has saved
})  # fmt: skip
ALL = FEATURES
ON = FEATURES.difference(OFF)


def sift(scenario: Scenario, features: frozenset[str]) -> Scenario:
    """The scenario without what belongs to features that are off."""
    module = scenario.module
    if "overwrite" not in features:
        blocks = tuple(BlockSpec(checkpoint=b.checkpoint, frozen=b.frozen) if b.kind == "overwrite" else b
                       for b in module.blocks)  # fmt: skip
        module = replace(module, blocks=blocks)
    return replace(scenario, module=module)
