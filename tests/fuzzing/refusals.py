"""What an engine may refuse that plain torch does: what the package documents, where it documents it."""

import re

from shardlab.vocabulary import TOLD
from tests.fuzzing.modules import BRANCH_KINDS, Planted
from tests.fuzzing.optimizers import WHOLE
from tests.fuzzing.world import World

DOCUMENTED = (
    r"the layout over ranks is fixed; build a new",
    r"load: leave 'with engine\.full_params\(\):' first",
    r"(backward|step): it was called inside ",
)
"""Refusals of operations, wherever they come; others are in ``is_documented``."""
IN_PARTS = (r"it comes in parts.*use_reentrant=False", r"parameter .* is sharded: ")
"""Refusals of reentrant checkpointing, which brings a gradient in parts where a weight is used more than once."""
MEET = r" on rank \d of the group meets "
"""What all ranks are told of whom one has left alone; their communicator is of no use any more."""
OF_OPTIMIZERS = (
    r"looks at whole tensors, and 'elements' cuts through them; use one of",
    r"looks at the whole model, so it cannot be sharded; use",
    r"looks at more than one element at a time, and the model's parameters are slices",
)
"""Refusals of an optimizer that looks at more than one element, when an engine is built."""


class Different(AssertionError):  # noqa: N818 - it is an answer
    """A rank has found that the engine is not as one process."""


def is_documented(error: Exception, world: World) -> bool:
    """Whether the package documents that it refuses this, here."""
    if isinstance(error, Planted):
        return False
    if TOLD in str(error):
        return True  # the rank that raised is asked itself
    if "modified by an inplace operation" in str(error):
        return world.may_clash
    if "it was changed in place" in str(error):
        return world.gradients == "changed"
    if _matches(error, IN_PARTS):
        return refuses_parts(error, world)
    if refuses_forward(error):
        return world.ours.spec.rounds
    if _matches(error, (MEET,)):
        return world.left_alone or _orders_may_differ(world)
    return is_about_optimizer(error, world.ours.optimizer_spec.kind) or _matches(error, DOCUMENTED)


def refuses_parts(error: Exception, world: World) -> bool:
    """Whether it refuses a gradient in parts, where one may come so: on each rank that has used it, by itself."""
    # Where parameters are rounded a look at the full ones, between two forwards, parts their gradients too.
    spec, blocks = world.ours.spec, world.ours.module_spec.blocks
    is_forgotten = world.has_stale and spec.kind == "fsdp"
    may_be = spec.rounds or is_forgotten or any("reentrant" in block.checkpoint for block in blocks)
    return may_be and _matches(error, IN_PARTS)


def refuses_at_once(error: Exception) -> bool:
    """Whether nothing has been computed, by a forward or by a recomputation, before it was refused."""
    return refuses_forward(error) or "it was changed in place" in str(error)


def refuses_forward(error: Exception) -> bool:
    """Whether it refuses to compute inside ``full_params()``, where parameters do not have the dtype for that."""
    return "forward: it was called inside 'with engine.full_params():'" in str(error)


def has_met(error: Exception) -> bool:
    return _matches(error, (MEET,))


def _orders_may_differ(world: World) -> bool:
    """Whether FSDP documents that the ranks' collectives may differ, where they use different parameters.

    If units differ; or within a unit, if it is not known before the end which parameters a backward leaves out.
    """
    module, spec, options = world.ours.module_spec, world.ours.spec, dict(world.ours.spec.options)
    if spec.kind != "fsdp" or not any(block.kind in BRANCH_KINDS for block in module.blocks):
        return False
    units_differ = options.get("wrap") in (5, "every") and options.get("sharding") != "no_shard"
    return units_differ or world.is_plain or any("reentrant" in block.checkpoint for block in module.blocks)


def is_about_optimizer(error: Exception, kind: str) -> bool:
    """Whether an engine refuses this kind of optimizer, which looks at more than one element."""
    return kind in WHOLE and _matches(error, OF_OPTIMIZERS)


def check_refusal(error: Exception) -> str:
    """A habit may be refused, in a sentence that says what to write instead."""
    if "engine." not in str(error):
        raise Different(f"a refusal that does not say what to write instead: {first_line(error)}") from error
    return first_line(error)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _matches(error: Exception, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, str(error)) for pattern in patterns)
